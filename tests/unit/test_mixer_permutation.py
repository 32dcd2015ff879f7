"""Softmaxes over permutations: all n! of them, and Kronecker products of small ones."""

import itertools
import math

import pytest
import torch

from thalweg import mixers
from thalweg.errors import InputError
from thalweg.mixers.kronecker import prime_factors


def start(name, n, **options):
    mixer = mixers.create(name, streams=n, **options)
    return mixer(mixer.start().double())


def test_published_start_of_mhc_lite():
    mixer = mixers.create("mhc_lite", streams=4)
    logits = mixer.start().double()
    assert logits[0] == 0 and (logits[1:] == -8).all() and len(logits) == 24
    assert logits.softmax(-1)[0].item() == pytest.approx(1 / (1 + 23 * math.exp(-8)), abs=1e-12)
    mix = start("permutation", 4)
    assert mix.diagonal().tolist() == pytest.approx([0.994008] * 4, abs=1e-6)
    assert mix[0, 1:].tolist() == pytest.approx([0.001997] * 3, abs=1e-6)


def test_one_logit_is_one_permutation_and_row_to_receives_p_of_to():
    n = 4
    mixer = mixers.create("permutation", streams=n)
    x = torch.arange(1.0, n + 1)
    for k, p in enumerate(itertools.permutations(range(n))):
        mix = mixer(torch.where(torch.arange(24) == k, 0.0, -1e4))
        assert torch.equal(mix @ x, x[list(p)])


def test_more_than_five_streams_are_refused_with_the_number():
    assert mixers.create("permutation", streams=5).generators == 120
    for n, number in ((6, "720"), (8, "40,320"), (3000, "more than 10^18")):
        with pytest.raises(
            InputError, match=rf"does not serve {n} streams: {n}! permutations take .*{number.replace('^', '.')} logits"
        ):
            mixers.create("permutation", streams=n)


def test_published_start_of_kromhc():
    mix = start("kromhc", 4)
    assert mix[0].tolist() == pytest.approx([0.999329, 0.000335, 0.000335, 1.1e-7], abs=1e-6)
    assert mix[0, 3].item() == pytest.approx(1.125e-7, rel=1e-3)
    assert start("kronecker", 2)[0, 0].item() == pytest.approx(0.999665, abs=1e-6)


def test_factors():
    assert [prime_factors(n) for n in (1, 2, 4, 6, 7, 12, 16)] == [(), (2,), (2, 2), (2, 3), (7,), (2, 2, 3), (2,) * 4]
    counts = {1: 0, 2: 2, 3: 6, 4: 4, 5: 120, 6: 8, 8: 6, 16: 8}
    for n, count in counts.items():
        mixer = mixers.create("kronecker", streams=n)
        assert mixer.generators == count and mixer.scaled == ((count,) if count else ())
    assert mixers.create("kronecker", streams=8, factors=[4, 2]).generators == 26


def test_product_has_the_order_of_the_paper():
    mixer = mixers.create("kronecker", streams=6, factors=(2, 3))
    logits = torch.randn(3, 8, dtype=torch.float64)
    small = mixers.create("permutation", streams=2)(logits[:, :2])
    large = mixers.create("permutation", streams=3)(logits[:, 2:])
    for mix, u1, u2 in zip(mixer(logits), small, large, strict=True):
        assert torch.allclose(mix, torch.kron(u2, u1))


def test_two_streams_a_factor_give_symmetric_matrices_that_commute():
    mixer = mixers.create("kronecker", streams=8)
    a, b = mixer(torch.randn(2, 6, dtype=torch.float64))
    assert torch.allclose(a, a.mT) and torch.allclose(a @ b, b @ a)


@pytest.mark.parametrize(
    ("n", "factors", "message"),
    [
        (7, None, "its factor 7 is too large: 7! permutations take 5,040 logits"),
        (14, None, "its factor 7 is too large"),
        (6, (6,), "its factor 6 is too large: 6! permutations take 720 logits"),
        (6, (2, 2), "its factors [2, 2] multiply to 4"),
        (4, (4, 1), "every factor must be at least 2, got [4, 1]"),
    ],
)
def test_refused_factors(n, factors, message):
    with pytest.raises(InputError) as error:
        mixers.create("kronecker", streams=n, factors=factors)
    assert message in str(error.value)


@pytest.mark.parametrize("n", [2, 4, 5, 6, 16, 20, 25])
def test_identity_claim_of_the_product_is_what_its_start_shows(n):
    departure = (start("kronecker", n) - torch.eye(n)).abs().max()
    assert (departure <= 0.05) == mixers.create("kronecker", streams=n).claims.identity
    assert (departure <= 0.05) == (n != 25)


def test_matrices_survive_a_change_of_dtype():
    logits = torch.randn(2, 8)
    mixer = mixers.create("kronecker", streams=6)
    assert torch.equal(mixer.bfloat16()(logits), mixers.create("kronecker", streams=6)(logits))
    assert not mixer.state_dict()
