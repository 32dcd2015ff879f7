"""Decoders over any connection, their sizes, and the Hugging Face shell. Names load when they are first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thalweg.models.cache import DecoderCache
    from thalweg.models.config import DecoderConfig
    from thalweg.models.decoder import Decoder, DecoderOutput
    from thalweg.models.hf import ThalwegCache, ThalwegForCausalLM
    from thalweg.models.hf_config import ThalwegConfig
    from thalweg.models.matching import match_flops, match_parameters
    from thalweg.models.size import Size, size_of
    from thalweg.models.trace import SiteRecord, StreamTrace

_HOMES = {
    "Decoder": "decoder",
    "DecoderCache": "cache",
    "DecoderConfig": "config",
    "DecoderOutput": "decoder",
    "Size": "size",
    "SiteRecord": "trace",
    "StreamTrace": "trace",
    "ThalwegCache": "hf",
    "ThalwegConfig": "hf_config",
    "ThalwegForCausalLM": "hf",
    "match_flops": "matching",
    "match_parameters": "matching",
    "size_of": "size",
}

__all__ = [
    "Decoder",
    "DecoderCache",
    "DecoderConfig",
    "DecoderOutput",
    "SiteRecord",
    "Size",
    "StreamTrace",
    "ThalwegCache",
    "ThalwegConfig",
    "ThalwegForCausalLM",
    "match_flops",
    "match_parameters",
    "size_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
