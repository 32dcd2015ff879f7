"""Norms on what a sublayer returns: the vector that is added is what that norm gives, not what the sublayer does."""

from thalweg.capture.families import register
from thalweg.capture.families.llama import HEADS, INNER
from thalweg.capture.maps import Map, SiteMap


@register(
    "gemma2",
    summary="Gemma 2: norms before and after every sublayer, soft cap on the logits",
    source="Gemma2ForCausalLM",
)
@register(
    "gemma3_text",
    summary="Gemma 3, its text decoder: norms before and after every sublayer",
    source="Gemma3ForCausalLM",
)
def gemma(config):
    return Map(
        blocks="layers",
        sites=(
            SiteMap("attention", "self_attn", reads="input_layernorm", update="post_attention_layernorm", heads=HEADS),
            SiteMap(
                "feed_forward",
                "mlp",
                reads="pre_feedforward_layernorm",
                update="post_feedforward_layernorm",
                inner=INNER,
            ),
        ),
        final_norm="norm",
        logit_softcap=config.final_logit_softcapping,
    )


@register("olmo2", summary="OLMo 2: norms after every sublayer only", source="Olmo2ForCausalLM")
@register("olmo3", summary="OLMo 3: norms after every sublayer only", source="Olmo3ForCausalLM")
def olmo(config):
    return Map(
        blocks="layers",
        sites=(
            SiteMap("attention", "self_attn", reads="self_attn", update="post_attention_layernorm", heads=HEADS),
            SiteMap("feed_forward", "mlp", reads="mlp", update="post_feedforward_layernorm", inner=INNER),
        ),
        final_norm="norm",
    )
