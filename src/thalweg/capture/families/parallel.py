"""Attention and feed-forward side by side: both read the input of the block, and their sum is added once."""

from thalweg.capture.families import register
from thalweg.capture.families.llama import HEADS, INNER
from thalweg.capture.maps import HeadsMap, InnerMap, Map, SiteMap


@register(
    "gpt_neox", summary="GPT-NeoX, Pythia; parallel unless the config says otherwise", source="GPTNeoXForCausalLM"
)
def gpt_neox(config):
    heads = HeadsMap(value="attention.query_key_value", output="attention.dense", part="tail")
    return Map(
        blocks="layers",
        sites=(
            SiteMap("attention", "attention", reads="input_layernorm", update="post_attention_dropout", heads=heads),
            SiteMap(
                "feed_forward",
                "mlp",
                reads="post_attention_layernorm",
                update="post_mlp_dropout",
                inner=InnerMap("mlp.dense_4h_to_h"),
            ),
        ),
        parallel=bool(config.use_parallel_residual),
        final_norm="final_layer_norm",
    )


@register("phi", summary="Phi 1 to 2: parallel, one norm for both branches", source="PhiForCausalLM")
def phi(config):
    heads = HeadsMap(value="self_attn.v_proj", output="self_attn.dense")
    return Map(
        blocks="layers",
        sites=(
            SiteMap("attention", "self_attn", reads="input_layernorm", heads=heads),
            SiteMap("feed_forward", "mlp", reads="input_layernorm", inner=InnerMap("mlp.fc2")),
        ),
        parallel=True,
        final_norm="final_layernorm",
    )


@register(
    "cohere", summary="Command R: parallel, one norm for both branches, logits scaled", source="CohereForCausalLM"
)
def cohere(config):
    return Map(
        blocks="layers",
        sites=(
            SiteMap("attention", "self_attn", reads="input_layernorm", heads=HEADS),
            SiteMap("feed_forward", "mlp", reads="input_layernorm", inner=INNER),
        ),
        parallel=True,
        final_norm="norm",
        logit_scale=float(config.logit_scale),
    )
