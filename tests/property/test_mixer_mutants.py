"""The battery of mixers can fail: every bug is rejected, by every check that claims to see it, for the right reason."""

import pytest
from rejection import count_rejected

from thalweg import mixers
from thalweg.testing.mixers import CHECKS
from thalweg.testing.mixers.battery import run, subjects_of
from thalweg.testing.mixers.mutants import MUTANTS
from thalweg.testing.mixers.subjects import PREFERRED


def examined(name):
    """Every set of options, at the first two of the preferred numbers of streams that are served."""
    served = {}
    for subject in subjects_of(name, streams=PREFERRED):
        if subject.refusal() is None:
            served.setdefault(repr(subject.options), []).append(subject)
    first, second = ([found[i] for found in served.values() if len(found) > i] for i in range(2))
    return first + second


@pytest.mark.parametrize("name", mixers.names())
def test_every_applicable_mutant_is_rejected(name):
    assert count_rejected(name, examined(name), MUTANTS, run) > 15


def test_every_check_rejects_at_least_one_mutant():
    """``supports`` looks at the class, before there is a module to break; its own tests stand in test_mixer_battery.py."""
    assert {check for mutant in MUTANTS.values() for check in mutant.caught_by} == set(CHECKS) - {"supports"}


def test_which_mutants_apply_is_known():
    """So that no mutant stops applying in silence."""

    def absent(name):
        subjects = examined(name)
        return {m.name for m in MUTANTS.values() if not any(m.applies(subject) for subject in subjects)}

    parameters = {"state_lost", "start_of_parameters_lost"}
    assert absent("sinkhorn") == parameters | {
        "convergence_overclaimed",
        "sign_overclaimed",
        "start_dead_at_zero",
    }
    assert absent("unconstrained") == parameters | {
        "column_inexact",
        "column_sums_lost",
        "identity_overclaimed",
        "reach_overclaimed",
        "row_inexact",
        "row_sums_lost",
        "start_dead_at_zero",
        "start_saturated",
    }
    applies = set(MUTANTS) - absent("identity")
    assert {
        "entry_scaled",
        "row_inexact",
        "column_inexact",
        "identity_denied",
        "remembered",
        "excess_ignored",
    } <= applies
