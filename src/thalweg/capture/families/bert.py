"""Encoders: BERT and those built like it, with a norm over every sum, and ModernBERT, with norms before the sublayers."""

from thalweg.capture.families import register
from thalweg.capture.maps import HeadsMap, InnerMap, Map, SiteMap


@register("bert", summary="BERT, MiniLM and others of that class", source="BertModel")
@register("roberta", summary="RoBERTa", source="RobertaModel")
@register("xlm-roberta", summary="XLM-RoBERTa", source="XLMRobertaModel")
@register("electra", summary="ELECTRA", source="ElectraModel")
def bert(config):
    heads = HeadsMap(value="attention.self.value", output="attention.output.dense")
    return Map(
        blocks="layer",
        sites=(
            SiteMap(
                "attention",
                "attention",
                reads="attention",
                update="attention.output.dropout",
                norm_after="attention.output.LayerNorm",
                heads=heads,
            ),
            SiteMap(
                "feed_forward",
                "output",
                reads="intermediate",
                update="output.dropout",
                norm_after="output.LayerNorm",
                inner=InnerMap("output.dense", given="intermediate", output="output.dropout"),
            ),
        ),
        causal=False,
    )


@register("distilbert", summary="DistilBERT", source="DistilBertModel")
def distilbert(config):
    heads = HeadsMap(value="attention.v_lin", output="attention.out_lin")
    return Map(
        blocks="layer",
        sites=(
            SiteMap("attention", "attention", reads="attention", norm_after="sa_layer_norm", heads=heads),
            SiteMap("feed_forward", "ffn", reads="ffn", norm_after="output_layer_norm", inner=InnerMap("ffn.lin2")),
        ),
        causal=False,
    )


@register("modernbert", summary="ModernBERT: norms before the sublayers", source="ModernBertModel")
def modernbert(config):
    heads = HeadsMap(value="attn.Wqkv", output="attn.Wo", part="last")
    return Map(
        blocks="layers",
        sites=(
            SiteMap("attention", "attn", reads="attn_norm", heads=heads),
            SiteMap("feed_forward", "mlp", reads="mlp_norm", inner=InnerMap("mlp.Wo")),
        ),
        final_norm="final_norm",
        causal=False,
    )
