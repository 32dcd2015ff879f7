"""DeepNorm: post-norm with a stronger skip and smaller initial weights, both set by the depth."""

import math
from dataclasses import dataclass

from thalweg.connections import register
from thalweg.connections.base import Facts, Requirements, Site, each_token, reference_norm
from thalweg.connections.post_norm import PostNorm, PostNormOptions, PostNormSite
from thalweg.errors import InputError
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class DeepNormOptions(PostNormOptions):
    """alpha: factor on the skip (none: by depth); beta: gain of the initial weights (none: by depth)."""

    alpha: float | None = None
    beta: float | None = None

    def __post_init__(self):
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(
                    f"deepnorm.{name} must be a positive number, got {value}; leave it out to set it by depth"
                )


def skip_factor(site: Site) -> float:
    """alpha = (2M)^(1/4), where 2M is the number of sublayers."""
    return site.total**0.25


def weight_gain(site: Site) -> float:
    """beta = (8M)^(-1/4), where 2M is the number of sublayers."""
    return (4 * site.total) ** -0.25


class DeepNormSite(PostNormSite):
    """x' = norm(alpha x + F(x))."""

    def __init__(self, width: int, site: Site, options: DeepNormOptions):
        super().__init__(width, site, options)
        self.alpha = skip_factor(site) if options.alpha is None else options.alpha


@register(
    "deepnorm",
    summary="post-norm with a skip factor and initial gain set by depth: x' = norm(alpha x + F(x))",
    source="Wang et al. 2022 (arXiv 2203.00555)",
)
class DeepNorm(PostNorm):
    """Post-norm stream for great depth. The constants hold for decoder-only stacks, and equally for encoder-only ones.

    Shapes: state [b t d]. With M layers of two sublayers: alpha = (2M)^(1/4) on the skip; Xavier initial weights with
    gain beta = (8M)^(-1/4) on value, attention output and feed-forward maps, and gain 1 on query and key (stated by
    :meth:`requirements`; a sublayer that fuses query, key and value must give the gain to the value rows alone).
    Errors: InputError for an alpha or beta that is not positive.
    Source: Wang et al. 2022 (arXiv 2203.00555); constants compared with the authors' torchscale.
    """

    Options = DeepNormOptions
    SiteModule = DeepNormSite
    options: DeepNormOptions
    facts = Facts(
        source="Wang et al. 2022, arXiv 2203.00555; constants as in the authors' torchscale",
        equation="x' = norm(alpha x + F(x))\nalpha = (2M)^(1/4), beta = (8M)^(-1/4) for M layers of two sublayers",
        words="The sublayer reads the stream [b t d]; its update [b t d] is added to alpha times the stream, and the "
        "sum is normalised per token. Initial weights of value, attention output and feed-forward maps are Xavier with "
        "gain beta, those of query and key with gain 1.",
        constraint="the state has unit root mean square per token, up to the learned scale of the norm",
        chosen=(
            "2M is the number of sublayers, as the derivation counts: layers need not have two of them",
            "Xavier normal, as in the paper's pseudo-code; its public code scales other distributions",
        ),
        deviations=(
            "the norm is the model's (RMSNorm by default) where the paper has LayerNorm with bias",
            "the constants of encoder-decoder models are left out",
        ),
        verified=(REFERENCE,),
        bibtex="@article{wang2022deepnet, title={DeepNet: Scaling Transformers to 1,000 Layers}, author={Wang, Hongyu "
        "and Ma, Shuming and Dong, Li and Huang, Shaohan and Zhang, Dongdong and Wei, Furu}, "
        "journal={arXiv:2203.00555}, year={2022}}",
    )

    def requirements(self, site):
        return Requirements(gain=weight_gain(site) if self.options.beta is None else self.options.beta, init="xavier")

    @classmethod
    def variants(cls):
        return [{"alpha": 1.5, "beta": 0.5}]

    def reference(self, embedding, sublayers, tokens=None):
        layers = len(sublayers) / 2  # M, in layers of two sublayers
        alpha = (2 * layers) ** (1 / 4) if self.options.alpha is None else self.options.alpha
        x = each_token(lambda row: reference_norm(self.enter_norm, row), embedding)
        for site, sublayer in zip(self.sites, sublayers, strict=True):
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))

            def write(row, u, s=site):
                return reference_norm(s.output_norm, alpha * row + reference_norm(s.update_norm, u))

            x = each_token(write, x, update)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)
