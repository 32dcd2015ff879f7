"""Keel: post-norm with a norm before the sublayer and a skip factor as large as the network is deep."""

import math
from dataclasses import dataclass
from typing import Literal


from thalweg.connections import register
from thalweg.connections.base import Facts, Site, each_token, reference_norm
from thalweg.connections.post_norm import PostNorm, PostNormOptions, PostNormSite
from thalweg.errors import InputError


@dataclass(frozen=True)
class KeelOptions(PostNormOptions):
    """alpha: factor on the skip: the number of sublayers, of layers, the root of the number of layers, or a number.

    plain_start: what stays a plain pre-norm step, x' = x + F(LN_in(x)): the first sublayer, the whole first layer, or nothing.
    """

    input_norm: bool = True
    alpha: Literal["sublayers", "layers", "sqrt_layers"] | float = "sublayers"
    plain_start: Literal["sublayer", "layer", "nothing"] = "sublayer"

    def __post_init__(self):
        if isinstance(self.alpha, float) and not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InputError(
                f"keel.alpha must be sublayers, layers, sqrt_layers or a positive number, got {self.alpha}"
            )


def skip_factor(alpha: str | float, site: Site) -> float:
    """The number that an ``alpha`` option stands for in the network of ``site``."""
    if isinstance(alpha, str):
        return float({"sublayers": site.total, "layers": site.depth, "sqrt_layers": math.sqrt(site.depth)}[alpha])
    return alpha


def is_plain(site: Site, plain_start: str) -> bool:
    """Whether ``site`` lies in the part that keeps the plain pre-norm form."""
    return {"sublayer": site.index == 0, "layer": site.layer == 0, "nothing": False}[plain_start]


class KeelSite(PostNormSite):
    """x' = LN_out(alpha x + F(LN_in(x))); in the plain start x' = x + F(LN_in(x)), without an outer norm."""

    def __init__(self, width, site, options):
        super().__init__(width, site, options)
        self.alpha = skip_factor(options.alpha, site)
        if is_plain(site, options.plain_start):
            self.alpha, self.output_norm = 1.0, options.make_norm(width, used=False)


@register(
    "keel",
    summary="post-norm with inner norm and a large skip factor: x' = norm(alpha x + F(norm(x)))",
    source="reconstructed from the abstract of Chen and Wei 2026 (arXiv 2601.19895) and public re-implementations",
)
class Keel(PostNorm):
    """Post-norm stream whose skip is so strong that the gradient reaches the first layers of very deep networks.

    Shapes: state [b t d].
    Errors: InputError for an alpha that is not positive.
    Source: reconstructed from the abstract of Chen and Wei 2026 (arXiv 2601.19895) and from public re-implementations; the body of the
    paper was not available. Whether its L counts layers or sublayers is ambiguous, and so is where the plain start ends; the defaults
    are what the re-implementations have in common, and both are options.
    """

    Options = KeelOptions
    SiteModule = KeelSite
    options: KeelOptions
    facts = Facts(
        source="reconstructed from the abstract of Chen and Wei 2026, arXiv 2601.19895, and from public re-implementations",
        equation="x' = LN_out(alpha x + F(LN_in(x))), alpha = number of sublayers\nfirst sublayer: x' = x + F(LN_in(x))",
        words="The sublayer reads the normalised stream [b t d]; its update [b t d] is added to alpha times the stream, and the sum is "
        "normalised per token.",
        constraint="the state has unit root mean square per token, up to the learned scale of the norm",
        chosen=(
            "alpha counts sublayers; the paper's L is ambiguous (alpha = layers, sqrt_layers or a number are options)",
            "the first sublayer is a plain pre-norm step; re-implementations differ on the rest of the first layer (plain_start)",
            "no final norm (the last site has normalised); no norm on the embedding",
            "initial weights: the model's own distribution, without a factor for depth; the abstract says none is needed",
        ),
        bibtex="@article{chen2026postlayernorm, title={Post-LayerNorm Is Back: Stable, ExpressivE, and Deep}, author={Chen, Chen and "
        "Wei, Lai}, journal={arXiv:2601.19895}, year={2026}}",
    )

    def reference(self, embedding, sublayers, tokens=None):
        layers, start = self.layout[-1].layer + 1, self.options.plain_start
        named = {"sublayers": len(self.layout), "layers": layers, "sqrt_layers": layers**0.5}
        alpha = named.get(self.options.alpha, self.options.alpha)
        x = each_token(lambda row: reference_norm(self.enter_norm, row), embedding)
        for i, (site, sublayer) in enumerate(zip(self.sites, sublayers, strict=True)):
            plain = (start == "sublayer" and i == 0) or (start == "layer" and self.layout[i].layer == 0)
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))

            def write(row, u, s=site, plain=plain):
                u = reference_norm(s.update_norm, u)
                return row + u if plain else reference_norm(s.output_norm, alpha * row + u)

            x = each_token(write, x, update)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)
