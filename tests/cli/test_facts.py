"""Deviations and choices in a report are those that hold under the options used."""

import pytest

from thalweg import connections
from thalweg.cli.facts import applies, citations, deviations


@pytest.mark.parametrize(
    ("connection", "options", "text", "holds"),
    [
        ("mgt", {}, "gate_open divides the gate by its start value", False),
        ("mgt", {"gate_open": True}, "gate_open divides the gate by its start value", True),
        ("delta", {}, "value='code' is the published code", False),
        ("delta", {"value": "code"}, "value='code' is the published code", True),
        ("mgt", {"preset": "stable"}, "stable: W_beta 0", True),
        ("mgt", {"preset": "stable"}, "residual: W_beta 0", False),
        ("mgt", {}, "W_gate: no bias", True),
        ("mgt", {}, "the input norm is the model's kind", True),
        ("keel", {"alpha": "layers"}, "alpha counts sublayers; the source is ambiguous", True),  # no flag
        ("tangent_projector", {}, "rank 4", True),
    ],
)
def test_what_begins_with_an_option_holds_where_it_is_set_so(connection, options, text, holds):
    assert applies(text, connections.make_options(connection, options)) == holds


def test_every_declared_condition_can_hold():
    """A misspelt option would hide its deviation for ever, or show it always."""
    own = connections.registry["mgt"].facts
    for preset in ("paper", "residual", "identity", "stable"):
        options = connections.make_options("mgt", {"preset": preset})
        assert sum(applies(text, options) for text in own.chosen) == len(own.chosen) - 3


def test_deviations_name_the_arms_for_which_they_hold():
    used = {
        "plain": ("mgt", {"preset": "residual"}),
        "open": ("mgt", {"preset": "residual", "gate_open": True}),
        "base": ("additive", {}),
    }
    found = deviations(used)
    assert "mgt (open) leaves its source: gate_open divides the gate by its start value" in found
    assert "mgt leaves its source: the input norm is the model's kind; the source says LayerNorm" in found
    assert "mgt, our choice: residual: W_beta 0, b_beta 0, alpha 0" in found
    assert not any("stable" in line for line in found)


def test_unknown_connections_and_options_of_another_version():
    assert deviations({"": ("no_such", {})}) == []
    every = deviations({"": ("mgt", {"no_such": 1})})
    assert any("stable" in line for line in every)
    assert any("paper:" in line for line in every)
    assert citations(["mgt", "no_such", "mgt"]) == [connections.registry["mgt"].facts.bibtex]
