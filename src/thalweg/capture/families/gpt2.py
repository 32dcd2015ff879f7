"""GPT-2: query, key and value in one map, side by side."""

from thalweg.capture.families import register
from thalweg.capture.maps import HeadsMap, InnerMap, Map, SiteMap


@register("gpt2", summary="GPT-2 and DistilGPT-2", source="GPT2LMHeadModel")
def gpt2(config):
    heads = HeadsMap(value="attn.c_attn", output="attn.c_proj", part="last")
    return Map(
        blocks="h",
        sites=(
            SiteMap("attention", "attn", reads="ln_1", heads=heads),
            SiteMap("feed_forward", "mlp", reads="ln_2", inner=InnerMap("mlp.c_proj")),
        ),
        final_norm="ln_f",
    )
