"""From a configuration to the model that it describes."""

import torch

from thalweg.errors import InputError
from thalweg.models.config import DecoderConfig
from thalweg.models.decoder import Decoder
from thalweg.models.encoder import Encoder
from thalweg.models.transformer import Transformer

KINDS: dict[str, type[Transformer]] = {"decoder": Decoder, "encoder": Encoder}


def make(config: DecoderConfig, *, generator: torch.Generator | None = None) -> Transformer:
    """A :class:`Decoder` of a ``DecoderConfig``, an :class:`Encoder` of an ``EncoderConfig``. generator: as for both."""
    return KINDS[kind_of(config)](config, generator=generator)


def kind_of(config: DecoderConfig) -> str:
    """``decoder`` or ``encoder``."""
    for name, kind in KINDS.items():
        if isinstance(config, kind.made_of) and config.causal == kind.made_of.causal:
            return name
    raise InputError(f"a model is made of a DecoderConfig or an EncoderConfig, got {type(config).__name__}")
