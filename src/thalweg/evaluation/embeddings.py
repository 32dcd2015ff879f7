"""Encoders without a head: how far an edit moves their embeddings, and whether texts stay as similar to each other as they were."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thalweg.capture.evaluating import evaluating
from thalweg.capture.limits import vocabulary_of
from thalweg.errors import InputError, ShapeError
from thalweg.evaluation.documents import Document, as_documents
from thalweg.evaluation.perplexity import length_of
from thalweg.evaluation.scores import Scores, share
from thalweg.evaluation.scoring import batches, check_batch, device_of, rows_of
from thalweg.evaluation.subjects import around, check_tokenizer, ids_of
from thalweg.ops.precision import wide
from thalweg.records import Measurements
from thalweg.statistics import Interval, spearman

RESAMPLES = 999
PAIRED = 5  # texts; of fewer, resamples hold too few different pairs to order


def embed(
    model: nn.Module,
    tokenizer: Any,
    texts: Iterable[str | Document],
    *,
    window: int | None = None,
    batch_size: int = 8,
    padding: str = "right",
    on_text: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Texts -> [texts width]: the mean of ``last_hidden_state`` over real tokens, special ones included, in float32 or wider.

    Of a model with a head its body is read. A text longer than the window is refused, not cut.
    Source: mean pooling as in Reimers and Gurevych 2019, arXiv 1908.10084. Raises: InputError.
    """
    check_batch(batch_size, padding)
    check_tokenizer(tokenizer)
    documents, length, vocabulary = as_documents(texts), length_of(model, window), vocabulary_of(model)
    before, after = around(tokenizer)
    rows = []
    for document in documents:
        rows.append([*before, *ids_of(tokenizer, document.text, vocabulary, document.name), *after])
        if len(rows[-1]) > length:
            raise InputError(
                f"{document.name} has {len(rows[-1])} tokens, a window holds {length}; give shorter texts (sentences, paragraphs)"
            )
    body = getattr(model, "base_model", model)
    found: list[Tensor] = []
    with evaluating(model):
        for batch in batches(rows, batch_size):
            ids, mask = rows_of(batch, padding, device_of(model))
            states = getattr(body(input_ids=ids, attention_mask=mask), "last_hidden_state", None)
            if states is None:
                raise InputError(f"{type(model).__name__} gives no last_hidden_state; give an encoder of transformers")
            states, real = wide(states), mask[..., None]
            found.append((states * real).sum(1) / real.sum(1))
            if on_text is not None:
                on_text(sum(map(len, found)), len(rows))
    return torch.cat(found).cpu()


@dataclass(frozen=True)
class Similarity:
    """What an edit did to embeddings. kept: the cosine of each text's two embeddings, as scores by text (null: between different texts of
    the unedited model); pairs: Spearman's rank correlation of the cosines of all pairs of texts before and after, with its interval over
    texts (null 0).
    """

    kept: Scores
    pairs: Interval

    def measurements(self, **fields: Any) -> Measurements:
        """Rows ``embedding_cosine`` and ``pair_similarity_spearman``."""
        rows = self.kept.measurements(**fields)
        row: dict[str, Any] = {"n": self.pairs.n, "split": self.kept.task, "null": 0.0, "null_kind": "unrelated order"}
        if np.isfinite(self.pairs.low):
            row |= {"low": self.pairs.low, "high": self.pairs.high, "interval": self.pairs.words}
        rows.add("pair_similarity_spearman", self.pairs.estimate, **(row | fields))
        return rows


def embedding_similarity(
    original: Tensor, edited: Tensor, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Similarity:
    """Embeddings [n d] of the same texts before and after an edit -> how they moved.

    Pairs of a text with its own copy, which resampling makes, are left out; of fewer than five texts there is no interval of their order
    (NaN bounds). Raises: ShapeError; InputError for fewer than three texts.
    """
    if original.shape != edited.shape or original.ndim != 2:
        raise ShapeError(f"two [texts width] of one shape are needed, got {list(original.shape)}, {list(edited.shape)}")
    n = len(original)
    if n < 3:
        raise InputError(f"the order of similarities needs at least 3 texts, got {n}")
    before, after = (F.normalize(x.double(), dim=-1) for x in (original, edited))
    kept = (before * after).sum(-1).numpy()
    mine, theirs = (before @ before.T).numpy(), (after @ after.T).numpy()
    apart = ~np.eye(n, dtype=bool)
    cosine = share(
        ("cosine", "texts"), "embedding_cosine", null=float(mine[apart].mean()), null_kind="different texts, unedited"
    )
    scores = Scores(
        "embeddings",
        f"mean-pooled embeddings of {n} texts",
        tuple(f"text {i}" for i in range(n)),
        {"cosine": kept, "texts": np.ones(n)},
        (cosine,),
    )
    upper = np.triu_indices(n, 1)
    rho = spearman(mine[upper], theirs[upper])
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(resamples if n >= PAIRED else 0):
        chosen = rng.integers(n, size=n)
        a, b = chosen[upper[0]], chosen[upper[1]]
        different = a != b
        drawn.append(spearman(mine[a, b][different], theirs[a, b][different]))
    drawn = [value for value in drawn if np.isfinite(value)]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2]) if drawn else (np.nan, np.nan)
    return Similarity(scores, Interval(rho, float(low), float(high), level, "percentile", resamples, n))
