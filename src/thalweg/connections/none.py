"""No skip at all: the control in which rank collapse is expected."""

from thalweg.connections import register
from thalweg.connections.base import Facts, Requirements, Stream, StreamSite, each_token, reference_norm
from thalweg.registry import REFERENCE


class NoSkipSite(StreamSite):
    """x' = F(norm(x))."""

    def write(self, state, update, context):
        return self.update_norm(update).to(state.dtype)


@register(
    "none",
    summary="no skip: x' = F(norm(x)), the control for rank collapse",
    source="Dong et al. 2021 (arXiv 2103.03404)",
    aliases=("no_skip",),
)
class NoSkip(Stream):
    """Stack of sublayers without a residual connection; without ``input_norm`` and ``final_norm`` also without norms.

    Shapes: state [b t d].
    Source: the network without skips of Dong et al. 2021 (arXiv 2103.03404), which loses rank doubly exponentially with
    depth when it is made of attention alone.
    """

    SiteModule = NoSkipSite
    facts = Facts(
        source="Dong et al. 2021, arXiv 2103.03404: the network without skip connections",
        equation="x' = F(norm(x))",
        words="The sublayer reads the normalised stream [b t d], and its output [b t d] takes the stream's place.",
        constraint="no skip: the skip Jacobian is zero",
        chosen=(
            "norms as in the additive connection, so that only the skip differs; input_norm and final_norm are options",
            "initial weights: the model's own distribution, without a factor for depth: it would shrink the only path",
        ),
        verified=(REFERENCE,),
        bibtex="@inproceedings{dong2021attention, title={Attention Is Not All You Need: Pure Attention Loses Rank "
        "Doubly Exponentially with Depth}, author={Dong, Yihe and Cordonnier, Jean-Baptiste and Loukas, Andreas}, "
        "booktitle={ICML}, year={2021}}",
    )

    def requirements(self, site):
        return Requirements()

    @classmethod
    def variants(cls):
        return [{"input_norm": False, "final_norm": False}]

    def reference(self, embedding, sublayers, tokens=None):
        x = embedding
        for site, sublayer in zip(self.sites, sublayers, strict=True):
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))
            x = each_token(lambda u, s=site: reference_norm(s.update_norm, u), update)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)
