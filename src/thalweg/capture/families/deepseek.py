"""DeepSeek: latent attention, and from V4 on streams side by side that a matrix mixes at every site."""

from dataclasses import replace

from thalweg.capture.families import register
from thalweg.capture.families.llama import ATTENTION, FEED_FORWARD, INNER
from thalweg.capture.maps import Map, SiteMap

LATENT = "latent attention: the values of all heads come out of one compressed latent"
SHARED = "keys and values are one rotated vector, and heads leave through a grouped low-rank map"


@register("deepseek_v3", summary="DeepSeek V3 and R1: latent attention, experts", source="DeepseekV3ForCausalLM")
def deepseek_v3(config):
    attention = replace(ATTENTION, heads=None, no_heads=LATENT)
    return Map(blocks="layers", sites=(attention, FEED_FORWARD), final_norm="norm")


@register(
    "deepseek_v4", summary="DeepSeek V4: several streams, mixed at every site (mHC)", source="DeepseekV4ForCausalLM"
)
def deepseek_v4(config):
    return Map(
        blocks="layers",
        sites=(
            SiteMap("attention", "self_attn", streams="attn_hc", no_heads=SHARED),
            SiteMap("feed_forward", "mlp", streams="ffn_hc", inner=INNER),
        ),
        contract="hc_head",
        final_norm="norm",
        streams=int(config.hc_mult),
    )
