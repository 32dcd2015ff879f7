"""The post-norm residual connection of the original Transformer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thalweg.connections import register
from thalweg.connections.base import (
    ConnectionOptions,
    Facts,
    Requirements,
    Site,
    Stream,
    StreamSite,
    each_token,
    reference_norm,
    shaped,
)
from thalweg.ops.norms import Norm
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class PostNormOptions(ConnectionOptions):
    """Slots of the post-norm family. The norm on the sum belongs to the equation, so it has no switch.

    final_norm: a norm on what the unembedding sees; off, since the stream leaves the last site normalised already.
    enter_norm: a norm on the embedding before the first sublayer; off as in the original Transformer, on as in BERT.
    """

    input_norm: bool = False
    final_norm: bool = False
    enter_norm: bool = False


class PostNormSite(StreamSite):
    """x' = output_norm(alpha x + F(x)), with alpha = 1 here; the rest of the family sets another alpha."""

    alpha: float = 1.0

    def __init__(self, width: int, site: Site, options: ConnectionOptions):
        super().__init__(width, site, options)
        self.output_norm = options.make_norm(width)

    def write(self, state, update, context):
        total = torch.add(self.update_norm(update), state, alpha=self.alpha)  # product and sum in one rounding
        return self.output_norm(total.to(state.dtype))

    def reset_parameters(self):
        super().reset_parameters()
        self.output_norm.reset_parameters()


@register(
    "post_norm",
    summary="post-norm residual: x' = norm(x + F(x))",
    source="Vaswani et al. 2017 (arXiv 1706.03762), Section 3.1",
)
class PostNorm(Stream):
    """Post-norm residual stream: every sublayer reads a normalised stream, and the skip path runs through every norm.

    Shapes: state [b t d].
    Source: Vaswani et al. 2017 (arXiv 1706.03762), Section 3.1; Xiong et al. 2020 (arXiv 2002.04745), Fig. 1a.
    """

    Options = PostNormOptions
    SiteModule = PostNormSite
    enter_norm: Norm
    facts = Facts(
        source="Vaswani et al. 2017, arXiv 1706.03762, Section 3.1; Xiong et al. 2020, arXiv 2002.04745, Fig. 1a",
        equation="x' = norm(x + F(x))",
        words="The sublayer reads the stream [b t d] as it is; its update [b t d] is added, and the sum is normalised "
        "per token.",
        constraint="the state has unit root mean square per token, up to the learned scale of the norm",
        chosen=(
            "initial weights: the model's own distribution, without a factor for depth",
            "no norm on the embedding (enter_norm adds one) and no final norm (the last site has normalised)",
        ),
        deviations=("the norm is the model's (RMSNorm by default) where the paper has LayerNorm with bias",),
        verified=(
            REFERENCE,
            "torch.nn.TransformerEncoder with norm_first=False; logits and gradients in float64",
        ),
        bibtex="@inproceedings{vaswani2017attention, title={Attention Is All You Need}, author={Vaswani, Ashish and "
        "others}, booktitle={NeurIPS}, year={2017}}",
    )

    def __init__(self, width: int, sites: Sequence[Site], options: PostNormOptions):
        super().__init__(width, sites, options)
        self.enter_norm = options.make_norm(width, options.enter_norm)

    def enter(self, embedding, tokens=None):
        return self.enter_norm(shaped(embedding, self.width, what="embedding"))

    def reset_parameters(self):
        super().reset_parameters()
        self.enter_norm.reset_parameters()

    def requirements(self, site):
        return Requirements()

    @classmethod
    def variants(cls):
        return [{"enter_norm": True}, {"input_norm": True, "update_norm": True, "final_norm": True}]

    def reference(self, embedding, sublayers, tokens=None):
        x = each_token(lambda row: reference_norm(self.enter_norm, row), embedding)
        for site, sublayer in zip(self.sites, sublayers, strict=True):
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))

            def write(row, u, s=site):
                return reference_norm(s.output_norm, row + reference_norm(s.update_norm, u))

            x = each_token(write, x, update)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)
