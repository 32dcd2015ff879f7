"""Gradients along depth: does the loss still reach the early states?"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.catalog import measure


@measure(
    "gradient_norm",
    summary="norm of the gradient of the loss in the state, by depth",
    source="Xiong et al. 2020, arXiv 2002.04745",
    takes="gradients by site, first to last, any shape",
    range=(0.0, None),
    unit="nats per stream unit",
)
def gradient_norms(gradients: Sequence[Tensor | None]) -> Float[Tensor, " sites"]:
    """Euclidean norm of each gradient, in float64; None (the loss does not depend on it) is 0, NaN and infinity stay.

    Raises: InputError for an empty list.
    """
    if not gradients:
        raise InputError("gradient norms by depth need at least one gradient, got none")
    return torch.stack(
        [torch.zeros((), dtype=torch.float64) if g is None else g.detach().double().norm().cpu() for g in gradients]
    )


@measure(
    "gradient_norm.common",
    summary="norm of the gradient of the loss against one vector added to every stream, by depth; comparable with one stream",
    source="ours",
    takes="gradients by site [b t n d]",
    range=(0.0, None),
    unit="nats per stream unit",
)
def common_gradient_norms(gradients: Sequence[Float[Tensor, "b t n d"]]) -> Float[Tensor, " sites"]:
    """:func:`gradient_norms` of the sums over streams: what moving all streams of a token alike does to the loss.

    Raises: InputError for an empty list; ShapeError.
    """
    if any(g.ndim < 2 for g in gradients):
        raise ShapeError("gradients of several streams must be [... streams width]")
    return gradient_norms([g.detach().double().sum(-2) for g in gradients])


@measure(
    "gradient_norm.history",
    summary="norm of the gradient of the loss in a state that is kept of an earlier place, by depth and entry (0: the embedding)",
    source="ours",
    takes="gradients by entry, the oldest first, any shape",
    range=(0.0, None),
    unit="nats per stream unit",
)
def history_gradient_norms(gradients: Sequence[Tensor | None]) -> Float[Tensor, " entries"]:
    """:func:`gradient_norms` of the entries of one state. Raises: InputError for an empty list."""
    return gradient_norms(gradients)


def state_gradient_norms(loss: Float[Tensor, ""], states: Sequence[Tensor]) -> Float[Tensor, " sites"]:
    """:func:`gradient_norms` of a loss in the states of the pass that made it; parameters get no gradient from this.

    Raises: ShapeError unless the loss is a scalar; InputError for states that carry no gradient.
    """
    if loss.ndim:
        raise ShapeError(f"the loss must be a scalar, got shape {list(loss.shape)}")
    if not loss.requires_grad or not all(state.requires_grad for state in states):
        raise InputError("loss and states must carry gradients; run the pass outside of torch.no_grad()")
    return gradient_norms(torch.autograd.grad(loss, tuple(states), retain_graph=True, allow_unused=True))


@measure(
    "gradient_norm.slope",
    summary="growth of the gradient norm per site from first to last; 0: preserved, positive: early states starve",
    source="ours",
    takes="gradient norms [sites], first to last",
    range=(None, None),
    unit="nats per site",
    null="0: the same norm at every depth",
)
def depth_slope(norms: Float[Tensor, " sites"]) -> float:
    """Least-squares slope of ln(norm) over the index of the site.

    Raises: InputError unless two norms or more are positive.
    """
    norms = torch.as_tensor(norms).double()
    used = torch.isfinite(norms) & (norms > 0)
    if norms.ndim != 1 or int(used.sum()) < 2:
        raise InputError(f"a slope needs two positive finite norms, got {norms.tolist()}")
    place = torch.arange(len(norms), dtype=torch.float64)[used]
    logs = norms[used].log()
    place = place - place.mean()
    return ((place * logs).sum() / place.square().sum()).item()
