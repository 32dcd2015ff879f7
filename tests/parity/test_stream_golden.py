"""Sinkhorn's golden numbers, in the order of the paper and in that of the released code; made in float64 by numpy, to eight digits."""

import pytest
import torch

from thalweg.mixers import create
from thalweg.ops import sinkhorn

LOGITS = [[0.5, -1.0, 2.0, 0.0], [1.5, 0.3, -0.7, -2.0], [-0.2, 0.8, 0.1, 1.2], [2.2, -0.4, -1.1, 0.6]]
GOLDEN = {  # (axis that is normalised last, eps, iterations) -> rows
    (-1, 0.0, 20): """.06888960 .05664278 .73474424 .13972338  .40411275 .44851995 .10656031 .04080698
                      .03598465 .36044944 .11559696 .48796895  .49101300 .13438783 .04309848 .33150069""",
    (-1, 0.0, 1): """.09095545 .07026920 .69839453 .14038081  .43298743 .45154384 .08219735 .03327138
                     .04339616 .40843578 .10036216 .44780590  .54522338 .14021253 .03445348 .28011061""",
    (-2, 0.0, 1): """.09195729 .05904977 .73740169 .13435378  .40242458 .34882284 .07978346 .02927283
                     .06361427 .49764862 .15364524 .62140932  .44200387 .09447877 .02916960 .21496406""",
    (-2, 1e-6, 20): """.06889004 .05664396 .73474121 .13972379  .40411220 .44851749 .10656080 .04080851
                       .03598507 .36044889 .11559739 .48796765  .49101169 .13438866 .04309960 .33149905""",
}


@pytest.mark.parametrize("case", GOLDEN)
def test_both_orders(case):
    last, eps, iterations = case
    logits = torch.tensor(LOGITS, dtype=torch.float64)
    golden = [float(x) for x in GOLDEN[case].split()]
    assert sinkhorn(logits, iterations, last, eps).flatten().tolist() == pytest.approx(golden, abs=6e-9)
    mixer = create("sinkhorn", streams=4, iterations=iterations, eps=eps, exact="rows" if last == -1 else "columns")
    assert mixer(logits.flatten()).flatten().tolist() == pytest.approx(golden, abs=6e-9)


def test_the_orders_are_transposes_of_each_other():
    """The released code's matrix of the transposed logits, transposed, is the paper's."""
    logits = torch.tensor(LOGITS, dtype=torch.float64)
    for iterations in (1, 3, 20):
        paper, code = sinkhorn(logits, iterations, -1), sinkhorn(logits.mT, iterations, -2).mT
        torch.testing.assert_close(paper, code, rtol=0, atol=1e-15)
    assert (sinkhorn(logits, 1, -1) - sinkhorn(logits, 1, -2)).abs().max() > 0.1  # one order is not the other


def test_singular_values_of_the_limit():
    limit = sinkhorn(torch.tensor(LOGITS, dtype=torch.float64), 200)
    assert torch.linalg.svdvals(limit).tolist() == pytest.approx([1, 0.65687359, 0.41747063, 0.30439764], abs=6e-9)


@pytest.mark.parametrize(
    ("diagonal", "off", "eps", "exact", "wanted"),
    [
        (3.0, -3.0, 0.0, "rows", (0.992618633, 0.002460456)),  # the paper's appendix
        (3.0, -3.0, 1e-6, "columns", (0.992614670, 0.002461443)),  # the same in the released code
        (0.0, -8.0, 0.0, "rows", (0.998994624, 0.000335125)),  # mHC as mHC-lite re-implements it
        (1.0, 0.0, 0.0, "rows", (0.475366886, 0.174877705)),  # the identity as logits, as hyper-connections starts
    ],
)
def test_initial_values_of_public_code(diagonal, off, eps, exact, wanted):
    logits = torch.full((4, 4), off, dtype=torch.float64)
    logits.fill_diagonal_(diagonal)
    mix = create("sinkhorn", streams=4, eps=eps, exact=exact)(logits.flatten())
    assert mix[0].tolist() == pytest.approx([wanted[0]] + 3 * [wanted[1]], abs=6e-10)
