"""The pre-norm additive residual connection: the baseline of everything."""

from thalweg.connections import register
from thalweg.connections.base import Facts, Stream, StreamSite, each_token, reference_norm
from thalweg.registry import REFERENCE


class AdditiveSite(StreamSite):
    """x' = x + F(norm(x))."""

    def write(self, state, update, context):
        return (state + self.update_norm(update)).to(state.dtype)


@register(
    "additive",
    summary="pre-norm residual: x' = x + F(norm(x))",
    source="He et al. 2016 (arXiv 1603.05027); Xiong et al. 2020 (arXiv 2002.04745), Fig. 1b",
    aliases=("pre_norm",),
)
class Additive(Stream):
    """Pre-norm residual stream; with ``update_norm`` the sandwich form, without ``input_norm`` the norm-free one.

    Shapes: state [b t d].
    Source: He et al. 2016 (arXiv 1603.05027); Xiong et al. 2020 (arXiv 2002.04745). Output maps start at 1/sqrt(2L) of the usual
    size, as in GPT-2 (Radford et al. 2019).
    """

    SiteModule = AdditiveSite
    facts = Facts(
        source="Xiong et al. 2020, arXiv 2002.04745, Fig. 1b; output maps scaled by 1/sqrt(number of sublayers) as in GPT-2",
        equation="x' = x + F(norm(x))",
        words="The sublayer reads the normalised stream [b t d] and its update [b t d] is added to the stream.",
        constraint="skip Jacobian is the identity",
        verified=(
            REFERENCE,
            "transformers: Llama, Qwen3, Phi and, with update_norm, Gemma 2; logits and gradients in float64",
        ),
        bibtex=(
            "@inproceedings{xiong2020layer, title={On Layer Normalization in the Transformer Architecture},"
            " author={Xiong, Ruibin and others}, booktitle={ICML}, year={2020}}"
        ),
    )

    def start_as_additive(self):
        return (1.0,) * len(self.layout)

    def reference(self, embedding, sublayers, tokens=None):
        x = embedding
        for site, sublayer in zip(self.sites, sublayers, strict=True):
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))
            x = each_token(lambda row, u, s=site: row + reference_norm(s.update_norm, u), x, update)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)
