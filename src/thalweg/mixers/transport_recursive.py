"""Recursive transport: the mass of the four quadrants first, then within them."""

import torch
from torch import Tensor

from thalweg.mixers import register
from thalweg.mixers.base import Claims, Mixer, MixerFacts
from thalweg.ops.precision import wide
from thalweg.ops.transport import logit_within, near_identity, split, table
from thalweg.registry import REFERENCE


@register(
    "transport_recursive",
    summary="mass of the quadrants first, then within each: doubly stochastic to rounding, (n-1)^2 logits, few steps in sequence",
    source="Lyubinin 2026, RTBP of TBP-mHC (arXiv 2605.21724), from the author's code",
    aliases=("rtbp",),
)
class TransportRecursive(Mixer):
    """The Birkhoff polytope as a transport polytope, by quadrants; an odd number of streams first peels off the last row and column.

    Shapes: logits [... (n-1)*(n-1)] -> mix [... to from]. Order of the logits, n even: mass of the first quadrant; how it divides the
    upper rows, the lower rows, the left columns, the right columns (n/2 - 1 each); the quadrants 11, 12, 21, 22. n odd: last entry;
    last column, last row (n - 2 each); the rest.
    Rows and columns sum to one to rounding (in float32 to 1e-6 at n = 8, 2e-5 at 32), for logits of any size; entries are never below
    zero, rounding included. Where an interval closes (equal bounds), the derivative is that of one of them: finite, and it keeps the sums.
    Source: TBP-mHC, arXiv 2605.21724, reconstructed from the author's code.
    """

    facts = MixerFacts(
        source="Lyubinin 2026, TBP-mHC, arXiv 2605.21724; reconstructed from the author's code (alyubinin/tbp-mHC, f84d7843: rtbpHC)",
        equation="quadrants: m11 = L + (U - L) sigmoid(z),  L = max(0, R1 - C2, C1 - R2),  U = min(R1, C1),  m12 = R1 - m11,  "
        "m21 = C1 - m11;  margins: a_i = l + (u - l) sigmoid(z),  l = max(0, m - sum_{k>i} v_k),  u = min(v_i, m),  m -= a_i;  recurse",
        words="A logit chooses how much the upper rows take from the left columns; further ones divide each margin [n/2] between left and "
        "right, or above and below; then every quadrant [n/2 n/2] is filled in the same way.",
        coverage="every doubly stochastic matrix in the interior; the chart depends on the order of the streams",
        cost="(n-1)^2 logits; n - 1 steps in sequence at n = 2^k, the quadrants side by side",
        start="the logits of a chosen matrix, the same as for transport: at n = 4 diagonal 0.9926 to 0.9934, off-diagonal 0.0017 to "
        "0.0028, each logit's largest derivative 0.0010 to 0.0048",
        chosen=(
            "the start: the code's logits 0 are the midpoints, where many bounds tie (exactly 1 / n at n = 2^k, with a kink from n = 8 on)",
        ),
        deviations=(
            "the base form: no learned blend with the uniform matrix, no scaling, no average over orders, no binary tree of margins",
            "one lower bound instead of two: R1 - C2 = C1 - R2, as both margins have the same sum",
        ),
        verified=(REFERENCE,),
        bibtex="@article{lyubinin2026tbp, title={TBP-mHC: full expressivity for manifold-constrained hyper connections through "
        "transportation polytopes}, author={Lyubinin}, journal={arXiv:2605.21724}, year={2026}}",
    )

    @property
    def claims(self):
        n = self.streams
        near = all(near_identity(n)[i][i] >= 0.95 for i in range(n))
        return Claims("exact", "exact", nonnegative=True, spectral=True, identity=near, moves=n > 1, reaches="birkhoff")

    @property
    def generators(self):
        return (self.streams - 1) ** 2

    def start(self):
        return torch.tensor(_logits(near_identity(self.streams)), dtype=torch.get_default_dtype())

    def forward(self, logits):
        self.check(logits)
        z = wide(logits)
        if self.streams == 1:
            return z.new_ones(*z.shape[:-1], 1, 1)
        z = (
            z.movedim(-1, 0).unsqueeze(1).contiguous()
        )  # [generators problems ...]: token-last, blocks of one size side by side
        ones = z.new_ones(self.streams, *z.shape[1:])
        mix = _fill(torch.sigmoid(z), torch.sigmoid(-z), ones, ones)[:, :, 0]
        return mix.movedim((0, 1), (-2, -1))

    def reference(self, logits):
        ones = [logits.new_ones(()) for _ in range(self.streams)]
        return torch.stack([torch.stack(row) for row in _slow(list(logits), ones, ones)])


def _logits(x: list[list[float]]) -> list[float]:
    """The logits at which a block is ``x``: the inverse of :func:`_fill`."""

    def divide(parts, values):
        found, left = [], sum(parts)
        for i in range(len(parts) - 1):
            found.append(logit_within(parts[i], values[i], left, sum(values[i:]) - left))
            left -= parts[i]
        return found

    n = len(x)
    if n == 1:
        return []
    rows, columns = [sum(r) for r in x], [sum(c) for c in zip(*x, strict=True)]
    if n % 2:
        first = logit_within(x[-1][-1], rows[-1], columns[-1], sum(columns[:-1]))
        edges = divide([r[-1] for r in x[:-1]], rows[:-1]) + divide(x[-1][:-1], columns[:-1])
        return [first, *edges, *_logits([r[:-1] for r in x[:-1]])]
    k = n // 2
    q11, q12, q21, q22 = ([r[j : j + k] for r in x[i : i + k]] for i in (0, k) for j in (0, k))
    first = logit_within(sum(map(sum, q11)), sum(rows[:k]), sum(columns[:k]), sum(columns[k:]))
    margins = divide([sum(r) for r in q11], rows[:k]) + divide([sum(r) for r in q21], rows[k:])
    margins += divide([sum(c) for c in zip(*q11, strict=True)], columns[:k])
    margins += divide([sum(c) for c in zip(*q12, strict=True)], columns[k:])
    return [first, *margins, *_logits(q11), *_logits(q12), *_logits(q21), *_logits(q22)]


def _fill(up: Tensor, down: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Matrices [n n problems ...] with the margins ``rows`` and ``columns`` [n problems ...] at the shares [(n-1)^2 problems ...]."""
    n, *tail = rows.shape
    if n == 1:
        return rows[None]
    k, margins = (n - 1, 2) if n % 2 else (n // 2, 4)
    parts = [1, margins * (k - 1), (n - 2) ** 2]
    (up, up_edge, up_in), (down, down_edge, down_in) = up.split(parts), down.split(parts)
    up, down = up[0], down[0]
    up_edge, down_edge = (s.reshape(margins, k - 1, *tail).transpose(0, 1) for s in (up_edge, down_edge))
    if n % 2:
        corner, right, below, inner = table(up, down, rows[-1], columns[-1], columns[:-1].sum(0))
        values = torch.stack([rows[:-1], columns[:-1]], 1)
        edge, rest = split(up_edge, down_edge, values, torch.stack([below, right]), torch.stack([inner, inner]))
        (end, foot), (heights, widths) = edge.unbind(1), rest.unbind(1)
        above = torch.cat([_fill(up_in, down_in, heights, widths), end[:, None]], 1)
        return torch.cat([above, torch.cat([foot, corner[None]])[None]])
    upper, lower, left, right = rows[:k], rows[k:], columns[:k], columns[k:]
    m11, m12, m21, m22 = table(up, down, upper.sum(0), left.sum(0), right.sum(0))
    values = torch.stack([upper, lower, left, right], 1)
    firsts, seconds = torch.stack([m11, m21, m11, m12]), torch.stack([m12, m22, m21, m22])
    a, b = split(up_edge, down_edge, values, firsts, seconds)
    (a1, a2, a3, a4), (b1, b2, b3, b4) = a.unbind(1), b.unbind(1)
    # the quadrants 11, 12, 21, 22 become problems side by side
    up_in, down_in = (s.reshape(4, (k - 1) ** 2, *tail).transpose(0, 1).flatten(1, 2) for s in (up_in, down_in))
    heights, widths = torch.cat([a1, b1, a2, b2], 1), torch.cat([a3, a4, b3, b4], 1)
    blocks = _fill(up_in, down_in, heights, widths).unflatten(2, (2, 2, tail[0]))  # [k k half half problems ...]
    return blocks.movedim((2, 3), (0, 2)).flatten(0, 1).flatten(1, 2)


def _slow(z: list[Tensor], r: list[Tensor], c: list[Tensor]) -> list[list[Tensor]]:
    """One matrix with margins r and c, in scalars, as the equation has it."""

    def choose(t, low, high):
        return low + (high - low) / (1 + torch.exp(-t))

    def divide(logits, m, values):
        found = []
        for i, t in enumerate(logits):
            found.append(choose(t, max(0 * m, m - sum(values[i + 1 :])), min(values[i], m)))
            m = m - found[-1]
        return [*found, m]

    def minus(x, y):
        return [p - q for p, q in zip(x, y, strict=True)]

    n = len(r)
    if n == 1:
        return [[r[0]]]
    if n % 2:
        r_sum, c_sum = sum(r[:-1]), sum(c[:-1])
        corner = choose(z[0], max(0 * r_sum, r[-1] - c_sum, c[-1] - r_sum), min(r[-1], c[-1]))
        column = divide(z[1 : n - 1], c[-1] - corner, r[:-1])
        row = divide(z[n - 1 : 2 * n - 3], r[-1] - corner, c[:-1])
        block = _slow(z[2 * n - 3 :], minus(r[:-1], column), minus(c[:-1], row))
        return [[*line, end] for line, end in zip(block, column, strict=True)] + [[*row, corner]]
    k = n // 2
    r1, r2, c1, c2 = sum(r[:k]), sum(r[k:]), sum(c[:k]), sum(c[k:])
    m11 = choose(z[0], max(0 * r1, r1 - c2, c1 - r2), min(r1, c1))
    cuts = [1 + i * (k - 1) for i in range(5)]
    upper, lower, left, right = (
        divide(z[cuts[i] : cuts[i + 1]], m, values)
        for i, (m, values) in enumerate([(m11, r[:k]), (c1 - m11, r[k:]), (m11, c[:k]), (r1 - m11, c[k:])])
    )
    parts = [z[cuts[4] + i * (k - 1) ** 2 : cuts[4] + (i + 1) * (k - 1) ** 2] for i in range(4)]
    q11, q12 = _slow(parts[0], upper, left), _slow(parts[1], minus(r[:k], upper), right)
    q21, q22 = _slow(parts[2], lower, minus(c[:k], left)), _slow(parts[3], minus(r[k:], lower), minus(c[k:], right))
    return [x + y for x, y in zip(q11, q12, strict=True)] + [x + y for x, y in zip(q21, q22, strict=True)]
