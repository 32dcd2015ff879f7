"""Every registered connection, with its defaults and every variant, passes the standard battery; and the battery reports well."""

import pytest
import torch

from thalweg import connections
from thalweg.connections import StreamSite
from thalweg.connections.additive import Additive, AdditiveSite
from thalweg.errors import UnknownNameError
from thalweg.testing import CHECKS, check_connection

PAIRS = [
    pytest.param(name, options, id="-".join([name, *(f"{k}={v}" for k, v in options.items())]))
    for name in connections.names()
    for options in ({}, *connections.registry[name].variants())
]


@pytest.mark.parametrize(("name", "options"), PAIRS)
def test_connection(name, options):
    report = check_connection(name, options=options)
    assert [result.name for result in report.results] == list(CHECKS)


class Forgetful(StreamSite):
    """Writes the update and drops the stream."""

    def write(self, state, update, context):
        return update


class Broken(Additive):
    SiteModule = Forgetful


def test_a_broken_connection_is_told_what_broke():
    with pytest.raises(AssertionError) as caught:
        check_connection(Broken, only=["facts", "reference", "causality"])
    message = str(caught.value)
    assert message.startswith(
        "Broken breaks 1 of 3 checks:\n  reference: BROKEN: output against the reference is off by "
    )
    assert "input of sublayer 1 against the reference is off by" in message
    assert "causality" not in message


def test_without_raising_the_report_holds_every_result():
    report = check_connection(Broken, only=["facts", "reference", "routing"], raises=False)
    assert not report.passed
    assert [(r.name, r.passed, r.applies) for r in report.results] == [
        ("facts", True, True),
        ("reference", False, True),
        ("routing", True, False),
    ]
    assert [r.name for r in report.broken] == ["reference"]
    assert "routing: does not apply: one stream" in str(report)
    assert report.seconds > 0


def test_an_exception_is_a_finding():
    class Raising(AdditiveSite):
        def write(self, state, update, context):
            raise ValueError("no such thing\nas a second line")

    class Unwritable(Additive):
        SiteModule = Raising

    (result,) = check_connection(Unwritable, only=["shapes"], raises=False).results
    assert result.reason == "raises ValueError: no such thing"


def test_a_norm_slot_that_nothing_uses_is_a_finding():
    class Deaf(StreamSite):
        def write(self, state, update, context):
            return state + update

    class Heedless(Additive):
        SiteModule = Deaf

        def reference(self, embedding, sublayers, tokens=None):
            for site in self.sites:
                site.update_norm.kind = "none"  # heedless as well, so the two agree
            return super().reference(embedding, sublayers, tokens)

    (result,) = check_connection(Heedless, options={}, only=["slots"], raises=False).results
    assert "with update_norm: no gradient at the declared start: sites.0.update_norm.weight" in result.reason
    (result,) = check_connection("additive", options={"update_norm": True}, only=["slots"]).results
    assert not result.applies and "is on already" in result.reason


def test_options_are_one_set_or_several():
    several = [{"norm": "layernorm"}, {"update_norm": True}]
    report = check_connection("pre_norm", options=several, only=["shapes"])
    assert [result.options for result in report.results] == several
    assert check_connection("additive", options=several[0], only=["shapes"]).results[0].options == several[0]
    with pytest.raises(UnknownNameError, match=r"Did you mean 'additive\.update_norm'"):
        check_connection("additive", options={"update_nrm": True})


def test_an_unknown_check_is_refused():
    with pytest.raises(UnknownNameError, match="Did you mean 'causality'"):
        check_connection("additive", only=["causalty"])


def test_the_battery_leaves_the_random_state_and_the_default_dtype_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check_connection("additive", only=[name for name in CHECKS if name != "compiled"])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32


def test_every_check_says_what_it_claims():
    assert all(check.__doc__ and check.__doc__.strip().splitlines()[0].endswith(".") for check in CHECKS.values())
