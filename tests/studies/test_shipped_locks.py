"""Every lock that comes with the package is still what its plan resolves to, so that its records stay findable."""

import pytest

from thalweg import studies
from thalweg.studies import locking
from thalweg.studies.library import shipped_folder

LOCKS = sorted(shipped_folder().glob("*.lock.json"))


def test_there_are_locks():
    assert len(LOCKS) > 10


@pytest.mark.parametrize("path", LOCKS, ids=lambda p: p.name.removesuffix(".lock.json"))
def test_a_lock_is_what_the_plan_resolves_to(path):
    plan, scale = path.name.removesuffix(".lock.json").split(".", 1)
    study = studies.study(path.parent / f"{plan}.toml", scale)
    lock = locking.read(study.path, scale)
    assert locking.differences(study.plan, scale, study.lock_tables(), lock) == []


@pytest.mark.parametrize(
    "plan", ["edit-directions", "edit-encoder", "edit-masked", "edit-own", "edit-own-all", "edit-self"]
)
def test_records_of_edits_are_found(plan):
    done, wanted = studies.study(shipped_folder() / f"{plan}.toml", "small").progress()
    assert done == wanted


@pytest.mark.parametrize(
    ("plan", "scale"),
    [
        ("streams-gain", "small"),
        ("streams-ladder", "small"),
        ("streams-memory", "small"),
        *(("streams-sizes", scale) for scale in ("small", "small-2x", "small-4x")),
        *((f"streams-{name}", "smoke") for name in ("gain", "ladder", "memory", "sizes")),
    ],
)
def test_records_of_streams_are_found(plan, scale):
    done, wanted = studies.study(shipped_folder() / f"{plan}.toml", scale).progress()
    assert done == wanted


def test_records_of_compressions_are_found():
    done, wanted = studies.study(shipped_folder() / "compression-predicts.toml", "small").progress()
    assert done == wanted


@pytest.mark.parametrize(
    "plan", ["continuum-claims", "continuum-own", "growth-claims", "growth-sentiment", "prune-curves"]
)
def test_records_of_experiments_are_found(plan):
    done, wanted = studies.study(shipped_folder() / f"{plan}.toml", "small").progress()
    assert done == wanted
