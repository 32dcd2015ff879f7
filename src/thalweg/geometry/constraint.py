"""How far a mixing matrix is from the identity, from averaging, from a permutation, and from the set that it should lie in."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import mixing_matrix, real, square_mixing_matrix
from thalweg.geometry.mixing import RANDOM, SCOPES

_TAKES = "mix [... n n]"
_UNIFORM = "sqrt(n - 1): the uniform matrix"


@measure(
    "distance.identity",
    summary="Frobenius distance of a mixing matrix from the identity",
    source="definition",
    takes=_TAKES,
    range=(0.0, None),
    null=_UNIFORM,
    options={"to": "identity"},
)
@measure(
    "distance.uniform",
    summary="Frobenius distance of a mixing matrix from the uniform one, which averages all streams",
    source="definition",
    takes=_TAKES,
    range=(0.0, None),
    null=RANDOM,
    options={"to": "uniform"},
)
@measure(
    "distance.permutation",
    summary="Frobenius distance of a mixing matrix from the nearest permutation",
    source="definition; the nearest by linear assignment",
    takes=_TAKES,
    range=(0.0, None),
    null=_UNIFORM,
    options={"to": "permutation"},
)
def mixing_distance(
    mix: Float[Tensor, "*batch n n"], *, to: Literal["identity", "uniform", "permutation"]
) -> Float[Tensor, "*batch"]:
    """||mix - target||_F, the target being the identity, the uniform matrix 1/n, or the nearest permutation of the streams.

    Shapes: [... n n] -> [...]. The nearest permutation P maximises sum(P * mix), since all have one norm; it is found
    exactly, matrix by matrix, and held fixed for the gradient. Raises: ShapeError for fewer than two streams, InputError.
    """
    mix = square_mixing_matrix(mix)
    if to == "permutation":
        target = _nearest_permutation(mix)
    elif to == "identity":
        target = torch.eye(mix.shape[-1]).to(mix)
    else:
        target = torch.full_like(mix, 1 / mix.shape[-1])
    return torch.linalg.matrix_norm(mix - target)


def permutation_index(mix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """||mix - J||_F / sqrt(n - 1): 0 for the uniform matrix, 1 for every permutation, the identity among them.

    Shapes: [... n n] -> [...]. Between 0 and 1 for doubly stochastic matrices; above 1 for others.
    Raises: ShapeError for fewer than two streams, InputError.
    Source: reconstructed from the words "0 (uniform) to 1 (permutation)" for Table 6 of the camera-ready of mHC (arXiv
    2512.24880); its formula was not available.
    """
    return mixing_distance(mix, to="uniform") / (mix.shape[-1] - 1) ** 0.5


for _scope, _what in SCOPES.items():
    measure(
        f"permutation_index{_scope}",
        summary=f"0: uniform, 1: a permutation; mean over tokens: {_what}",
        source="reconstructed from mHC, arXiv 2512.24880, camera-ready, Table 6",
        takes=_TAKES,
        range=(0.0, None),
        null="0: uniform" if _scope else RANDOM,
    )(permutation_index)


class ConstraintError(NamedTuple):
    """How far a matrix is outside the Birkhoff polytope, each [...]: rows, columns: largest |sum - 1|; negative: size of the
    most negative entry, 0 without one."""

    rows: Tensor
    columns: Tensor
    negative: Tensor


def constraint_error(mix: Float[Tensor, "*batch to from"]) -> ConstraintError:
    """Distance from being doubly stochastic, by condition. Shapes: [... to from] -> [...] each.

    After finitely many Sinkhorn iterations the sums that were not normalised last are off by an amount that grows with
    the spread of the logits: see :func:`logit_spread`. Raises: ShapeError, InputError.
    """
    mix = mixing_matrix(mix)
    return ConstraintError(
        (mix.sum(-1) - 1).abs().amax(-1), (mix.sum(-2) - 1).abs().amax(-1), (-mix).amax((-2, -1)).clamp(min=0)
    )


def constraint_part(mix: Tensor, *, part: Literal["rows", "columns", "negative"]) -> Tensor:
    """One of :func:`constraint_error`."""
    return getattr(constraint_error(mix), part)


for _part, _words in (
    ("rows", "largest |row sum - 1|: what a stream receives does not sum to one"),
    ("columns", "largest |column sum - 1|: what a stream gives away does not sum to one"),
    ("negative", "size of the most negative entry"),
):
    measure(
        f"constraint_error.{_part}",
        summary=f"{_words}; largest over the tokens",
        source="definition of the Birkhoff polytope, mHC, arXiv 2512.24880, Eq. 6",
        takes="mix [... to from]",
        range=(0.0, None),
        direction="lower",
        null="0: any doubly stochastic matrix",
        options={"part": _part},
    )(constraint_part)


@measure(
    "mix.logit_spread",
    summary="standard deviation of the logits behind one mixing matrix, mean over tokens",
    source="ours: the error of finite Sinkhorn iterations grows with it",
    takes="logits [... entries]",
    range=(0.0, None),
    null="0: equal logits, the uniform matrix",
)
def logit_spread(logits: Float[Tensor, "*batch entries"]) -> Float[Tensor, "*batch"]:
    """Standard deviation over the logits of one matrix. Shapes: [... entries] -> [...]. Raises: InputError."""
    return real(logits, "the logits").double().std(-1, correction=0)


def _nearest_permutation(mix: Tensor) -> Tensor:
    flat = mix.detach().reshape(-1, *mix.shape[-2:])
    found = torch.zeros_like(flat)
    for matrix, target in zip(flat.cpu().numpy(), found, strict=True):
        rows, columns = linear_sum_assignment(matrix, maximize=True)
        target[torch.from_numpy(rows), torch.from_numpy(columns)] = 1.0
    return found.reshape(mix.shape)
