"""Dictionaries of prototypes inside a network: in place of the feed-forward block, or one per head before attention's output projection."""

import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.checks import one_point
from thalweg.models.sublayers.base import Sublayer
from thalweg.ops.precision import wide
from thalweg.ops.prototypes import (
    GRADIENTS,
    LOG_TEMPERATURE,
    Gradient,
    assign,
    kmeans_plus_plus,
    largest_variance,
)


class DictionaryLoss(NamedTuple):
    """Of one pass, per head [h], mean over the real tokens and over the width: fit and variance, whose sum is the loss L_q; the entropy of
    the assignment, in nats; the temperature."""

    fit: Float[Tensor, " h"]
    variance: Float[Tensor, " h"]
    entropy: Float[Tensor, " h"]
    temperature: Float[Tensor, " h"]
    prototypes: int

    @property
    def loss(self) -> Float[Tensor, " h"]:
        return self.fit + self.variance

    def free_energy(self, *, normalised: bool = False) -> Float[Tensor, " h"]:
        """L_q - tau H(q); ``normalised``: + tau ln K (:meth:`thalweg.ops.prototypes.Assigned.free_energy`)."""
        free = self.loss - self.temperature * self.entropy
        return free + self.temperature * math.log(self.prototypes) if normalised else free


class PrototypeLayer(nn.Module):
    """y = x^ + s (x - x^), x^ = sum_k q_k p_k, q = softmax_k(-|x - p_k|^2 / (w tau)): every token becomes a soft mixture of few prototypes.

    Shapes: [... w] -> [... w]; with ``heads``, [... h w] -> [... h w], a dictionary [k w] and a temperature for each head. Distances are
    divided by the width w, so that temperatures are of one size across widths; tau = exp(log_temperature), clamped to [1e-3, 1e3].
    gradient: of the losses, ``through`` the assignment or with it ``detached`` (:func:`thalweg.ops.prototypes.assign`); what the layer
    puts out has its gradient through the assignment either way, since nothing would flow back otherwise. bypass s: 0 the dictionary alone,
    1 the identity (the dictionary then learns from its own loss only). ``last``: losses of the last pass, for whoever trains.
    Reconstructed from the reviews of Cirrincione 2026 (DDCL-INCRT, arXiv 2604.01880; DDCL-Attention, arXiv 2604.03850), whose texts were not
    available: the soft nearest-neighbour rule, the dictionary in place of the feed-forward block. Ours: the division by the width, the
    parameter log tau and its clamp, the start, the bypass.
    Raises: InputError.
    """

    def __init__(
        self,
        width: int,
        prototypes: int = 8,
        *,
        heads: int | None = None,
        gradient: Gradient = "through",
        bypass: float = 0.0,
        temperature: float = 1.0,
    ):
        super().__init__()
        check_dictionary(prototypes, gradient, bypass, temperature)
        for name, value in (("width", width), ("heads", 1 if heads is None else heads)):
            check_count(value, f"the {name} of a dictionary")
        self.width, self.heads, self.bypass = width, heads, bypass
        self.gradient: Gradient = gradient
        self.start = temperature
        self.prototypes = nn.Parameter(torch.empty(heads or 1, prototypes, width))
        self.log_temperature = nn.Parameter(torch.empty(heads or 1))
        self.last: DictionaryLoss | None = None
        self.reset_parameters()

    def reset_parameters(self, std: float = 1.0) -> None:
        """Normal prototypes, the temperature that was asked for. Better: :func:`start_dictionaries`, from data."""
        nn.init.normal_(self.prototypes)
        with torch.no_grad():
            self.prototypes.mul_(std)
        nn.init.constant_(self.log_temperature, math.log(self.start))

    @property
    def temperature(self) -> Float[Tensor, " h"]:
        """tau of each head, float32 or wider."""
        return wide(self.log_temperature).clamp(*LOG_TEMPERATURE).exp()

    def forward(self, x: Float[Tensor, "*b w"], real: Bool[Tensor, "*t"] | None = None) -> Float[Tensor, "*b w"]:
        """``real``: True where a token is no padding, of the shape of x without its last axes (heads and width); None: all are."""
        tokens = self.tokens(x)
        temperature = self.temperature
        found = assign(tokens, self.prototypes, self.width * temperature, gradient=self.gradient)
        self.last = self.losses(found, temperature, real)
        y = found.reconstruction
        if self.bypass:
            y = y + self.bypass * (wide(tokens) - y)
        y = y.to(x.dtype)
        return y[0].view(x.shape) if self.heads is None else y.movedim(0, -2).reshape(x.shape)

    def tokens(self, x: Float[Tensor, "*b w"]) -> Float[Tensor, "h n w"]:
        """The vectors of each head, in the order of the tokens."""
        axes = 1 if self.heads is None else 2
        if x.ndim < axes or x.shape[-1] != self.width or (self.heads is not None and x.shape[-2] != self.heads):
            wanted = f"{self.width}" if self.heads is None else f"{self.heads} {self.width}"
            raise ShapeError(f"this dictionary takes [... {wanted}], got shape {list(x.shape)}")
        if self.heads is None:
            return x.reshape(1, -1, self.width)
        return x.movedim(-2, 0).reshape(self.heads, -1, self.width)

    def losses(self, found, temperature: Tensor, real: Tensor | None) -> DictionaryLoss:
        """Means over the real tokens [h] of what was found for each [h n]."""

        def mean(values: Tensor) -> Tensor:
            if real is None:
                return values.mean(-1)
            weights = real.reshape(1, -1).to(values.dtype)
            return (values * weights).sum(-1) / weights.sum().clamp(min=1)

        count = self.prototypes.shape[1]
        fit, variance = mean(found.fit) / self.width, mean(found.variance) / self.width
        return DictionaryLoss(fit, variance, mean(found.entropy), temperature, count)

    @torch.no_grad()
    def start_from(
        self, x: Float[Tensor, "*b w"], generator: torch.Generator | None = None, *, heads: Sequence[int] | None = None
    ) -> None:
        """Prototypes by k-means++ on these tokens; temperature lambda_max(C) / w: a quarter of the critical one, half of it detached.

        heads: whose dictionaries start (None: all). Raises: InputError for fewer tokens than prototypes, for tokens that are not finite or
        all one vector.
        """
        chosen = list(range(len(self.prototypes))) if heads is None else list(heads)
        tokens, count = self.tokens(x)[chosen], self.prototypes.shape[1]
        check_tokens(tokens, count)
        temperatures = (largest_variance(tokens) / self.width).log().clamp(*LOG_TEMPERATURE)
        for i, head in enumerate(chosen):
            self.prototypes[head].copy_(kmeans_plus_plus(tokens[i], count, generator))
            self.log_temperature[head] = temperatures[i]

    def __getstate__(self):
        return {**self.__dict__, "last": None}  # it holds a graph, which can be neither copied nor pickled

    def extra_repr(self) -> str:
        heads = "" if self.heads is None else f"{self.heads} heads, "
        return f"{heads}{self.prototypes.shape[1]} prototypes of width {self.width}, gradient={self.gradient}, bypass={self.bypass}"


class Prototypes(Sublayer):
    """A dictionary in place of the feed-forward block: every token is written as a soft mixture of ``prototypes`` learned vectors.

    Shapes: [b t d] -> [b t d]. There is no linear map: the prototypes themselves are what is written, so a connection's gains act on their
    start, and an inner norm before the last map has no place here and is refused. Source, deviations: :class:`PrototypeLayer`.
    """

    kind = "prototypes"

    def __init__(self, config, requirements, index):
        super().__init__(config, requirements, index)
        if requirements.inner_norm:
            raise InputError(
                f"connection {config.connection!r} needs a norm before the last map of each sublayer, and prototypes have no map; "
                "use another connection or feed_forward"
            )
        self.dictionary = dictionary_of(config, config.width)

    def forward(self, x, view, cache=None):
        return self.dictionary(x, None if view is None else view.real)

    def maps(self):
        return iter(())


def dictionary_of(config, width: int, heads: int | None = None) -> PrototypeLayer:
    """The dictionary that a decoder's config asks for."""
    return PrototypeLayer(
        width,
        config.prototypes,
        heads=heads,
        gradient=config.prototype_gradient,
        bypass=config.prototype_bypass,
        temperature=config.prototype_temperature,
    )


def dictionaries(module: nn.Module) -> Iterator[tuple[str, PrototypeLayer]]:
    """Every dictionary in a network, by name."""
    return ((name, part) for name, part in module.named_modules() if isinstance(part, PrototypeLayer))


def dictionary_loss(module: nn.Module) -> Float[Tensor, ""]:
    """sum over dictionaries and heads of L_q of the last pass: what is added to the loss of the task, times a weight.

    Raises: InputError where there is no dictionary, or none has seen a token yet.
    """
    found = [part.last.loss.sum() for _, part in dictionaries(module) if part.last is not None]
    if not found:
        raise InputError("no dictionary of prototypes has seen a token; give a network with one, and run it first")
    return torch.stack(found).sum()


@torch.no_grad()
def start_dictionaries(
    module: nn.Module, run: Callable[[], object], generator: torch.Generator | None = None
) -> list[str]:
    """Start every dictionary of ``module`` from what reaches it in ``run()``, in one pass: later ones see what the earlier ones then write.

    Returns their names. Padding is left out where the network says what is padding. Raises: InputError as ``start_from``, by name.
    """
    names = dict(dictionaries(module))
    if not names:
        raise InputError("this network has no dictionary of prototypes to start; add one (layers, head_prototypes)")
    started: list[str] = []

    def start(name: str):
        def hook(layer: nn.Module, args: Any) -> None:
            if name not in started:
                assert isinstance(layer, PrototypeLayer)
                real = args[1] if len(args) > 1 else None
                try:
                    layer.start_from(args[0] if real is None else args[0][real], generator)
                except InputError as error:
                    raise InputError(f"{name}: {error}") from None
                started.append(name)

        return hook

    hooks = [layer.register_forward_pre_hook(start(name)) for name, layer in names.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return started


def check_tokens(tokens: Float[Tensor, "h n w"], count: int) -> None:
    """Refuse tokens that no dictionary can start from. Raises: InputError, one line."""
    if not torch.isfinite(tokens).all():
        raise InputError("the tokens hold NaN or infinite values; a diverged network has no prototypes")
    if tokens.shape[1] < count:
        raise InputError(
            f"{count} prototypes need at least {count} tokens to start from, got {tokens.shape[1]}; give more text or fewer prototypes"
        )
    if one_point(tokens).any():
        raise InputError(
            f"the {tokens.shape[1]} tokens are one and the same vector (up to rounding), which has no prototypes; "
            "give embeddings that differ"
        )


def check_dictionary(prototypes: int, gradient: str, bypass: float, temperature: float) -> None:
    """What a dictionary can be asked for. Raises: InputError."""
    check_count(prototypes, "prototypes")
    if gradient not in GRADIENTS:
        raise InputError(f"the gradient of prototypes must be {' or '.join(GRADIENTS)}, got {gradient!r}")
    if not isinstance(bypass, Real) or not 0 <= bypass <= 1:
        raise InputError(f"the bypass must be from 0 (dictionary alone) to 1 (identity), got {bypass!r}")
    low, high = LOG_TEMPERATURE
    if not isinstance(temperature, Real) or not (
        temperature > 0 and low - 1e-9 <= math.log(temperature) <= high + 1e-9
    ):
        raise InputError(f"the temperature of prototypes must be from 1e-3 to 1e3, got {temperature!r}")


def check_count(value: int, name: str) -> None:
    """Raises: InputError unless it is a whole number of at least 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
