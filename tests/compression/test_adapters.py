"""Compressors of other libraries: the files that go in and out, with a library that is made up; the real ones are in ``tests/parity``."""

import json
import sys
from pathlib import Path

import pytest
import torch
from small_models import SAMPLES, fresh, ours

from thalweg.compression.adapters import LIBRARIES, compress_outside
from thalweg.compression.adapters.libraries import names
from thalweg.compression.adapters.running import SCRIPTS
from thalweg.errors import InputError

IDS = [list(row) for row in SAMPLES]

# Stands in for the Python of an environment: has every library; keeps the job; zeroes half of every map that it may touch.
STAND_IN = """
import json, sys
from pathlib import Path
if sys.argv[1] == "-c":
    sys.exit({missing})
import torch
from safetensors.torch import load_file, save_file
job = json.loads(Path(sys.argv[2]).read_text())
Path({kept!r}).write_text(json.dumps({{**job, "script": sys.argv[1], "rows": json.loads(Path(job["samples"]).read_text())}}))
{trouble}
weights = load_file(Path(job["model"]) / "model.safetensors")
changed = {{}}
for name, w in weights.items():
    if w.ndim == 2 and "layers" in name and name.removesuffix(".weight") not in job["ignore"]:
        w = w.clone()
        w[:, ::2] = 0
        changed[name] = w
save_file(changed, Path(job["output"]) / "weights.safetensors")
Path(job["output"], "result.json").write_text(json.dumps({{"versions": {{"made up": "1"}}, "errors": {errors}}}))
"""


@pytest.fixture
def environment(tmp_path):
    def make(missing=0, trouble="", errors="{}"):
        program = tmp_path / "program.py"
        kept = tmp_path / "job.json"
        program.write_text(STAND_IN.format(missing=missing, kept=str(kept), trouble=trouble, errors=errors))
        python = tmp_path / "bin" / "python"
        python.parent.mkdir(exist_ok=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        python.chmod(0o755)
        return tmp_path, kept

    return make


def test_the_weights_that_come_back_take_the_place_of_ours(environment):
    where, kept = environment()
    model, before, told = fresh(), fresh().state_dict(), []
    made = compress_outside(
        model,
        "llmcompressor:wanda",
        environment=where,
        calibration=IDS,
        skip="0",
        source="small",
        tell=told.append,
        sparsity="2:4",
    )
    job = json.loads(kept.read_text())
    assert (
        job["script"].endswith("llmcompressor_script.py")
        and job["method"] == "wanda"
        and job["options"] == {"sparsity": "2:4"}
    )
    assert job["rows"] == IDS
    assert (
        "lm_head" in job["ignore"]
        and "model.layers.0.mlp.up_proj" in job["ignore"]
        and "model.layers.1.mlp.up_proj" not in job["ignore"]
    )
    assert not Path(job["model"]).exists() and len(told) == 1
    changed = {n for n, p in model.state_dict().items() if not torch.equal(p, before[n])}
    assert changed == {f"{row.name}.weight" for row in made.record.linears} and len(changed) == 14
    row = made.record.linears[0]
    w = before[f"{row.name}.weight"]
    assert row.sparsity == 0.5 and row.relative_error == pytest.approx(
        float(w[:, ::2].square().sum() / w.square().sum()), rel=1e-5
    )
    assert row.bits_per_weight == 9 and made.record.method == "llmcompressor:wanda" and made.record.skipped == (0,)
    assert made.record.provenance["library"] == {"made up": "1"}


def test_errors_in_the_scaling_of_the_library_are_its_own(environment):
    where, _ = environment(errors='{"model.layers.0.self_attn.q_proj": [0.25, 0.5]}')
    record = compress_outside(fresh(), "llmcompressor:awq", environment=where, calibration=IDS, group=8).record
    assert (record.linears[0].mean_square_error, record.linears[0].relative_error) == (0.25, 0.5)
    assert "own scaling" in record.notes[0]


TROUBLE = {
    "it fails": (
        {"trouble": "raise ValueError('no such scheme')"},
        "failed in its own environment: ValueError: no such scheme; the model is as it was",
    ),
    "it is not there": ({"missing": 1}, "has no torchao; make the environment: python3 -m venv"),
    "other weights": (
        {
            "trouble": "from pathlib import Path; save_file({'x': torch.zeros(2)}, Path(job['output']) / 'weights.safetensors'); "
            "Path(job['output'], 'result.json').write_text('{\"versions\": {}, \"errors\": {}}'); sys.exit()"
        },
        "gave back x",
    ),
}


@pytest.mark.parametrize("case", TROUBLE)
def test_what_goes_wrong_there_is_one_line_and_nothing_changes(environment, case):
    values, says = TROUBLE[case]
    model, before = fresh(), fresh().state_dict()
    with pytest.raises(Exception, match=r"gave back x|failed in its own|has no torchao") as raised:
        compress_outside(model, "torchao:int8", environment=environment(**values)[0])
    assert says in str(raised.value) and "\n" not in str(raised.value)
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())


WRONG = [
    ("llmcompressor:wanda", {}, "needs to see text"),
    ("llmcompressor:wanda", {"calibration": [[1] * 65]}, "has 65 tokens, this model takes 64 at most"),
    ("llmcompressor:awq", {"bits": 3}, "stores 4 or 8 bits, got 3"),
    ("torchao:wanda", {"sparsity": "1:4"}, "half of every run"),
    ("torchao:int8", {"bits": 8}, "unknown key"),
]


@pytest.mark.parametrize(("method", "options", "says"), WRONG)
def test_values_that_cannot_be(environment, method, options, says):
    with pytest.raises(InputError, match=says):
        compress_outside(fresh(), method, environment=environment()[0], **options)


def test_weights_that_are_not_finite_are_named_before_a_process_starts(environment):
    where, kept = environment()
    model = fresh()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    with pytest.raises(InputError, match=r"^small: model\.norm\.weight holds 1 value that is NaN or infinite"):
        compress_outside(model, "torchao:int8", environment=where, source="small")
    assert not kept.exists()


def test_models_that_other_libraries_do_not_open(environment):
    for model in (ours(), fresh("bert")):
        with pytest.raises(InputError, match="opens decoders of transformers"):
            compress_outside(model, "torchao:int8", environment=environment()[0])


def test_every_method_has_its_script_which_imports_nothing_of_ours():
    assert len(names()) == 5
    for library in LIBRARIES.values():
        text = (SCRIPTS / library.script).read_text()
        assert "thalweg" not in text.split('"""', 2)[2]
        assert all(f'"{name}"' in text for name in library.methods if name in ("wanda", "int8"))
