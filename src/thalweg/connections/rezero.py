"""ReZero: no norm, and one learned scalar per layer that starts at zero.

How the scalar is shared: all sublayers of a layer use one Parameter. It is registered once, in the stream, as
``scalars.<layer>.alpha``; so ``named_parameters``, optimisers, DDP and safetensors see one tensor under one name, and
no checkpoint can split a tied pair. A site keeps an unregistered reference to the *module* that owns the parameter,
never to the parameter: what replaces parameters on their owner (sharding, loading by assignment, ``functional_call``)
is seen by every site, and a deep copy keeps the sharing.
"""

import math
from collections.abc import Sequence
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
class ReZeroOptions(ConnectionOptions):
    """init: first value of every scalar. lr_mul: factor on the learning rate of the scalars."""

    input_norm: bool = False
    final_norm: bool = False
    init: float = 0.0
    lr_mul: float = 1.0

    def __post_init__(self):
        if not math.isfinite(self.init):
            raise InputError(f"rezero.init must be a finite number, got {self.init}")
        if not (math.isfinite(self.lr_mul) and self.lr_mul > 0):
            raise InputError(f"rezero.lr_mul must be a positive number, got {self.lr_mul}")


class LayerScalar(nn.Module):
    """The scalar of one layer, alpha [1] (one axis: FSDP refuses parameters without any)."""

    def __init__(self, start: float):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), start))


class ReZeroSite(StreamSite):
    """x' = x + alpha F(x), with the alpha of its layer."""

    scalar: LayerScalar

    def share(self, scalar: LayerScalar) -> None:
        """Use ``scalar`` of the stream, which stays its only owner."""
        object.__setattr__(self, "scalar", scalar)  # nn.Module's own would register it here a second time

    def write(self, state, update, context):
        return (state + wide(self.scalar.alpha) * self.update_norm(update)).to(state.dtype)

    def gates(self, state, context, update=None):
        return {"beta": self.scalar.alpha.expand(state.shape[:-1])}


@register(
    "rezero",
    summary="residual without norms, one scalar per layer that starts at zero: x' = x + alpha F(x)",
    source="Bachlechner et al. 2020 (arXiv 2003.04887)",
)
class ReZero(Stream):
    """Norm-free stream that starts as the identity; the sublayers of one layer share their scalar.

    Shapes: state [b t d]; alpha [1] in every layer. At alpha = 0 the sublayers get a gradient of zero: on the first
    step only the scalars move.
    Errors: InputError for an ``init`` that is not finite or a ``lr_mul`` that is not positive.
    Source: Bachlechner et al. 2020 (arXiv 2003.04887); sharing as in the authors' code for Transformers.
    """

    Options = ReZeroOptions
    SiteModule = ReZeroSite
    options: ReZeroOptions
    facts = Facts(
        source="Bachlechner et al. 2020, arXiv 2003.04887; one scalar per layer as in the authors' Transformer code",
        equation="x' = x + alpha_l F(x)\nalpha_l = 0 at the start, shared by the sublayers of layer l",
        words="The sublayer reads the stream [b t d] as it is; its update [b t d] is multiplied by the scalar of its "
        "layer, alpha [1], and added to the stream. The untrained network is the identity.",
        constraint="skip Jacobian is the identity",
        chosen=(
            "initial weights: the model's own distribution, without a factor for depth",
            "no final norm, so the embedding alone sets the size of the first logits: small embeddings start slowly",
            "no weight decay on alpha; its learning rate is the run's times lr_mul (1)",
        ),
        verified=(REFERENCE,),
        bibtex="@inproceedings{bachlechner2021rezero, title={ReZero Is All You Need: Fast Convergence at Large Depth}, "
        "author={Bachlechner, Thomas and Majumder, Bodhisattwa Prasad and Mao, Henry and Cottrell, Garrison and "
        "McAuley, Julian}, booktitle={UAI}, year={2021}}",
    )

    def __init__(self, width: int, sites: Sequence[Site], options: ReZeroOptions):
        super().__init__(width, sites, options)
        layers = sorted({site.layer for site in sites})
        self.scalars = nn.ModuleDict({str(layer): LayerScalar(options.init) for layer in layers})
        for module, site in zip(self.sites, sites, strict=True):
            module.share(self.scalars[str(site.layer)])

    def reset_parameters(self):
        super().reset_parameters()
        for alpha in self.scalars.parameters():
            nn.init.constant_(alpha, self.options.init)

    def requirements(self, site):
        return Requirements()

    def group_hints(self):
        return {"scalars.*.alpha": GroupHint(lr_mul=self.options.lr_mul, weight_decay=0.0)}

    def equals_at_start(self):
        if self.options.init != 1.0:  # at 0 it is the identity, which is no connection of its own
            return None
        slots = self.options.slots()
        return Equivalence("additive", slots)

    @classmethod
    def variants(cls):
        return [{"init": 1.0, "input_norm": True, "final_norm": True}]

    def reference(self, embedding, sublayers, tokens=None):
        x, parameters = embedding, dict(self.named_parameters())
        for place, site, sublayer in zip(self.layout, self.sites, sublayers, strict=True):
            alpha = parameters[f"scalars.{place.layer}.alpha"][0]
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))
            x = each_token(lambda row, u, s=site, a=alpha: row + a * reference_norm(s.update_norm, u), x, update)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)
