"""A connection of another distribution: found by its entry point, held to the same battery, its mixing matrix guarded by it."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from thalweg import connections
from thalweg.connections import Site, Stream
from thalweg.connections.cost import measure_cost
from thalweg.errors import InputError, UnknownNameError
from thalweg.testing import CHECKS, check_connection
from thalweg.testing.battery import run, subjects_of
from thalweg.testing.mutants import MUTANTS

PLUGINS = Path(__file__).parents[1] / "third_party"


@pytest.fixture
def braid(monkeypatch: pytest.MonkeyPatch) -> type[Stream]:
    monkeypatch.syspath_prepend(str(PLUGINS))
    return import_module("thalweg_braid.connection").Braid


def test_an_unregistered_class_passes_the_battery(braid):
    report = check_connection(braid, options={})
    assert [result.name for result in report.results] == list(CHECKS)
    assert all(result.applies for result in report.results), str(report)
    check_connection(braid, options=braid.variants(), only=[name for name in CHECKS if name != "compiled"])
    assert "braid" not in connections.names()


def test_the_battery_guards_a_real_mixing_matrix(braid):
    subject = subjects_of(braid)[0]
    for name in (
        "mix_discarded",
        "mix_transposed",
        "mixing_detached",
        "coefficients_narrowed",
        "context_hidden",
        "start_missed",
    ):
        mutant = MUTANTS[name]
        assert mutant.applies(subject), name
        for result in run(subject.broken_by(mutant.mutate), mutant.caught_by):
            detached = result.name == "routing"  # values are right there
            assert not result.passed or (name == "mixing_detached" and detached), f"{name} passes {result}"


def test_reading_and_writing_weights_swapped_is_rejected(braid):
    def swap(stream: Stream) -> Stream:
        for site in stream.sites:

            def coefficients(state, inner=site.coefficients):
                found = inner(state)
                return found._replace(pre=found.post, post=found.pre)

            site.coefficients = coefficients
        return stream

    (result,) = run(subjects_of(braid)[0].broken_by(swap), ["reference"])
    assert not result.passed
    assert "output against the reference is off by" in result.reason


def test_a_symmetric_matrix_would_not_show_a_transposition(braid):
    """Why ``routing`` uses a directed cycle and random parameters: at the declared start the transposed mix is the same stream."""
    subject = subjects_of(braid)[0]
    broken = subject.broken_by(MUTANTS["mix_transposed"].mutate)
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sublayers = [torch.tanh] * 4
    assert torch.allclose(subject.start()(x, sublayers), broken.start()(x, sublayers), atol=1e-12)
    assert not torch.allclose(subject.random()(x, sublayers), broken.random()(x, sublayers), atol=1e-3)


def test_the_cost_of_many_streams_is_counted(braid):
    cost = measure_cost(braid, width=32, sites=Site.decoder(2), length=16)
    n, d, sites = 4, 32, 4
    assert cost.extra_parameters == sites * (2 * n + n * n) * (d + 1)
    products = sites * (2 * (2 * n + n * n) * d + 2 * n * d + 2 * n * n * d)
    assert products < cost.extra_flops_per_token < 2 * products


def installed(folder: Path, target: str = "thalweg_braid.plugin") -> dict[str, str]:
    """The plugin as an installer leaves it in ``folder``, and an environment that sees it."""
    shutil.copytree(PLUGINS / "thalweg_braid", folder / "thalweg_braid", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = folder / "thalweg_braid-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: thalweg-braid\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[thalweg.connections]\nbraid = {target}\n")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }


def test_an_installed_connection_is_found_and_passes_the_same_battery(tmp_path):
    code = """
import json
from thalweg import connections
from thalweg.connections import Site
from thalweg.testing import check_connection
stream = connections.create("braid", width=8, sites=Site.decoder(1), streams=2)
cheap = ["facts", "reference", "routing", "declared_start", "decoding", "storage"]
report = check_connection("braid", only=cheap)
print(json.dumps({"names": connections.names(), "class": type(stream).__name__, "checked": [str(r) for r in report.results if r.passed]}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=installed(tmp_path), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert {"braid", "additive"} <= set(seen["names"])
    assert seen["class"] == "Braid"
    assert len(seen["checked"]) == 12  # six checks, with the defaults and with the one variant


def test_a_broken_entry_point_takes_only_itself_away(tmp_path):
    """All others are listed with one line about it; who asks for it by name gets the reason; a slip beside it hears of it too."""
    code = """
import sys
from thalweg.cli import main
for args in (["list", "connections"], ["show", "connection", "braid"], ["show", "connection", "braids"]):
    print(main(args))
    print("--", file=sys.stderr)
"""
    env = installed(tmp_path, "thalweg_braid.absent")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^additive\b", done.stdout, re.MULTILINE) and re.search(r"^mhc\b", done.stdout, re.MULTILINE)
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["0", "2", "2"]
    listed, asked, slipped = (part.strip() for part in done.stderr.split("--\n")[:3])
    broken = (
        "connection entry point 'braid' (thalweg_braid.absent) cannot be loaded: No module named 'thalweg_braid.absent'"
    )
    assert listed == f"warning: {broken}; fix or uninstall that package"
    assert asked == f"error: {broken}; fix or uninstall that package"
    assert slipped.startswith("error: unknown connection 'braids'") and slipped.endswith("Not loaded: braid.")


def test_what_is_no_connection_is_refused(braid):
    with pytest.raises(InputError, match="a subclass of Stream"):
        check_connection(int)  # type: ignore[arg-type] - the error under test
    with pytest.raises(UnknownNameError, match="streams"):
        check_connection(braid, options={"stream": 4})
