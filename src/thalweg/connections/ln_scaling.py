"""LayerNorm scaling: pre-norm whose norm output shrinks with the square root of the layer's index."""

from thalweg.connections import register
from thalweg.connections.additive import AdditiveSite
from thalweg.connections.base import (
    ConnectionOptions,
    Equivalence,
    Facts,
    Requirements,
    Site,
    Stream,
    each_token,
    reference_norm,
    shaped,
)
from thalweg.registry import REFERENCE


class LayerNormScalingSite(AdditiveSite):
    """x' = x + F(norm(x) / sqrt(l)), layers counted from l = 1."""

    def __init__(self, width: int, site: Site, options: ConnectionOptions):
        super().__init__(width, site, options)
        self.factor = (site.layer + 1) ** -0.5

    def read(self, state, tokens=None):
        return self.input_norm(shaped(state, self.input_norm.width)) * self.factor, None


@register(
    "ln_scaling",
    summary="pre-norm residual, norm output over the root of the layer's index: x' = x + F(norm(x) / sqrt(l))",
    source="Sun et al. 2025 (arXiv 2502.05795)",
)
class LayerNormScaling(Stream):
    """Pre-norm stream in which deeper layers read a smaller input, so that the stream's variance grows less with depth.

    Shapes: state [b t d]. The factor belongs to the layer: all its sublayers have the same one.
    Source: Sun et al. 2025 (arXiv 2502.05795); compared with the authors' code. The final norm is not scaled.
    """

    SiteModule = LayerNormScalingSite
    facts = Facts(
        source="Sun et al. 2025, arXiv 2502.05795; places of the factor as in the authors' code",
        equation="x' = x + F(norm(x) / sqrt(l)), layers l = 1, 2, ...",
        words="The sublayer reads the normalised stream [b t d] divided by the square root of its layer's index, "
        "counted from one; its update [b t d] is added to the stream. The final norm is not scaled.",
        constraint="skip Jacobian is the identity",
        chosen=("output maps do not start smaller in deep networks: the source advises against combining the two",),
        verified=(REFERENCE,),
        bibtex="@article{sun2025curse, title={The Curse of Depth in Large Language Models}, author={Sun, Wenfang and "
        "Song, Xinyuan and Li, Pengxiang and Yin, Lu and Zheng, Yefeng and Liu, Shiwei}, journal={arXiv:2502.05795}, "
        "year={2025}}",
    )

    def requirements(self, site):
        return Requirements()

    def equals_at_start(self):
        if any(site.layer > 0 for site in self.layout):
            return None
        slots = self.options.slots()
        return Equivalence("additive", slots)

    def reference(self, embedding, sublayers, tokens=None):
        x = embedding
        for place, site, sublayer in zip(self.layout, self.sites, sublayers, strict=True):
            root = (place.layer + 1) ** 0.5
            update = sublayer(each_token(lambda row, s=site, r=root: reference_norm(s.input_norm, row) / r, x))
            x = each_token(lambda row, u, s=site: row + reference_norm(s.update_norm, u), x, update)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)
