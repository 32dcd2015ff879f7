"""Measurements and the files below them: round trips, strictness, crashes, full disks, foreign content."""

import errno
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from thalweg.errors import CheckpointError, InputError, MissingExtraError, UnknownNameError
from thalweg.records import SCHEMA_VERSION, Measurement, Measurements, append_line, append_lines, atomic_write_text
from thalweg.records.export import check_format
from thalweg.records.measurements import FIELDS
from thalweg.records.provenance import bitwise_differences, collect

FULL = {
    "unit": "nats",
    "site": "layers.3.attention",
    "layer": 3,
    "head": 1,
    "stream": "mean",
    "step": 40,
    "n": 16,
    "low": 0.25,
    "high": 0.5,
    "interval": "mean +- sd",
    "dtype": "float64",
    "run": "r",
    "arm": "mgt",
    "seed": 2,
    "model": "m",
    "branch": "attention",
    "split": "valid",
    "null": 0.8,
    "null_kind": "Gaussian of the same shape",
}


def sample() -> Measurements:
    rows = Measurements()
    rows.add("effective_rank", 0.375, **FULL)
    rows.add("rms", math.nan, layer=0, stream=0)
    rows.add("rms", math.inf, low=-math.inf, site="über\u2028all")
    return rows


def test_importing_records_loads_no_torch():
    code = "import sys, thalweg.records, thalweg.records.provenance; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_have_the_agreed_fields():
    agreed = {"measure", "value", *FULL}
    assert set(FIELDS) == agreed
    assert sample().to_rows()[0] == {"measure": "effective_rank", "value": 0.375, **FULL}


def test_round_trip_through_a_file(tmp_path):
    path = tmp_path / "new" / "m.jsonl"
    sample().save(path)
    assert Measurements.load(path) == sample()
    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == {"schema": SCHEMA_VERSION, "kind": "measurements"}
    assert all("NaN" not in line or '"NaN"' in line for line in lines)  # strict JSON: jq and other readers can parse it
    assert list(path.parent.iterdir()) == [path]


def test_tensors_and_numpy_scalars_become_plain_numbers():
    row = Measurement("rms", torch.tensor(0.5), layer=np.int64(3), low=np.float32(0.25), stream=np.int32(1))
    assert (type(row.value), type(row.layer), type(row.low), type(row.stream)) == (float, int, float, int)
    assert json.loads(row.to_line()) == {"measure": "rms", "value": 0.5, "layer": 3, "low": 0.25, "stream": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"value": "0.5"},
        {"value": None},
        {"value": True},
        {"value": torch.zeros(3)},
        {"value": [1.0]},
        {"layer": 1.0},
        {"seed": True},
        {"site": None},
        {"measure": ""},
        {"stream": 1.5},
        {"null": "0.8"},
    ],
)
def test_wrong_types_are_refused_in_one_line(fields):
    with pytest.raises(InputError) as caught:
        Measurement(**{"measure": "rms", "value": 1.0, **fields})
    assert "\n" not in str(caught.value)


def test_unknown_field_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'layer'"):
        Measurements().add("rms", 1.0, layr=3)
    with pytest.raises(UnknownNameError):
        sample().where(lyer=0)


def test_where_selects_by_equality():
    assert [row.value for row in sample().where(measure="effective_rank", layer=3)] == [0.375]
    assert len(sample().where(measure="rms")) == 2
    assert len(sample().where(layer=None)) == 1


def test_stamp_fills_and_never_overwrites():
    stamped = sample().where(measure="rms").stamped(run="a", arm="mgt", seed=0)
    assert {(row.run, row.arm, row.seed) for row in stamped} == {("a", "mgt", 0)}
    assert stamped.stamped(run="a") == stamped
    with pytest.raises(InputError, match="run='a' already"):
        stamped.stamped(run="b")


def test_pandas_table_or_a_clear_error():
    try:
        import pandas
    except ImportError:
        with pytest.raises(MissingExtraError, match="pandas"):
            sample().to_pandas()
        return
    frame = sample().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == list(FIELDS) and len(frame) == 3


def test_every_torn_last_line_is_passed_over(tmp_path):
    path = tmp_path / "m.jsonl"
    sample().save(path)
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(start, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert len(Measurements.load(path)) == 2
    path.write_bytes(whole[:-1])  # whole but for its newline, as an editor leaves it
    assert Measurements.load(path) == sample()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", InputError),
        (b"not json\n", CheckpointError),
        (b"\x00\xff\xfe\x80\n", CheckpointError),
        (b"[1, 2]\n", CheckpointError),
        (b'{"a": 1}\n', InputError),
        (b'{"schema": "1", "kind": "measurements"}\n', InputError),
        (b'{"schema": 2, "kind": "measurements"}\n', InputError),
        (b'{"schema": 1, "kind": "measurements"}\n{"measure": "rms"}\n', InputError),
        (b'{"schema": 1, "kind": "measurements"}\n{"measure": "rms", "value": 1, "__class__": 1}\n', InputError),
        (b'{"schema": 1, "kind": "measurements"}\n{"measure": "rms", "value": {"x": 1}}\n', InputError),
        (b'{"schema": 1, "kind": "measurements"}\n{"measure": 3, "value": 1}\n', InputError),
        (b'{"schema": 1, "kind": "measurements"}\n{broken\n{"measure": "rms", "value": 1}\n', CheckpointError),
        (b"[" * 100_000 + b"\n", CheckpointError),
        (b'{"schema": ' + b"9" * 5000 + b"}\n", CheckpointError),
    ],
)
def test_foreign_content_is_refused_in_one_line(tmp_path, content, error):
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    with pytest.raises(error) as caught:
        Measurements.load(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value) and len(str(caught.value)) < 600


def test_newer_schema_says_upgrade(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"schema": 2, "kind": "measurements"}\n')
    with pytest.raises(InputError, match="upgrade thalweg"):
        Measurements.load(path)


def test_missing_file_and_folder_are_named(tmp_path):
    with pytest.raises(InputError, match="no such file of measurements"):
        Measurements.load(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="is a folder"):
        Measurements.load(tmp_path)


@pytest.mark.parametrize("call", ["write", "fsync", "open"])
def test_full_disk_keeps_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "f.txt"
    atomic_write_text(path, "old")

    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(InputError, match="no space left") as caught:
        atomic_write_text(path, "new")
    monkeypatch.undo()
    assert str(path) in str(caught.value)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_an_interrupted_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f.txt"
    atomic_write_text(path, "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        atomic_write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def partial_writer(monkeypatch, taken: int):
    """os.write that takes ``taken`` bytes once, then finds the disk full."""
    write, calls = os.write, []

    def partial(descriptor, data):
        if calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        calls.append(taken)
        return write(descriptor, bytes(data)[:taken])

    monkeypatch.setattr(os, "write", partial)


def test_full_disk_during_an_append_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    append_line(path, '{"a": 1}')
    partial_writer(monkeypatch, taken=4)
    with pytest.raises(InputError, match="no space left"):
        append_lines(path, ['{"b": 2}', '{"c": 3}'])
    monkeypatch.undo()
    assert path.read_text() == '{"a": 1}\n'
    append_line(path, '{"d": 4}')
    assert path.read_text() == '{"a": 1}\n{"d": 4}\n'


def test_short_writes_are_completed(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:3]))
    append_line(tmp_path / "m.jsonl", '{"long": "line"}')
    atomic_write_text(tmp_path / "f.txt", "0123456789")
    assert (tmp_path / "m.jsonl").read_text() == '{"long": "line"}\n'
    assert (tmp_path / "f.txt").read_text() == "0123456789"


@pytest.mark.parametrize(
    ("tail", "kept"), [('{"b": "x', ""), ("{", ""), ('{"b": 2}', '{"b": 2}\n'), ("\x00" * 200_000, ""), ("\n", "\n")]
)
def test_an_append_after_a_crash_starts_on_its_own_line(tmp_path, tail, kept):
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": 1}\n' + tail)
    append_line(path, '{"c": 3}')
    assert path.read_text() == '{"a": 1}\n' + kept + '{"c": 3}\n'


def test_a_record_is_one_line(tmp_path):
    with pytest.raises(InputError, match="line break"):
        append_line(tmp_path / "m.jsonl", '{"a":\n1}')
    assert not (tmp_path / "m.jsonl").exists()


def test_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        atomic_write_text(tmp_path / "file" / "below", "x")
    with pytest.raises(InputError, match="cannot be written"):
        append_line(tmp_path, "{}")


def test_provenance_is_plain_and_knows_what_breaks_bitwise_resume():
    now = collect()
    assert json.loads(json.dumps(now)) == now
    assert now["threads"] == torch.get_num_threads() and now["versions"]["torch"] == torch.__version__
    assert bitwise_differences(now, now) == []
    other = {**now, "threads": -1, "command": "another", "versions": {**now["versions"], "torch": "1.0"}}
    assert bitwise_differences(now, other) == [
        f"threads {now['threads']} -> -1",
        f"torch {torch.__version__} -> 1.0",
    ]


def test_a_kept_command_names_no_folder(monkeypatch):
    words = [
        "/opt/bin/thalweg",
        "train",
        "/home/a/p.toml",
        "--records=/home/a/r",
        "-o",
        "/home/a/out",
        "--lr=1e-3",
        "x=/y/z",
        "/a=b/c",
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert collect()["command"] == "thalweg train p.toml --records=r -o out --lr=1e-3 x=z c"


@pytest.mark.parametrize(("package", "name"), [("pandas", "r.csv"), ("pandas", "r.parquet"), ("pyarrow", "r.parquet")])
def test_an_ending_that_nothing_here_can_write_is_told_beforehand(monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package} \(for \.\w+; \.jsonl needs nothing\)"):
        check_format(name)
    assert check_format("r.jsonl").name == "r.jsonl"
