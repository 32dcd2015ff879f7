"""A classifier that reads no order and has no layers: what an encoder must beat."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from thalweg.errors import InputError
from thalweg.models.encoder import EncoderOutput, pool
from thalweg.models.init import one_seed
from thalweg.models.look import IGNORED, check_ids
from thalweg.ops.precision import wide


class BagOfEmbeddings(nn.Module):
    """logits = W mean(E[token] over the real tokens) + b: called as a classifying :class:`thalweg.models.Encoder` is.

    Any order of the tokens gives the same. Weights come from torch's global generator, or from ``generator``. std: of the embedding and of
    W at the start; b starts at 0.
    Source: Iyyer et al. 2015 (Deep Unordered Composition, ACL), without the hidden layers; Joulin et al. 2016 (arXiv 1607.01759), without
    n-grams.
    Raises: InputError for sizes that cannot be.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        classes: int,
        *,
        std: float = 0.02,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        for name, value, least in (("vocab_size", vocab_size, 1), ("width", width, 1), ("classes", classes, 2)):
            if value < least:
                raise InputError(f"{name} must be at least {least}, got {value}")
        with one_seed(generator) as seed:
            self.embedding, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, classes)
            torch.default_generator.manual_seed(seed)
            nn.init.normal_(self.embedding.weight, std=std)
            nn.init.normal_(self.head.weight, std=std)
            nn.init.zeros_(self.head.bias)

    def forward(
        self,
        input_ids: Int[Tensor, "b t"],
        *,
        labels: Int[Tensor, " b"] | None = None,
        attention_mask: Tensor | None = None,
    ) -> EncoderOutput:
        """Token ids [b t] -> logits [b c], and the loss (mean nats per label that is not -100) when labels are given. Raises: InputError."""
        check_ids(input_ids, self.embedding.num_embeddings)
        hidden: Float[Tensor, "b t d"] = self.embedding(input_ids)
        logits = self.head(pool(hidden, "mean", None if attention_mask is None else attention_mask.bool()))
        loss = None if labels is None else F.cross_entropy(wide(logits), labels, ignore_index=IGNORED)
        return EncoderOutput(hidden, logits, loss)
