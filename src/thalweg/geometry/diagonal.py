"""What an edit along a reference amounts to on the diagonal of the attention weights."""

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real, same_width

FLOOR = 1e-8  # least size of the denominator

_PAPER = "He et al. 2026, arXiv 2609.15975 (attention-diagonal reading)"


@measure(
    "effective_diagonal.value",
    summary="change of A_tt that equals scaling what a head read along its own value, all of it",
    source=_PAPER,
    takes="o_t, v_t, v_t [... width], scale",
    range=(None, None),
    null="0: no edit",
)
@measure(
    "effective_diagonal.exclude_self",
    summary="change of A_tt that equals scaling what a head read from others along its own value",
    source=_PAPER,
    takes="o_t - A_tt v_t, v_t, v_t [... width], scale",
    range=(None, None),
    null="0: no edit",
)
@measure(
    "effective_diagonal.residual",
    summary="change of A_tt that scales an attention update along the state as the edit does; of a layer, not a head",
    source=_PAPER,
    takes="update, state, W_o v_t [... width], scale",
    range=(None, None),
    null="0: no edit",
)
def effective_diagonal(
    edited: Float[Tensor, "*#b width"],
    reference: Float[Tensor, "*#b width"],
    own: Float[Tensor, "*#b width"],
    scale: float | Tensor = 0.0,
) -> Float[Tensor, "*b"]:
    """dA_tt = (scale - 1) (y . r) / (m . r): what must be added to a token's weight on itself to move y . r as the edit does.

    edited: y, what is scaled along ``reference`` r by the retained ``scale``; own: m, the message that the token sends to itself. In value
    space y = o_t (or o_t - A_tt v_t, which leaves the self edge alone) and r = m = v_t: the edit then *is* that change, exactly. In
    residual space y is the update, r the state and m = W_o v_t with v of all heads side by side: only the one product with the state is
    matched, and no head is to be blamed. Shapes: three [... width] that broadcast -> [...], float64.
    Deviation: a product m . r smaller than 1e-8 counts as 1e-8 of its sign, as in the authors' plots; exactly 0 with y . r = 0 gives 0.
    Raises: ShapeError, InputError.
    """
    for other, what in ((edited, "what is edited and the reference"), (own, "the own message and the reference")):
        same_width(real(other, what), real(reference, "the reference"), what)
    r = reference.double()
    number, sent = (edited.double() * r).sum(-1), (own.double() * r).sum(-1)
    sent = torch.where(sent.abs() < FLOOR, torch.where(sent < 0, -FLOOR, FLOOR), sent)
    return (scale - 1) * number / sent
