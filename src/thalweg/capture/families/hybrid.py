"""Layers with attention among layers that pass a state along the tokens: all are sites of the stream, values have only the former."""

from dataclasses import replace

from thalweg.capture.families import register
from thalweg.capture.families.llama import FEED_FORWARD
from thalweg.capture.maps import Map, SiteMap

GATED = "linear attention has no attention weights, and the full attention of this family gates its heads before the output map"


@register("qwen3_next", summary="Qwen3-Next: gated linear and full attention, experts", source="Qwen3NextForCausalLM")
def qwen3_next(config):
    mixer = SiteMap("attention", "self_attn | linear_attn", reads="input_layernorm", no_heads=GATED)
    return Map(blocks="layers", sites=(mixer, replace(FEED_FORWARD)), final_norm="norm")
