"""The battery can fail: every bug that a connection can have is rejected, by every check that claims to see it, for the right reason."""

import pytest
import torch
from rejection import count_rejected
from torch import nn

from thalweg import connections
from thalweg.connections.additive import Additive, AdditiveSite
from thalweg.testing import CHECKS
from thalweg.testing.battery import run, subjects_of
from thalweg.testing.mutants import MUTANTS


def examined(name):
    """The defaults and every variant; with few iterations and streams, since the reference writes all in loops and no mutant lies in them."""
    usual = connections.option_defaults(name).get("mixer") == "sinkhorn"
    few = {"mixer_options": {"iterations": 2}, "streams": 3} if usual else {}
    return subjects_of(name, [few, *connections.registry[name].variants()])


@pytest.mark.parametrize("name", connections.names())
def test_every_applicable_mutant_is_rejected(name):
    assert count_rejected(name, examined(name), MUTANTS, run) > 15


def test_every_check_rejects_at_least_one_mutant():
    assert {check for mutant in MUTANTS.values() for check in mutant.caught_by} == set(CHECKS)


def test_which_mutants_apply_is_known():
    """So that no mutant stops applying in silence."""

    def absent(name: str) -> set[str]:
        subjects = subjects_of(name)
        return {m.name for m in MUTANTS.values() if not any(m.applies(subject) for subject in subjects)}

    many_streams = {"mix_discarded", "mix_transposed", "mixing_detached"}
    along_tokens = {"memory_dropped", "mask_ignored", "segments_ignored"}
    coefficients = {"context_hidden", "gate_detached", "gate_of_another_token", "coefficients_narrowed"}
    declared = {"start_missed", "silently_frozen"}
    assert absent("additive") == many_streams | along_tokens | coefficients | declared
    assert absent("highway") <= many_streams | along_tokens | declared
    assert absent("tangent_projector").isdisjoint(along_tokens)


class HeldSite(AdditiveSite):
    """A scalar that the first steps cannot reach, as behind a gate that is shut."""

    def __init__(self, width, site, options):
        super().__init__(width, site, options)
        self.held = nn.Parameter(torch.zeros(1))

    def write(self, state, update, context):
        return state + update * (1 + self.held**5)

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.zeros_(self.held)


class Held(Additive):
    SiteModule = HeldSite

    def frozen(self):
        return {"sites.*.held": "its gradient is of fifth order at the start"}

    def reference(self, embedding, sublayers, tokens=None):
        scaled = [lambda x, f=f, s=s: f(x) * (1 + s.held**5) for f, s in zip(sublayers, self.sites, strict=True)]
        return super().reference(embedding, scaled, tokens)


def test_a_true_declaration_of_frozen_parameters_is_accepted_and_a_silent_one_is_not():
    subject = subjects_of(Held)[0]
    assert all(result.passed for result in run(subject, ["reference", "dead_parameters", "moves"]))
    mutant = MUTANTS["silently_frozen"]
    assert mutant.applies(subject)
    (result,) = run(subject.broken_by(mutant.mutate), mutant.caught_by)
    assert result.reason.startswith("sites.0.held does not move within 3 steps")


def test_a_frozen_pattern_must_match_and_give_a_reason():
    class Misnamed(Held):
        def frozen(self):
            return {**super().frozen(), "sites.*.absent": "gone"}

    class Unreasoned(Held):
        def frozen(self):
            return {"sites.*.held": " "}

    for cls, reason in ((Misnamed, "matches no parameter"), (Unreasoned, "gives no reason")):
        (result,) = run(subjects_of(cls)[0], ["moves"])
        assert reason in result.reason
