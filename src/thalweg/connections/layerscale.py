"""LayerScale: each channel of an update has its own small learned factor."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from thalweg.connections import register
from thalweg.connections.base import (
    ConnectionOptions,
    Equivalence,
    Facts,
    GroupHint,
    Requirements,
    Site,
    Stream,
    StreamSite,
    each_token,
    reference_norm,
)
from thalweg.errors import InputError
from thalweg.ops.precision import wide
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class LayerScaleOptions(ConnectionOptions):
    """init: first value of every factor (none: by depth)."""

    init: float | None = None

    def __post_init__(self):
        if self.init is not None and not math.isfinite(self.init):
            raise InputError(
                f"layerscale.init must be a finite number, got {self.init}; leave it out to set it by depth"
            )


def start_by_depth(depth: int) -> float:
    """The first factor in a network of ``depth`` layers: 0.1 up to 18, 1e-5 up to 24, 1e-6 beyond."""
    if depth <= 18:
        return 0.1
    return 1e-5 if depth <= 24 else 1e-6


class LayerScaleSite(StreamSite):
    """x' = x + scale * F(norm(x)), scale [d]."""

    def __init__(self, width: int, site: Site, options: LayerScaleOptions):
        super().__init__(width, site, options)
        self.start = start_by_depth(site.depth) if options.init is None else options.init
        self.scale = nn.Parameter(torch.full((width,), self.start))

    def write(self, state, update, context):
        return (state + wide(self.scale) * self.update_norm(update)).to(state.dtype)

    def gates(self, state, context, update=None):
        return {"beta": self.scale.expand_as(state)}

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.constant_(self.scale, self.start)


@register(
    "layerscale",
    summary="pre-norm residual with a learned factor per channel: x' = x + scale * F(norm(x))",
    source="Touvron et al. 2021 (arXiv 2103.17239)",
)
class LayerScale(Stream):
    """Pre-norm stream with a diagonal matrix on each update, which starts near zero in deep networks.

    Shapes: state [b t d]; scale [d] at every site.
    Errors: InputError for an ``init`` that is not finite.
    Source: Touvron et al. 2021 (arXiv 2103.17239).
    """

    Options = LayerScaleOptions
    SiteModule = LayerScaleSite
    options: LayerScaleOptions
    facts = Facts(
        source="Touvron et al. 2021, arXiv 2103.17239",
        equation="x' = x + diag(scale) F(norm(x))\nscale starts at 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond",
        words="The sublayer reads the normalised stream [b t d]; each channel of its update [b t d] is multiplied by a "
        "learned factor, scale [d], and added to the stream.",
        constraint="skip Jacobian is the identity",
        chosen=(
            "depths from 19 to 23 start at 1e-5, as 24 does",
            "initial weights: the model's own distribution, without a factor for depth",
            "no weight decay on scale",
        ),
        verified=(
            REFERENCE,
            "transformers: Granite, the scale held at its residual multiplier; logits and gradients in float64",
        ),
        bibtex="@inproceedings{touvron2021going, title={Going Deeper with Image Transformers}, author={Touvron, Hugo "
        "and Cord, Matthieu and Sablayrolles, Alexandre and Synnaeve, Gabriel and J{\\'e}gou, Herv{\\'e}}, "
        "booktitle={ICCV}, year={2021}}",
    )

    def requirements(self, site):
        return Requirements()

    def group_hints(self):
        return {"sites.*.scale": GroupHint(weight_decay=0.0)}

    def equals_at_start(self):
        if self.options.init != 1.0:
            return None
        slots = self.options.slots()
        return Equivalence("additive", slots)

    @classmethod
    def additive_options(cls, given):
        return {"init": 1.0}

    @classmethod
    def variants(cls):
        return [{"init": 1.0}]

    def reference(self, embedding, sublayers, tokens=None):
        x = embedding
        for site, sublayer in zip(self.sites, sublayers, strict=True):
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))

            def write(row, u, s=site):
                u = reference_norm(s.update_norm, u)
                return torch.stack([row[i] + s.scale[i] * u[i] for i in range(self.width)])

            x = each_token(write, x, update)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)
