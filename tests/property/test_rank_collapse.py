"""Positive control: attention without skips collapses doubly exponentially to equal tokens, with skips it does not.

Dong et al. 2021 (arXiv 2103.03404) bound the residual of one attention layer by a constant times the cube of the residual before it.
Checked here, on plain softmax attention with random queries and keys and orthogonal values: the exponent 3 itself, for small residuals;
that in a stack the logarithm of the residual is multiplied, not added to, from layer to layer, down to rounding; and that with skips the
exponent is 1 and the tokens stay apart where the plain stack has long collapsed. The constant of the bound is not checked.
"""

import math
from itertools import pairwise

import pytest
import torch

from thalweg.geometry import effective_rank, residual_to_rank_one, token_cosine

TOKENS, WIDTH = 32, 16
SEEDS = (0, 1, 2, 3)


def gaussian(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attention(x, seed, skip):
    query, key = (gaussian(WIDTH, WIDTH, seed=seed + i) / math.sqrt(WIDTH) for i in (1, 2))
    value = torch.linalg.qr(gaussian(WIDTH, WIDTH, seed=seed + 3)).Q
    scores = (x @ query) @ (x @ key).mT / math.sqrt(WIDTH)
    mixed = torch.softmax(scores, -1) @ x @ value
    return x + mixed if skip else mixed


def stack(seed, depth, skip):
    states = [gaussian(TOKENS, WIDTH, seed=100 + seed)]
    for layer in range(depth):
        states.append(attention(states[-1], 1000 * seed + 10 * layer, skip))
    return states


@pytest.mark.parametrize("norm", ["frobenius", "composite"])
@pytest.mark.parametrize(("skip", "exponent"), [(False, 3.0), (True, 1.0)])
@pytest.mark.parametrize("seed", SEEDS)
def test_one_layer_cubes_a_small_residual_and_a_skip_keeps_it(seed, skip, exponent, norm):
    mean, apart = gaussian(1, WIDTH, seed=7 + seed), gaussian(TOKENS, WIDTH, seed=8 + seed)
    apart = apart - apart.mean(0)
    sizes = [1e-2, 1e-3]
    before = [residual_to_rank_one(mean + size * apart, relative=False, norm=norm).item() for size in sizes]
    after = [
        residual_to_rank_one(attention(mean + size * apart, 1000 * seed, skip), relative=False, norm=norm).item()
        for size in sizes
    ]
    found = math.log(after[1] / after[0]) / math.log(before[1] / before[0])
    assert found == pytest.approx(exponent, abs=0.03)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_skips_the_collapse_is_doubly_exponential(seed):
    states = stack(seed, 6, skip=False)
    residuals = [residual_to_rank_one(x).item() for x in states]
    assert residuals[0] > 0.95 and residuals[5] < 1e-14
    falling = [r for r in residuals[1:] if 1e-13 < r < 0.98]
    growth = [math.log(b) / math.log(a) for a, b in pairwise(falling)]
    assert len(growth) >= 2 and min(growth) > 2  # an exponential decay would tend to 1
    assert effective_rank(states[5]).item() == pytest.approx(1 / WIDTH, rel=1e-5)
    assert token_cosine(states[5]).item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_skips_the_tokens_stay_apart(seed):
    states = stack(seed, 16, skip=True)
    residuals = [residual_to_rank_one(x).item() for x in states]
    assert residuals[5] > 0.5  # without skips: rounding
    assert min(residuals) > 0.02
    assert min(b / a for a, b in pairwise(residuals)) > 0.4  # at most exponential
    assert effective_rank(states[5]).item() > 5 / WIDTH
