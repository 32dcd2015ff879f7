"""Keel: post-norm with a norm before the sublayer and a skip factor as large as the network is deep."""

import math
from dataclasses import dataclass
from typing import Literal

from thalweg.connections import register
from thalweg.connections.base import Facts, Site, each_token, reference_norm
from thalweg.connections.post_norm import PostNorm, PostNormOptions, PostNormSite
from thalweg.errors import InputError
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class KeelOptions(PostNormOptions):
    """alpha: factor on the skip: the number of sublayers, of layers, the root of the number of layers, or a number.

    plain_start: what keeps the plain pre-norm form x' = x + F(LN_in(x)): the first sublayer or layer, or nothing.
    """

    input_norm: bool = True
    alpha: Literal["sublayers", "layers", "sqrt_layers"] | float = "sublayers"
    plain_start: Literal["sublayer", "layer", "nothing"] = "sublayer"

    def __post_init__(self):
        if not isinstance(self.alpha, str) and not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InputError(
                f"keel.alpha must be sublayers, layers, sqrt_layers or a positive number, got {self.alpha}"
            )


def skip_factor(site: Site, alpha: str | float) -> float:
    """What the option ``alpha`` means in the network of ``site``."""
    if isinstance(alpha, str):
        return float({"sublayers": site.total, "layers": site.depth, "sqrt_layers": math.sqrt(site.depth)}[alpha])
    return alpha


class KeelSite(PostNormSite):
    """x' = LN_out(alpha x + F(LN_in(x))); in the plain start alpha = 1 and no LN_out."""

    def __init__(self, width: int, site: Site, options: KeelOptions):
        super().__init__(width, site, options)
        plain = {"sublayer": site.index == 0, "layer": site.layer == 0, "nothing": False}[options.plain_start]
        self.alpha = 1.0 if plain else skip_factor(site, options.alpha)
        self.output_norm = options.make_norm(width, used=not plain)


@register(
    "keel",
    summary="post-norm with an inner norm and a large skip factor: x' = norm(alpha x + F(norm(x)))",
    source="reconstructed from the abstract of Chen and Wei 2026 (arXiv 2601.19895) and public re-implementations",
)
class Keel(PostNorm):
    """Post-norm stream whose skip is so strong that the gradient reaches the first layers of very deep networks.

    Shapes: state [b t d].
    Errors: InputError for an alpha that is not positive.
    Source: reconstructed from the abstract of Chen and Wei 2026 (arXiv 2601.19895) and from public re-implementations;
    the body of the paper was not available. Whether its L counts layers or sublayers is ambiguous, and so is where the
    plain start ends. Both are options; the defaults are what the re-implementations have in common.
    """

    Options = KeelOptions
    SiteModule = KeelSite
    options: KeelOptions
    facts = Facts(
        source="reconstructed from the abstract of Chen and Wei 2026, arXiv 2601.19895, and public re-implementations",
        equation="x' = LN_out(alpha x + F(LN_in(x))), alpha = number of sublayers\n"
        "first sublayer: x' = x + F(LN_in(x))",
        words="The sublayer reads the normalised stream [b t d]; its update [b t d] is added to alpha times the "
        "stream, and the sum is normalised per token. The first sublayer is a plain pre-norm step.",
        constraint="the state has unit root mean square per token, up to the learned scale of the norm",
        chosen=(
            "alpha counts sublayers; the source is ambiguous (layers, sqrt_layers or a number are options)",
            "only the first sublayer is plain; re-implementations differ on the rest of the first layer (plain_start)",
            "no final norm (the last site has normalised) and no norm on the embedding (enter_norm adds one)",
            "initial weights: the model's own distribution, without a factor for depth (the abstract: none is needed)",
        ),
        verified=(REFERENCE,),
        bibtex="@article{chen2026postlayernorm, title={Post-LayerNorm Is Back: Stable, ExpressivE, and Deep}, "
        "author={Chen, Chen and Wei, Lai}, journal={arXiv:2601.19895}, year={2026}}",
    )

    @classmethod
    def variants(cls):
        return [
            {"alpha": "layers", "plain_start": "nothing"},
            {"alpha": "sqrt_layers", "plain_start": "layer"},
            {"alpha": 2.5, "enter_norm": True},
        ]

    def reference(self, embedding, sublayers, tokens=None):
        layers, start, alpha = self.layout[-1].layer + 1, self.options.plain_start, self.options.alpha
        if isinstance(alpha, str):
            alpha = {"sublayers": len(sublayers), "layers": layers, "sqrt_layers": layers**0.5}[alpha]
        x = each_token(lambda row: reference_norm(self.enter_norm, row), embedding)
        for i, (site, sublayer) in enumerate(zip(self.sites, sublayers, strict=True)):
            plain = (start == "sublayer" and i == 0) or (start == "layer" and self.layout[i].layer == 0)
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))

            def write(row, u, s=site, plain=plain):
                u = reference_norm(s.update_norm, u)
                return row + u if plain else reference_norm(s.output_norm, alpha * row + u)

            x = each_token(write, x, update)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)
