"""Published settings that come with the package: they are what the papers state, and can be planned."""

import dataclasses
import json

import pytest

from thalweg import config
from thalweg.cli import main
from thalweg.models import size_of
from thalweg.models.size import flops, parameters
from thalweg.training import cost, presets
from thalweg.training.config import from_table

# mHC, arXiv 2512.24880 v2, Table 5: total and active parameters, vocabulary parameters, tokens
STATED = {
    "mhc-3b": (2.97e9, 612e6, 331e6, 39.3e9),
    "mhc-9b": (9.18e9, 1.66e9, 496e6, 105e9),
    "mhc-27b": (27.0e9, 4.14e9, 662e6, 262e9),
    "mhc-3b-1t": (2.97e9, 612e6, 331e6, 1.05e12),
}


def test_the_names():
    assert presets.names() == sorted(STATED)


@pytest.mark.parametrize("name", STATED)
def test_sizes_are_those_that_were_published(name):
    """Within what ordinary attention in place of latent attention changes; embeddings, of which a token uses one row, are not active."""
    total, active, vocabulary, tokens = STATED[name]
    wanted = from_table(config.read_toml(presets.find(f"preset:{name}")))
    model = wanted.decoder(129_280)
    parts = parameters(model)
    routed = parts["routed_experts"] // model.experts * (model.experts - model.active_experts)
    assert sum(parts.values()) == pytest.approx(total, rel=0.025)
    assert sum(parts.values()) - routed - parts["embedding"] == pytest.approx(active, rel=0.12)
    assert parts["embedding"] + parts["unembedding"] == pytest.approx(vocabulary, rel=2e-3)
    assert wanted.total_steps * wanted.tokens_per_step == pytest.approx(tokens, rel=2e-3)
    assert sum(flops(dataclasses.replace(model, connection="none", connection_options={}), 4096).values()) > 2 * active


def test_a_preset_can_be_planned_but_is_not_built_where_it_does_not_fit(capsys, monkeypatch):
    small = ["--depth", "2", "--data", "copy", "--sequence-length", "32", "--connection-options", "{}"]
    monkeypatch.setattr(cost, "MEMORY", cost.STATUS.with_name("nothing"))
    assert cost.free_memory(__import__("torch").device("cpu")) is None
    assert small


def test_an_unknown_preset_is_one_line(capsys):
    assert main(["train", "preset:mhc-3c", "--dry-run"]) == 2
    assert "unknown preset 'mhc-3c'. Did you mean 'mhc-3b'?" in capsys.readouterr().err
