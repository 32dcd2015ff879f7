"""Every registered mixer, with its defaults and every variant, passes the battery at 1 to 64 streams; and the battery reports well."""

import dataclasses

import pytest
import torch

from thalweg import mixers
from thalweg.errors import InputError, UnknownNameError
from thalweg.mixers.base import Claims, SquareMixer
from thalweg.mixers.sinkhorn import Sinkhorn
from thalweg.mixers.unconstrained import Unconstrained
from thalweg.testing import check_mixer
from thalweg.testing.mixers import CHECKS
from thalweg.testing.mixers.battery import SWEEP, subjects_of, swept
from thalweg.testing.mixers.subjects import MORE, SIZES

SUBJECTS = [
    pytest.param(
        name, subject, id="-".join([name, *(f"{k}={v}" for k, v in subject.options.items()), str(subject.streams)])
    )
    for name in mixers.names()
    for subject in subjects_of(name)
]


@pytest.mark.parametrize(("name", "subject"), SUBJECTS)
def test_mixer(name, subject):
    """A number of streams is served as claimed, or refused with a reason."""
    wanted = swept(subject)
    report = check_mixer(name, options=subject.options, streams=subject.streams, only=wanted)
    assert {result.name for result in report.results} == set(wanted)


@pytest.mark.parametrize("name", mixers.names())
def test_a_sweep_makes_every_check_of_every_mixer(name):
    assert {check for subject in subjects_of(name, {}) for check in swept(subject)} == set(CHECKS)


class Unfinished(mixers.registry["row_stochastic"]):
    """Its columns are never normalised, and nearly sum to one where the logits are small."""

    @property
    def claims(self):
        return dataclasses.replace(super().claims, columns="converging")


@pytest.mark.parametrize("streams", [3, 4, 8])
def test_a_marginal_that_nobody_normalises_does_not_converge(streams):
    with pytest.raises(AssertionError, match="in proportion, as if they were never normalised"):
        check_mixer(Unfinished, only=["marginals"], streams=streams)


@pytest.mark.parametrize("streams", [0, -1, True, 2.5, [4, 0]])
def test_numbers_of_streams_are_whole_and_positive(streams):
    with pytest.raises(InputError, match="streams must be whole numbers from 1, got"):
        check_mixer("sinkhorn", streams=streams)


class Leaky(Unconstrained):
    """Claims sums that it does not keep, and transposes."""

    claims = Claims(rows="exact")

    def forward(self, logits):
        return super().forward(logits).mT


def test_a_broken_mixer_is_told_what_broke():
    with pytest.raises(AssertionError) as caught:
        check_mixer(Leaky, only=["facts", "reference", "marginals", "spectral"], streams=3)
    message = str(caught.value)
    assert message.startswith(
        "Leaky breaks 2 of 4 checks:\n  reference with {'streams': 3}: BROKEN: output against the reference is off by "
    )
    assert "marginals with {'streams': 3}: BROKEN: sums of the rows at logits of 0.1 are off by " in message
    assert "claimed to be exact (allowed 1e-10)" in message
    assert "facts" not in message


def test_without_raising_the_report_holds_every_result():
    report = check_mixer(Leaky, only=["facts", "reference", "spectral"], streams=(2, 3), raises=False)
    assert report.name == "Leaky" and not report.passed
    found = [(r.name, r.options["streams"], r.passed, r.applies) for r in report.results]
    assert found == [
        ("facts", 2, True, True),
        ("reference", 2, False, True),
        ("spectral", 2, True, False),
        ("facts", 3, True, True),
        ("reference", 3, False, True),
        ("spectral", 3, True, False),
    ]
    assert "spectral with {'streams': 2}: does not apply: not claimed" in str(report)


def test_what_converges_is_measured_and_said():
    (result,) = check_mixer("sinkhorn", options={}, only=["marginals"], streams=4).results
    assert result.reason.startswith("columns (converging) by size of the logits off by ")
    assert "rows" not in result.reason  # exact, and asserted
    (result,) = check_mixer("sinkhorn", options={}, only=["reaches"], streams=3).results
    assert result.reason.startswith("birkhoff: within ")


def test_a_sum_that_never_converges_may_not_be_said_to():
    class Hopeful(Unconstrained):
        claims = Claims(rows="converging")

    (result,) = check_mixer(Hopeful, only=["marginals"], streams=4, raises=False).results
    assert "the rows are said to converge, but at logits of 0.01 they are off by" in result.reason


def test_too_many_streams_are_refused_with_their_cost():
    class Small(Sinkhorn):
        """Serves few."""

        @classmethod
        def supports(cls, streams, options):
            return f"it would take {streams**9:,} logits" if streams > 4 else None

    report = check_mixer(Small, options={}, only=["supports", "facts", "start"])
    assert [(r.name, r.options["streams"]) for r in report.results if r.name == "supports"] == [
        ("supports", n) for n in (*SIZES, *MORE)
    ]
    assert {r.options["streams"] for r in report.results if r.name == "start"} == {1, 2, 3, 4}
    assert "refused: it would take 134,217,728 logits" in str(report)
    (result,) = check_mixer(Small, options={}, only=["start"], streams=8).results
    assert not result.applies and result.reason == "8 streams are refused: it would take 134,217,728 logits"


@pytest.mark.parametrize(
    ("refusal", "builds", "reason"),
    [
        ("", False, "supports() refuses and does not say why"),
        ("too many streams", False, "the refusal names no number, neither cost nor need"),
        ("8! logits", True, "supports() refuses (8! logits), but the module is made"),
    ],
)
def test_a_refusal_that_says_nothing_is_a_finding(refusal, builds, reason):
    class Shy(Unconstrained):
        asked = 0

        @classmethod
        def supports(cls, streams, options):
            cls.asked += 1
            return None if builds and cls.asked > 2 else refusal

    (result,) = check_mixer(Shy, only=["supports"], streams=8, raises=False).results
    assert not result.passed and reason in result.reason


def test_a_mixer_that_serves_nobody_is_a_finding():
    class Closed(Unconstrained):
        @classmethod
        def supports(cls, streams, options):
            return f"{streams} is too many"

    report = check_mixer(Closed, raises=False)
    assert all("refuses every one of 1, 2, 3, 4, 8, 16 streams" in r.reason for r in report.broken)
    assert len(report.broken) == len(report.results) == len(SIZES) + len(MORE)


def test_an_exception_is_a_finding():
    class Raising(SquareMixer):
        facts = Unconstrained.facts
        claims = Claims()

        def forward(self, logits):
            raise ValueError("no such thing\nas a second line")

    (result,) = check_mixer(Raising, only=["purity"], streams=2, raises=False).results
    assert result.reason == "raises ValueError: no such thing"


def test_options_streams_and_checks_are_validated():
    several = [{"iterations": 2}, {"eps": 1e-3}]
    report = check_mixer("sinkhorn", options=several, only=["facts"], streams=2)
    assert [result.options for result in report.results] == [{"streams": 2, **given} for given in several]
    with pytest.raises(UnknownNameError, match=r"Did you mean 'sinkhorn\.iterations'"):
        check_mixer("sinkhorn", options={"iteration": 2})
    with pytest.raises(UnknownNameError, match="Did you mean 'marginals'"):
        check_mixer("sinkhorn", only=["marginal"])
    with pytest.raises(UnknownNameError, match="Did you mean 'sinkhorn'"):
        check_mixer("sinkhron")
    with pytest.raises(InputError, match="a registered name or a subclass of Mixer"):
        check_mixer(int)  # type: ignore[arg-type] - the error under test


def test_the_battery_leaves_the_random_state_and_the_default_dtype_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check_mixer("sinkhorn", options={}, only=[name for name in CHECKS if name != "compiled"], streams=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32


def test_every_check_says_what_it_claims():
    assert all(check.__doc__ and check.__doc__.strip().splitlines()[0].endswith(".") for check in SWEEP)
