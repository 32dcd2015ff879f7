"""Linear centred kernel alignment: whether two sets of states arrange the same tokens alike, however they are rotated and scaled."""

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real, token_matrix

_KORNBLITH = "Kornblith et al. 2019, arXiv 1905.00414"
_TAKES = "two sets of states of the same tokens [tokens width], [tokens width']"


@measure(
    "linear_cka",
    summary="linear CKA of two sets of states of the same tokens, unbiased: 1 alike up to rotation and scale",
    source="Kornblith et al. 2019, arXiv 1905.00414; unbiased as in Nguyen et al. 2021, arXiv 2010.15327, Eq. 3",
    takes=_TAKES,
    range=(None, 1.0),
    null="0: independent states, on average",
)
@measure(
    "linear_cka.biased",
    summary="linear CKA of two sets of states of the same tokens, biased upwards where tokens are few",
    source=_KORNBLITH,
    takes=_TAKES,
    range=(0.0, 1.0),
    null="about width / tokens: independent states",
    options={"unbiased": False},
)
def linear_cka(x: Float[Tensor, "tokens width"], y: Float[Tensor, "tokens other"], unbiased: bool = True) -> Tensor:
    """HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)) of the Gram matrices over tokens, in float64.

    Shapes: [tokens width], [tokens width'] -> scalar; 0 where the states of a set are all equal. Tokens are centred. Biased, it is 1 for
    any two sets wider than there are tokens; unbiased, it may be below 0 by chance.
    Raises: ShapeError (other numbers of tokens; fewer than 2, or 4 unbiased), InputError.
    """
    x, y = token_matrix(x), token_matrix(y)
    if x.ndim != 2 or y.ndim != 2 or x.shape[0] != y.shape[0]:
        raise ShapeError(
            f"two sets of states of the same tokens are needed, got shapes {list(x.shape)} and {list(y.shape)}"
        )
    return cka_of(hsic(torch.stack([x @ x.mT, y @ y.mT]), unbiased=unbiased))[0, 1]


def hsic(grams: Float[Tensor, "sets tokens tokens"], unbiased: bool = True) -> Float[Tensor, "sets sets"]:
    """Hilbert-Schmidt independence criterion of every pair of sets, from their Gram matrices over the same tokens.

    Shapes: [sets tokens tokens] -> [sets sets], float64. Biased: tr(K H L H) / (tokens - 1)^2. Unbiased (Song et al. 2012), which
    leaves the diagonals out and may be averaged over minibatches of tokens before :func:`cka_of` (Nguyen et al. 2021, Eq. 3):

        [tr(K L) + sum(K) sum(L) / ((n - 1)(n - 2)) - 2 sum(K L) / (n - 2)] / (n (n - 3))

    Raises: ShapeError for fewer than 2 tokens, or 4 unbiased; InputError.
    """
    least = 4 if unbiased else 2
    if grams.ndim != 3 or grams.shape[1] != grams.shape[2] or grams.shape[1] < least:
        raise ShapeError(f"Gram matrices must be [sets n n] with n at least {least}, got shape {list(grams.shape)}")
    k, n = real(grams, "the Gram matrices").double(), grams.shape[1]
    if not unbiased:
        k = k - k.mean(1, keepdim=True)
        k = (k - k.mean(2, keepdim=True)).flatten(1)
        return k @ k.mT / (n - 1) ** 2
    k = k - torch.diag_embed(k.diagonal(dim1=1, dim2=2))
    rows, flat = k.sum(2), k.flatten(1)
    total = rows.sum(1)
    joint = flat @ flat.mT + torch.outer(total, total) / ((n - 1) * (n - 2)) - 2 * (rows @ rows.mT) / (n - 2)
    return joint / (n * (n - 3))


def cka_of(joint: Float[Tensor, "sets sets"]) -> Float[Tensor, "sets sets"]:
    """HSIC of every pair, or its mean over minibatches, -> CKA of every pair; 0 where a set does not vary."""
    own = joint.diagonal()
    scale = torch.where(own > 0, own, 1.0).sqrt()
    return torch.where((own > 0)[:, None] & (own > 0), joint / torch.outer(scale, scale), 0.0)
