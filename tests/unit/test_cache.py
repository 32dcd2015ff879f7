"""The token cache: whole or not there, checked at every opening, safe for several processes, clear about places it cannot use."""

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from thalweg import data
from thalweg.data.text import cache as token_cache
from thalweg.data.text import task as text_task
from thalweg.errors import InputError
from thalweg.records import folders

PROSE = "".join(f"This is line {i} of a small text.\n" for i in range(300))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text(PROSE)
    return tmp_path / "a.txt"


@pytest.fixture
def load(text, tmp_path):
    return lambda **kwargs: data.load(
        f"text:{text}", **({"tokenizer": "byte", "cache_dir": tmp_path / "cache"} | kwargs)
    )


@pytest.fixture
def builds(monkeypatch):
    """Counts how often tokens are made."""
    calls = []
    real = text_task.encode_source
    monkeypatch.setattr(text_task, "encode_source", lambda *a: calls.append(1) or real(*a))
    return calls


def test_made_once_and_mapped(load, builds):
    first, second = load(), load()
    assert len(builds) == 1
    assert isinstance(second.cache.tokens["train"], np.memmap) and not second.cache.tokens["train"].flags.writeable
    assert second.cache.tokens["train"].dtype == np.uint16
    assert (first.fingerprint, first.nulls()) == (second.fingerprint, second.nulls())
    assert second.notes == ()


def test_the_key_follows_what_tokens_depend_on(load, builds, text, monkeypatch):
    folders = {load().cache.folder, load(tokenizer="bpe", vocab_size=300).cache.folder, load(tokenizer="bpe", vocab_size=301).cache.folder,
               load(max_bytes=5000).cache.folder, load(max_tokens=100).cache.folder}  # fmt: skip
    text.write_text(PROSE.replace("line 7 ", "line seven "))
    folders.add(load().cache.folder)
    monkeypatch.setattr(token_cache, "SCHEMA", token_cache.SCHEMA + 1)
    folders.add(load().cache.folder)
    assert len(folders) == len(builds) == 7


def test_what_lies_in_the_folder(load):
    folder = load().cache.folder
    assert {p.name for p in folder.iterdir()} == {"train.bin", "valid.bin", "tokenizer.json", "meta.json"}
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["making"]["schema"] == token_cache.SCHEMA and meta["making"]["split"].startswith("the last 0.05")
    assert set(meta["content"]) == {"train", "valid"} and meta["tokenizer"] == load().tokenizer.digest
    assert [p for p in folder.parent.iterdir() if "making" in p.name] == []


def cut(folder):
    with (folder / "train.bin").open("r+b") as file:
        file.truncate(100)


def edit_tokens(folder):
    with (folder / "valid.bin").open("r+b") as file:
        file.seek(11)
        file.write(b"\x01")


def edit_meta(folder):
    path = folder / "meta.json"
    path.write_text(path.read_text().replace('"unigram_entropy": ', '"unigram_entropy": 1'))


def cut_meta(folder):
    (folder / "meta.json").write_text((folder / "meta.json").read_text()[:200])


def foreign_meta(folder):
    (folder / "meta.json").write_text("[1, 2]")


def edit_tokenizer(folder):
    (folder / "tokenizer.json").write_text('{"thalweg": "byte" }')


def remove(name):
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        edit_tokens,
        edit_meta,
        cut_meta,
        foreign_meta,
        edit_tokenizer,
        remove("valid.bin"),
        remove("meta.json"),
        remove("tokenizer.json"),
    ],
)
def test_a_damaged_cache_is_made_anew_and_says_so(load, builds, caplog, damage):
    first = load()
    damage(first.cache.folder)
    with caplog.at_level(logging.WARNING, "thalweg.cache"):
        second = load()
    assert len(builds) == 2 and len(second.notes) == 1 and "it is made anew" in second.notes[0]
    assert caplog.messages == list(second.notes)
    assert second.fingerprint == first.fingerprint and second.nulls() == first.nulls()
    assert load().notes == () and len(builds) == 2


def test_a_cache_of_other_making_in_its_place_is_noticed(load, builds):
    first, other = load(), load(max_bytes=5000)
    shutil.rmtree(first.cache.folder)
    shutil.copytree(other.cache.folder, first.cache.folder)
    again = load()
    assert "not what its record says" in again.notes[0] and again.describe()["tokens"] == first.describe()["tokens"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_not_ours_is_refused_and_kept(load, kind):
    folder = load().cache.folder
    stranger = folder / "thesis.tex"
    if kind == "file":
        shutil.rmtree(folder)
        stranger = folder
    stranger.write_text("years of work")
    with pytest.raises(InputError, match="move it away"):
        load()
    assert stranger.read_text() == "years of work"


def test_large_files_are_checked_by_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "WHOLE", 1000)
    monkeypatch.setattr(folders, "SAMPLE", 16)
    path = tmp_path / "x.bin"
    content = np.random.default_rng(0).bytes(50_000)
    path.write_bytes(content)
    base = folders.digest_of_file(path)
    assert folders.digest_of_file(path) == base
    for place in (0, 49_999):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert folders.digest_of_file(path) != base
    path.write_bytes(content + b"\0")
    assert folders.digest_of_file(path) != base


def test_leftovers_of_a_killed_process_are_swept(load):
    folder = load().cache.folder
    shutil.rmtree(folder)
    left = folder.parent / f".{folder.name}.making-abc"
    left.mkdir()
    (left / "train.bin").write_text("half")
    load()
    assert not left.exists()


def test_a_failed_making_leaves_nothing(load, monkeypatch, tmp_path):
    def fail(source, tokenizer, folder, max_tokens):
        (folder / "train.bin").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(text_task, "encode_source", fail)
    with pytest.raises(KeyboardInterrupt):
        load()
    assert [p for p in (tmp_path / "cache" / "text").iterdir() if p.suffix != ".lock"] == []


def test_a_full_disk_is_one_clear_line(load, monkeypatch, tmp_path):
    def full(source, tokenizer, folder, max_tokens):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(text_task, "encode_source", full)
    with pytest.raises(InputError, match=r"cannot be written: No space left on device; make room"):
        load()
    assert [p for p in (tmp_path / "cache" / "text").iterdir() if p.suffix != ".lock"] == []


def test_two_processes_that_race_make_it_once(text, tmp_path):
    script = (
        "import logging, sys; logging.basicConfig(level=20, stream=sys.stdout)\n"
        "from thalweg import data; from thalweg.data.text import task, encoding\n"
        "real = task.encode_source\n"
        "def slow(*a):\n"
        "    import time; print('MADE', flush=True); time.sleep(0.5); return real(*a)\n"
        "task.encode_source = slow\n"
        f"t = data.load('text:{text}', tokenizer='byte', cache_dir='{tmp_path / 'c'}')\n"
        "assert not {'tokenizers', 'datasets', 'transformers'} & set(sys.modules)  # lazy: bytes need none of them\n"
        "print('PRINT', t.fingerprint, t.cache.tokens['train'][:5].tolist(), t.notes)\n"
    )
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)
    ]
    out = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(text.count("MADE") for text in out) == 1
    prints = {next(line for line in text.splitlines() if line.startswith("PRINT")) for text in out}
    assert len(prints) == 1 and prints.pop().endswith("()")


def test_the_place_of_the_cache(monkeypatch, load, tmp_path):
    monkeypatch.setenv("THALWEG_CACHE", str(tmp_path / "by_variable"))
    assert load(cache_dir=None).cache.folder.is_relative_to(tmp_path / "by_variable")
    assert load().cache.folder.is_relative_to(tmp_path / "cache")  # what is given wins
    monkeypatch.delenv("THALWEG_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert data.cache_folder() == tmp_path / "home" / ".cache" / "thalweg"
    assert load(cache_dir=None).cache.folder.is_relative_to(tmp_path / "home" / ".cache" / "thalweg")
    assert data.cache_folder("~/x") == tmp_path / "home" / "x"


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_a_chosen_place_that_cannot_be_written_is_refused(load, text, monkeypatch, by):
    place = text / "cache"  # below a file
    if by == "variable":
        monkeypatch.setenv("THALWEG_CACHE", str(place))
    with pytest.raises(InputError, match=r"cannot be written.*give another by cache_dir or THALWEG_CACHE"):
        load(cache_dir=place if by == "argument" else None)


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "Permission denied"), OSError(errno.EROFS, "Read-only file system")]
)
def test_a_home_that_cannot_be_written_gives_a_temporary_place_and_says_so(load, monkeypatch, tmp_path, caplog, error):
    monkeypatch.delenv("THALWEG_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    real = Path.mkdir

    def mkdir(self, *args, **kwargs):
        if self.is_relative_to(tmp_path / "home"):
            raise error
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    task = load(cache_dir=None)
    assert task.cache.folder.is_relative_to(tmp_path) and not task.cache.folder.is_relative_to(tmp_path / "home")
    assert len(task.notes) == 1 and "until this process ends" in task.notes[0] and error.strerror in task.notes[0]
    assert task.sampler("train", 16, 2).next()["input_ids"].shape == (2, 16)


def test_a_ready_cache_is_used_where_nothing_can_be_written(load, monkeypatch):
    first = load()

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    assert load().fingerprint == first.fingerprint
