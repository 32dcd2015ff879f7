"""Published settings that come with the package: they are what the papers state, and can be planned."""

import json
import tomllib

import pytest
import torch

from thalweg import config
from thalweg.cli import main
from thalweg.models.size import parameters
from thalweg.training import cost, plan, presets
from thalweg.training.config import from_table

# mHC, arXiv 2512.24880 v2, Table 5: total and active parameters, vocabulary parameters, tokens
STATED = {
    "mhc-3b": (2.97e9, 612e6, 331e6, 39.3e9),
    "mhc-9b": (9.18e9, 1.66e9, 496e6, 105e9),
    "mhc-27b": (27.0e9, 4.14e9, 662e6, 262e9),
    "mhc-3b-1t": (2.97e9, 612e6, 331e6, 1.05e12),
}


# He et al., arXiv 2609.15975: layers, heads, width, parameters as stated, and within what share the printed shapes give them
ACROSS = {
    "across-241m": (14, 15, 960, 241e6, 0.05),
    "across-296m": (14, 16, 1024, 296e6, 0.06),
    "across-436m": (16, 18, 1152, 436e6, 0.15),
    "across-528m": (18, 20, 1280, 528e6, 0.09),
    "across-1.4b": (24, 16, 2048, 1.4e9, 0.015),
    "across-2.7b": (32, 20, 2560, 2.7e9, 0.03),
}


def test_the_names():
    assert presets.names() == sorted({**STATED, **ACROSS})


@pytest.mark.parametrize("name", ACROSS)
def test_shapes_trained_across_the_stream_are_those_that_were_printed(name):
    depth, heads, width, total, within = ACROSS[name]
    wanted = from_table(config.read_toml(presets.find(f"preset:{name}")))
    model = wanted.decoder(50_304)
    assert (model.depth, model.heads, model.width, model.head_width * heads) == (depth, heads, width, width)
    assert sum(parameters(model).values()) == pytest.approx(total, rel=within)
    assert model.edits["attention_edit"].describe() == "value:full:0" and wanted.tokens_per_step == 524_288
    assert wanted.total_steps * wanted.tokens_per_step == pytest.approx(104.9e9 if total > 1e9 else 2.097e9, rel=1e-3)
    assert wanted.batch_size % (8 * wanted.accumulation) == 0  # 8 ranks
    plain = from_table(config.read_toml(presets.find(f"preset:{name}")) | {"attention_edit": "value:full:1"})
    assert not plain.decoder(50_304).edits


def test_the_plan_of_a_published_shape_shows_its_parameters(capsys):
    """Without a hub: any task with as many tokens shows the size; the run does not fit and is not timed, or the probe is left out."""
    wanted = from_table(config.read_toml(presets.find("preset:across-241m")) | {"data": "copy:vocab=50302"})
    planned = plan.plan_of(wanted, probe=False)
    assert planned.vocab_size == pytest.approx(50_304, abs=4) and planned.parameters == pytest.approx(251e6, rel=0.01)
    assert "edits       attention value:full:0: 0 parameters" in str(planned)


@pytest.mark.parametrize("name", STATED)
def test_sizes_are_those_that_were_published(name):
    """Within what grouped-query attention in place of latent attention changes; embeddings, of which a token uses one row, are not active."""
    total, active, vocabulary, tokens = STATED[name]
    wanted = from_table(config.read_toml(presets.find(f"preset:{name}")))
    model = wanted.decoder(129_280)
    parts = parameters(model)
    routed = parts["routed_experts"] // model.experts * (model.experts - model.active_experts)
    assert sum(parts.values()) == pytest.approx(total, rel=0.01)
    assert sum(parts.values()) - routed - parts["embedding"] == pytest.approx(active, rel=0.035)
    assert parts["embedding"] + parts["unembedding"] == pytest.approx(vocabulary, rel=2e-3)
    assert wanted.total_steps * wanted.tokens_per_step == pytest.approx(tokens, rel=2e-3)


def test_a_run_that_does_not_fit_is_planned_but_not_timed(capsys, monkeypatch, tmp_path):
    """No weight is made: the probe would take the memory that is not there."""
    monkeypatch.setattr(plan, "free_memory", lambda device: 2**20)
    monkeypatch.setattr(plan, "Engine", lambda *_: pytest.fail("the model was built"))
    file = tmp_path / "small.toml"  # the preset, with the sizes of a test
    text = presets.find("preset:mhc-3b").read_text()
    for big, little in (
        ("= 1280", "= 32"),
        ("= 16\n", "= 4\n"),
        ("= 8\n", "= 2\n"),
        ("= 128\n", "= 8\n"),
        ("= 896", "= 8"),
        ("depth = 12", "depth = 2"),
        ("= 4096", "= 32"),
    ):
        text = text.replace(big, little)
    file.write_text(text)
    assert main(["train", str(file), "--data", "copy", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "parameters for a token" in said and "time        not measured: 1.0 MiB are free" in said
    assert main(["train", str(file), "--data", "copy", "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["active_parameters"] < planned["parameters"] and "seconds" not in planned


def test_the_system_says_how_much_memory_is_free(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    monkeypatch.setattr(cost, "MEMORY", tmp_path / "meminfo")
    assert cost.free_memory(cpu) is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:     2048 kB\n")
    assert cost.free_memory(cpu) == 2**21


def test_layers_with_experts_from_the_command_line(capsys):
    asked = ["--layers", '["attention", "moe"]', "--model", "experts=6", "--model", "dense_layers=1", "--depth", "2"]
    assert main(["train", *asked, "--print-config"]) == 0
    wanted = from_table(tomllib.loads(capsys.readouterr().out)).decoder(50)
    assert [site.kind for site in wanted.sites] == ["attention", "feed_forward", "attention", "moe"]
    assert (wanted.experts, wanted.width) == (6, from_table({"depth": 2}).resolved_width)  # the dial is what it was


def test_an_unknown_preset_is_one_line(capsys):
    assert main(["train", "preset:mhc-3c", "--dry-run"]) == 2
    assert "unknown preset 'mhc-3c'. Did you mean 'mhc-3b'?" in capsys.readouterr().err
