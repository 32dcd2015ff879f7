"""Llama and those built like it: a norm before every sublayer, separate query, key and value maps."""

from thalweg.capture.families import register
from thalweg.capture.maps import HeadsMap, InnerMap, Map, SiteMap

HEADS = HeadsMap(value="self_attn.v_proj", output="self_attn.o_proj")
ATTENTION = SiteMap("attention", "self_attn", reads="input_layernorm", heads=HEADS)
INNER = InnerMap("mlp.down_proj")
FEED_FORWARD = SiteMap("feed_forward", "mlp", reads="post_attention_layernorm", inner=INNER)


@register("llama", summary="Llama 1 to 3.3, SmolLM2 and others of that class", source="LlamaForCausalLM")
@register("mistral", summary="Mistral 7B", source="MistralForCausalLM")
@register("mixtral", summary="Mixtral; the update is the sum of the experts", source="MixtralForCausalLM")
@register("qwen2", summary="Qwen 2 and 2.5", source="Qwen2ForCausalLM")
@register("qwen3", summary="Qwen 3", source="Qwen3ForCausalLM")
@register("qwen3_moe", summary="Qwen 3 with experts; the update is their sum", source="Qwen3MoeForCausalLM")
@register("gemma", summary="Gemma 1", source="GemmaForCausalLM")
@register("smollm3", summary="SmolLM3", source="SmolLM3ForCausalLM")
@register("gpt_oss", summary="gpt-oss: attention with sinks, experts", source="GptOssForCausalLM")
def llama(config):
    return Map(blocks="layers", sites=(ATTENTION, FEED_FORWARD), final_norm="norm")
