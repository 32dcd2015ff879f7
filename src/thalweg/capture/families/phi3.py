"""Phi-3: query, key and value in one map, side by side, with grouped heads."""

from thalweg.capture.families import register
from thalweg.capture.families.llama import INNER
from thalweg.capture.maps import HeadsMap, Map, SiteMap


@register("phi3", summary="Phi 3 to 4", source="Phi3ForCausalLM")
def phi3(config):
    heads = HeadsMap(value="self_attn.qkv_proj", output="self_attn.o_proj", part="last")
    return Map(
        blocks="layers",
        sites=(
            SiteMap("attention", "self_attn", reads="input_layernorm", update="resid_attn_dropout", heads=heads),
            SiteMap("feed_forward", "mlp", reads="post_attention_layernorm", update="resid_mlp_dropout", inner=INNER),
        ),
        final_norm="norm",
    )
