"""Decoders and encoders over any connection, their sizes, and the Hugging Face shell. Names load when they are first used."""

from typing import TYPE_CHECKING

from thalweg._lazy import lazy

if TYPE_CHECKING:
    from thalweg.models.bag import BagOfEmbeddings
    from thalweg.models.cache import DecoderCache
    from thalweg.models.config import DecoderConfig
    from thalweg.models.decoder import Decoder, DecoderOutput
    from thalweg.models.encoder import Encoder, EncoderOutput
    from thalweg.models.encoder_config import EncoderConfig
    from thalweg.models.hf import ThalwegCache, ThalwegForCausalLM
    from thalweg.models.hf_config import ThalwegConfig, ThalwegEncoderConfig
    from thalweg.models.hf_encoder import ThalwegForMaskedLM, ThalwegForSequenceClassification
    from thalweg.models.matching import match_flops, match_parameters
    from thalweg.models.size import Size, size_of
    from thalweg.models.sublayers.prototypes import PrototypeLayer
    from thalweg.models.trace import SiteRecord, StreamTrace

__all__ = [
    "BagOfEmbeddings",
    "Decoder",
    "DecoderCache",
    "DecoderConfig",
    "DecoderOutput",
    "Encoder",
    "EncoderConfig",
    "EncoderOutput",
    "PrototypeLayer",
    "SiteRecord",
    "Size",
    "StreamTrace",
    "ThalwegCache",
    "ThalwegConfig",
    "ThalwegEncoderConfig",
    "ThalwegForCausalLM",
    "ThalwegForMaskedLM",
    "ThalwegForSequenceClassification",
    "match_flops",
    "match_parameters",
    "size_of",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "bag": ("BagOfEmbeddings",),
        "cache": ("DecoderCache",),
        "config": ("DecoderConfig",),
        "decoder": ("Decoder", "DecoderOutput"),
        "encoder": ("Encoder", "EncoderOutput"),
        "encoder_config": ("EncoderConfig",),
        "hf": ("ThalwegCache", "ThalwegForCausalLM"),
        "hf_config": ("ThalwegConfig", "ThalwegEncoderConfig"),
        "hf_encoder": ("ThalwegForMaskedLM", "ThalwegForSequenceClassification"),
        "matching": ("match_flops", "match_parameters"),
        "size": ("Size", "size_of"),
        "sublayers.prototypes": ("PrototypeLayer",),
        "trace": ("SiteRecord", "StreamTrace"),
    },
)
