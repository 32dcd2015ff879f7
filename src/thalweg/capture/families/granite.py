"""Granite: every update is multiplied before it is added, and the logits are divided."""

from dataclasses import replace

from thalweg.capture.families import register
from thalweg.capture.families.llama import ATTENTION, FEED_FORWARD
from thalweg.capture.maps import Map


@register("granite", summary="Granite 3: a multiplier on every update, logits divided", source="GraniteForCausalLM")
def granite(config):
    factor = float(config.residual_multiplier)
    return Map(
        blocks="layers",
        sites=tuple(replace(site, multiplier=factor) for site in (ATTENTION, FEED_FORWARD)),
        final_norm="norm",
        logit_scale=1 / config.logits_scaling,
    )
