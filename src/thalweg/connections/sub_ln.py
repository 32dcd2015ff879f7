"""Sub-LN: the additive connection with a second norm inside every sublayer and an initial gain set by the depth."""

import math

from thalweg.connections import register
from thalweg.connections.additive import AdditiveSite
from thalweg.connections.base import (
    Equivalence,
    Facts,
    Requirements,
    Site,
    Stream,
    each_token,
    reference_norm,
)
from thalweg.registry import REFERENCE


def weight_gain(site: Site) -> float:
    """sqrt(ln 2M), where 2M is the number of sublayers; counted as two at least, since ln 1 would start at zero."""
    return math.sqrt(math.log(max(site.total, 2)))


@register(
    "sub_ln",
    summary="pre-norm residual, and a norm before each sublayer's last map: x' = x + W norm(f(norm(x)))",
    source="Wang et al. 2022 (arXiv 2210.06423)",
    aliases=("magneto",),
)
class SubLN(Stream):
    """Pre-norm stream whose sublayers carry an inner norm. On the stream itself it is the additive connection.

    Shapes: state [b t d]. With M layers of two sublayers the initial weights of value, attention output and
    feed-forward maps are Xavier with gain sqrt(ln 2M), those of query and key with gain 1. Inner norm and gains are
    stated by :meth:`requirements`.
    Source: Wang et al. 2022 (arXiv 2210.06423, Magneto); compared with the authors' torchscale.
    """

    SiteModule = AdditiveSite
    facts = Facts(
        source="Wang et al. 2022, arXiv 2210.06423 (Magneto); gain and places of norms as in the authors' torchscale",
        equation="x' = x + W norm(f(norm(x))), where F(z) = W f(z) is the sublayer and W its last map\n"
        "gain = sqrt(ln 2M) for M layers of two sublayers",
        words="The sublayer reads the normalised stream [b t d]. Inside, what goes into its last map is normalised "
        "again: the heads' values side by side before the output map, the hidden units before the second feed-forward "
        "map. Its update [b t d] is added to the stream.",
        constraint="skip Jacobian is the identity",
        chosen=(
            "2M is the number of sublayers, and 2 where there is only one (the logarithm would be zero)",
            "Xavier normal, as in the paper's pseudo-code; its public code scales other distributions",
        ),
        deviations=("the norms are the model's (RMSNorm by default) where the paper has LayerNorm with bias",),
        verified=(REFERENCE,),
        bibtex="@inproceedings{wang2023magneto, title={Magneto: A Foundation Transformer}, author={Wang, Hongyu and "
        "Ma, Shuming and others}, booktitle={ICML}, year={2023}}",
    )

    def requirements(self, site):
        return Requirements(gain=weight_gain(site), init="xavier", inner_norm=True)

    def equals_at_start(self):
        slots = self.options.slots()
        return Equivalence("additive", slots)

    def reference(self, embedding, sublayers, tokens=None):
        x = embedding
        for site, sublayer in zip(self.sites, sublayers, strict=True):
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))
            x = each_token(lambda row, u, s=site: row + reference_norm(s.update_norm, u), x, update)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)
