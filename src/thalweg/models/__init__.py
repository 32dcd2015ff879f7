"""Decoders over any connection, their sizes, and the Hugging Face shell."""

from thalweg.models.cache import DecoderCache
from thalweg.models.config import DecoderConfig
from thalweg.models.decoder import Decoder, DecoderOutput
from thalweg.models.trace import SiteRecord, StreamTrace

__all__ = ["Decoder", "DecoderCache", "DecoderConfig", "DecoderOutput", "SiteRecord", "StreamTrace"]
