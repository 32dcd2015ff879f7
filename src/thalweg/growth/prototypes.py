"""The losses of a dictionary for anybody's tokens, and the panel that shows whether it has collapsed."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.geometry import prototypes as measures
from thalweg.models.sublayers.prototypes import dictionaries
from thalweg.ops.prototypes import Gradient, assign
from thalweg.records import Measurements
from thalweg.training.optim import TIME_SCALES


class PrototypeLoss(NamedTuple):
    """``fit, variance = prototype_loss(...)``: scalars whose sum, ``loss``, is the mean over tokens of sum_k q_k |x - p_k|^2."""

    fit: Float[Tensor, ""]
    variance: Float[Tensor, ""]

    @property
    def loss(self) -> Float[Tensor, ""]:
        return self.fit + self.variance


def prototype_loss(
    x: Float[Tensor, "*n d"],
    prototypes: Float[Tensor, "k d"],
    temperature: Tensor | float,
    *,
    gradient: Gradient = "through",
) -> PrototypeLoss:
    """fit L_OLS = |x - x^|^2 and variance V = sum_k q_k |p_k - x^|^2, mean over tokens; q = softmax(-|x - p_k|^2 / tau), x^ = sum q_k p_k.

    L_q = L_OLS + V holds exactly, for any assignment on the simplex. Squared distances are whole, not divided by the width as
    :class:`thalweg.models.PrototypeLayer` divides them. gradient: ``through`` the assignment, or with it ``detached``
    (:func:`thalweg.ops.prototypes.assign`). Shapes: x [... d], prototypes [k d], temperature a number or a scalar.
    Raises: ShapeError, InputError for a temperature that is not a positive number, or tokens or prototypes that are not finite.
    Reconstructed from the abstract of Cirrincione 2026 (arXiv 2604.01740), whose text was not available.
    """
    if x.ndim < 1 or prototypes.ndim != 2 or x.shape[-1] != prototypes.shape[-1] or x.numel() == 0:
        raise ShapeError(
            f"tokens [... d] and prototypes [k d] must share their width and not be empty, got {list(x.shape)} and {list(prototypes.shape)}"
        )
    if gradient not in ("through", "detached"):
        raise InputError(f"gradient must be through or detached, got {gradient!r}")
    check_temperature(temperature)
    for name, values in (("tokens", x), ("prototypes", prototypes)):
        if not torch.isfinite(values.detach()).all():
            raise InputError(f"the {name} hold NaN or infinite values; nothing can be assigned")
    found = assign(x.reshape(-1, x.shape[-1]), prototypes, temperature, gradient=gradient)
    return PrototypeLoss(found.fit.mean(), found.variance.mean())


def check_temperature(temperature: Tensor | float) -> float:
    """Its value. Raises: InputError unless it is one positive finite number."""
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        raise ShapeError(f"the temperature must be one number, got a tensor of shape {list(temperature.shape)}")
    value = temperature.item() if isinstance(temperature, Tensor) else temperature
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InputError(f"the temperature must be a number, got {value!r}")
    if not 0 < value < math.inf:
        raise InputError(f"the temperature must be positive and finite, got {value:g}")
    return float(value)


@dataclass(frozen=True)
class Panel:
    """One dictionary on one set of tokens.

    loss, fit, variance: mean over tokens, in squared units of the tokens; identity: |loss - fit - variance| / loss, the loss computed by itself
    from the distances. usage: perplexity (reads K for a collapse, too). closest, farthest: pairs of prototypes over sqrt(tr C). effective:
    prototypes that are different points, by usage. hardness: H / ln K. temperature; ratio: over the critical one. force, repulsion: see
    :mod:`thalweg.geometry.prototypes`.
    """

    tokens: int
    prototypes: int
    gradient: Gradient
    loss: float
    fit: float
    variance: float
    identity: float
    usage: float
    closest: float
    farthest: float
    effective: float
    hardness: float
    temperature: float
    ratio: float
    force: float
    repulsion: float

    @property
    def collapsed(self) -> bool:
        """All prototypes are one point."""
        return self.prototypes > 1 and self.farthest < measures.SAME_POINT

    def lines(self) -> list[str]:
        """For a person."""
        state = "COLLAPSED to one point" if self.collapsed else f"{self.effective:.2f} effective"
        where = "above: points that lie together stay together" if self.ratio >= 1 else "below"
        return [
            f"{self.prototypes} prototypes on {self.tokens} tokens: {state}, usage {self.usage:.2f}",
            f"pairs {self.closest:.3g} to {self.farthest:.3g} of sqrt(tr C); force {self.force:.3g}, repulsion {self.repulsion:.3g}",
            f"loss {self.loss:.4g} = fit {self.fit:.4g} + variance {self.variance:.4g} (off by {self.identity:.1e})",
            f"temperature {self.temperature:.3g}, {self.ratio:.3g} of the critical one ({where}); hardness H/ln K {self.hardness:.3f}",
        ]

    def rows(self, **fields) -> Measurements:
        """Rows named ``prototypes.*``; ``fields`` say where and when."""
        rows = Measurements()
        for name in _MEASURES:
            null = {"null": 1.0, "null_kind": "collapsed"} if name == "effective" else {}
            rows.add(
                f"prototypes.{_NAMES.get(name, name)}",
                getattr(self, name),
                n=self.tokens,
                dtype="float64",
                **null,
                **fields,
            )
        return rows


_NAMES = {"ratio": "temperature_ratio"}
_MEASURES = (
    *("loss", "fit", "variance", "identity", "usage", "closest", "farthest", "effective"),
    *("hardness", "temperature", "ratio", "force", "repulsion"),
)


@torch.no_grad()
def collapse_panel(
    x: Float[Tensor, "*n d"],
    prototypes: Float[Tensor, "k d"],
    temperature: Tensor | float,
    *,
    gradient: Gradient = "through",
) -> Panel:
    """Look at a dictionary; temperature in units of a whole squared distance. In float64. Raises: ShapeError, InputError."""
    tau = check_temperature(temperature)
    tokens, points = measures.checked(x.reshape(-1, x.shape[-1]), prototypes, tau)
    found = assign(tokens, points, tau, gradient=gradient)
    distances = torch.cdist(tokens, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    whole = (found.weights * distances).sum(-1).mean().item()
    fit, variance = found.fit.mean().item(), found.variance.mean().item()
    return Panel(
        tokens=len(tokens),
        prototypes=len(points),
        gradient=gradient,
        loss=whole,
        fit=fit,
        variance=variance,
        identity=abs(whole - fit - variance) / (whole or 1.0),
        usage=measures.usage_perplexity(found.weights).item(),
        closest=measures.closest_pair(tokens, points).item(),
        farthest=measures.farthest_pair(tokens, points).item(),
        effective=measures.effective_prototypes(tokens, points, tau).item(),
        hardness=measures.relative_entropy(found.weights).item(),
        temperature=tau,
        ratio=measures.temperature_ratio(tokens, tau, gradient).item(),
        force=measures.separation_force(tokens, points, tau).item(),
        repulsion=measures.repulsive_mass(tokens, points, tau).item(),
    )


def time_scales(model: torch.nn.Module, lr: float) -> list[dict]:
    """Parameter groups for an optimiser of torch: prototypes fast (x 10), weights as given, temperatures slow (x 0.1, no decay).

    Three time scales are reported of the paper (reconstructed; its rates were not available, so these are ours).
    """
    special = {
        id(parameter): kind
        for _, layer in dictionaries(model)
        for kind in TIME_SCALES
        for parameter in (getattr(layer, kind),)
    }
    found: dict[str, list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            found.setdefault(special.get(id(parameter), "weights"), []).append(parameter)
    return [
        {"params": params, "lr": lr * TIME_SCALES.get(kind, 1.0), "name": kind}
        | ({} if kind == "weights" else {"weight_decay": 0.0})
        for kind, params in found.items()
    ]
