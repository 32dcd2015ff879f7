"""Spectral sphere: the mean of the streams is kept, the differences between them are turned, scaled by at most one, and turned again."""

import torch
from torch import nn

from thalweg.mixers import register
from thalweg.mixers._loops import cayley_loops, skew_loops, stacked
from thalweg.mixers.base import Claims, Mixer, MixerFacts
from thalweg.ops.cayley import cayley, skew
from thalweg.ops.precision import full_precision, wide
from thalweg.registry import REFERENCE

SIGMA = 4.0  # start of the logits of the singular values


@register(
    "spectral_sphere",
    summary="J + Z U diag(s) V^T Z^T: sums exact, singular values at most one, entries of either sign",
    source="Liu, Zhang, Li 2026, s2HC (arXiv 2603.20896)",
    aliases=("s2hc",),
)
class SpectralSphere(Mixer):
    """Doubly stochastic but for the sign: rows and columns sum to one, no singular value exceeds one, entries may be negative.

    Shapes: logits [... (n-1)^2] as U | V | singular values, (n-1)(n-2)/2, (n-1)(n-2)/2 and n - 1 of them, each group with a learned scale of
    its own -> mix [... to from]. Parameters: gamma_u, gamma_v, the largest skew entries; absent for n <= 2, where there is nothing to turn.
    Source: s2HC, arXiv 2603.20896, reconstructed from the authors' code (6zHAOyi/s2HC, 80ebd017): the paper's text was not available.
    """

    facts = MixerFacts(
        source="Liu, Zhang, Li 2026, s2HC, arXiv 2603.20896, reconstructed from the authors' code (6zHAOyi/s2HC, commit 80ebd017)",
        equation="A_U = gamma_u skew(tanh z_U), A_V = gamma_v skew(tanh z_V), s = tanh z_s;  U, V = (I + A)^-1 (I - A);  "
        "M = 1 1^T / n + Z U diag(s) V^T Z^T, Z [n n-1] the Helmert basis",
        words="The mean of the streams is kept. Their differences, n - 1 numbers in an orthonormal basis, are rotated [n-1 n-1], multiplied by "
        "numbers between -1 and 1 [n-1], rotated again [n-1 n-1], and written back as an [n n] matrix.",
        coverage="matrices of sums one and norm one whose rotations have skew entries below gamma; neither a subset nor a superset of the "
        "Birkhoff polytope; products keep singular values below one, but absolute row sums may reach sqrt(n)",
        cost="(n-1)^2 logits (9 at n = 4), 2 parameters; two linear systems of size n - 1 a token, about 6 (n-1)^3 operations in float64",
        start="z_U = z_V = 0, z_s = 4: diagonal 0.999497, off-diagonal 0.000168 at n = 4; over the matrix the derivatives have norm 2.83 for "
        "the rotations (of U and V against each other) and 0.0013 for the singular values; gamma moves once the rotations have",
        deviations=(
            "mix = M, applied as M x; the released code contracts the first index, which is M^T and exchanges the names of U and V",
            "the linear systems and products in float64",
        ),
        verified=(REFERENCE,),
        bibtex="@inproceedings{liu2026s2hc, title={Spectral-sphere hyper-connections}, author={Liu and Zhang and Li}, "
        "note={arXiv:2603.20896}, year={2026}}",
    )

    def __init__(self, streams, options):
        super().__init__(streams, options)
        if self.turns:
            # one axis: FSDP refuses parameters without any
            self.gamma_u, self.gamma_v = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self):
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        for name in (f"{prefix}gamma_u", f"{prefix}gamma_v"):  # saved without an axis until they got one
            if name in state_dict and state_dict[name].ndim == 0:
                state_dict[name] = state_dict[name].reshape(1)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    @property
    def turns(self) -> int:
        """Logits of each of the two rotations, (n-1)(n-2)/2."""
        return (self.streams - 1) * (self.streams - 2) // 2

    @property
    def claims(self):
        n = self.streams
        return Claims(
            "exact", "exact", nonnegative=n <= 1, spectral=True, orthogonal=n == 1, equivariant=n <= 2, moves=n > 1
        )

    @property
    def generators(self):
        return (self.streams - 1) ** 2

    @property
    def scaled(self):
        return tuple(size for size in (self.turns, self.turns, self.streams - 1) if size)

    def start(self):
        return torch.cat([torch.zeros(2 * self.turns), torch.full((self.streams - 1,), SIGMA)])

    def permute(self, logits, order):
        return logits  # claimed for two streams, where exchanging them changes nothing

    def helmert(self, device: torch.device) -> torch.Tensor:
        """Z [n n-1], float64: orthonormal columns that sum to zero; column i is i + 1 ones over -(i + 1), scaled."""
        n = self.streams
        row, column = torch.arange(n, device=device)[:, None], torch.arange(n - 1, device=device)
        signs = torch.where(row <= column, 1.0, torch.where(row == column + 1, -(column + 1.0), 0.0)).double()
        return signs / ((column + 1) * (column + 2)).double().sqrt()

    def forward(self, logits):
        self.check(logits)
        z, n, k = wide(logits), self.streams, self.turns
        t = torch.tanh(z.double())
        basis = self.helmert(z.device)
        if k:
            u = cayley(self.gamma_u.double() * skew(t[..., :k], n - 1))
            v = cayley(self.gamma_v.double() * skew(t[..., k : 2 * k], n - 1))
        else:
            u = v = torch.eye(n - 1, dtype=t.dtype, device=t.device)
        with full_precision(z):
            left, right = basis @ u, basis @ v
            mix = (left * t[..., None, 2 * k :]) @ right.mT
        return (mix + 1 / n).to(z.dtype)

    def reference(self, logits):
        n, k = self.streams, self.turns
        t, zero = [torch.tanh(logit) for logit in logits], logits.new_zeros(())
        gamma = [] if not k else [self.gamma_u[0], self.gamma_v[0]]
        if k:
            u = cayley_loops(skew_loops([gamma[0] * value for value in t[:k]], n - 1, zero))
            v = cayley_loops(skew_loops([gamma[1] * value for value in t[k : 2 * k]], n - 1, zero))
        else:
            u = v = [[logits.new_ones(())] for _ in range(n - 1)]
        z = [[0.0] * (n - 1) for _ in range(n)]
        for column in range(1, n):  # counted from one, as in the source
            for row in range(column):
                z[row][column - 1] = (column * (column + 1)) ** -0.5
            z[column][column - 1] = -column * (column * (column + 1)) ** -0.5
        rows = []
        for i in range(n):
            rows.append([])
            for j in range(n):
                entry = logits.new_full((), 1 / n)
                for c in range(n - 1):
                    left = sum((z[i][a] * u[a][c] for a in range(n - 1)), zero)
                    right = sum((z[j][a] * v[a][c] for a in range(n - 1)), zero)
                    entry = entry + left * t[2 * k + c] * right
                rows[-1].append(entry)
        return stacked(rows)
