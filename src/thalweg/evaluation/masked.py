"""Encoders with a masked-language-modelling head: the loss at masked tokens, and pseudo-perplexity."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from thalweg.capture.evaluating import evaluating
from thalweg.capture.limits import vocabulary_of
from thalweg.errors import InputError
from thalweg.evaluation.documents import Document, Documents, as_documents
from thalweg.evaluation.perplexity import length_of
from thalweg.evaluation.scores import Metric, Scores
from thalweg.evaluation.scoring import batches, check_batch, device_of, likelihood, logits_of, rows_of
from thalweg.evaluation.subjects import around, check_tokenizer, ids_of, is_causal, special

NEEDS = ("log_likelihood", "masked_tokens")
SHARE = 0.15  # of the tokens that is masked (Devlin et al. 2019, arXiv 1810.04805)
Choose = Callable[[int], list[np.ndarray]]  # a length -> the places to mask, one array for each row


class Masked(NamedTuple):
    """A row with its special tokens, masks in place; the places and what stood there; the document it is from."""

    inputs: list[int]
    places: list[int]
    targets: list[int]
    document: int


@dataclass(frozen=True)
class MaskedPlan:
    """Rows with their masks in place. name: ``masked`` or ``pseudo``; rule: in words."""

    documents: Documents
    rows: list[Masked]
    name: str
    rule: str
    length: int
    vocabulary: int | None

    @property
    def tokens(self) -> int:
        return sum(len(row.inputs) for row in self.rows)


def masked_loss(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str | Document],
    *,
    window: int | None = None,
    share: float = SHARE,
    seed: int = 0,
    cover: bool = False,
    **how: Any,
) -> Scores:
    """Nats per masked token of an encoder, the masks drawn from ``seed`` alone, so that edits are compared on the same ones.

    Documents are cut into disjoint windows (special tokens of the tokenizer counted in), of each of which max(1, round(share x length))
    tokens are masked, every one by the mask token: the 80/10/10 rule of BERT's training is a rule of training. cover: every token once, in
    round(1 / share) passes over disjoint masks, which leaves the draw of the masks hardly a say. Metrics ``masked_loss`` and
    ``masked_perplexity`` (its exp), which is no perplexity of the text. how: batch_size, padding, on_window(done, of).
    Raises: InputError for a causal model, no mask token, or numbers out of range.
    """
    plan = masked_plan(model, tokenizer, documents, window=window, share=share, seed=seed, cover=cover)
    return of_plan(model, plan, **how)


def masked_plan(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str | Document],
    *,
    window: int | None = None,
    share: float = SHARE,
    seed: int = 0,
    cover: bool = False,
) -> MaskedPlan:
    """The masks of :func:`masked_loss`, before anything is computed. Raises: InputError."""
    choose = covering(share, seed) if cover else drawing(share, seed)
    rule = f"{share:.0%} masked{' at a time, each token once' if cover else ''}, seed {seed}"
    return _plan(model, tokenizer, documents, window, choose, "masked", rule)


def drawing(share: float = SHARE, seed: int = 0) -> Choose:
    """One row, max(1, round(share x length)) of its places. Raises: InputError."""
    rng = _generator(share, seed)
    return lambda length: [np.sort(rng.choice(length, max(1, round(share * length)), replace=False))]


def covering(share: float = SHARE, seed: int = 0) -> Choose:
    """round(1 / share) rows, or as many as there are places, that mask each place once and differ by one place at most. Raises: InputError."""
    rng = _generator(share, seed)
    return lambda length: [
        np.sort(part) for part in np.array_split(rng.permutation(length), min(length, max(1, round(1 / share))))
    ]


def _generator(share: float, seed: int) -> np.random.Generator:
    if not 0 < share <= 1:
        raise InputError(f"share must be above 0 and at most 1, got {share}")
    return np.random.default_rng(seed)


def pseudo_perplexity(
    model: nn.Module, tokenizer: Any, documents: Iterable[str | Document], *, window: int | None = None, **how: Any
) -> Scores:
    """Every token masked once, alone: as many passes as tokens. Metrics ``pseudo_loss`` and ``pseudo_perplexity``, by token.

    how: as of :func:`masked_loss`. Source: Salazar, Liang, Nguyen, Kirchhoff 2020, arXiv 1910.14659. Raises: InputError.
    """

    def choose(length: int) -> list[np.ndarray]:
        return [np.array([place]) for place in range(length)]

    return of_plan(
        model, _plan(model, tokenizer, documents, window, choose, "pseudo", "each token masked alone"), **how
    )


def _plan(model, tokenizer, documents, window, choose, name: str, rule: str) -> MaskedPlan:
    check_tokenizer(tokenizer)
    if is_causal(model):
        raise InputError(
            f"{type(model).__name__} is causal: masked tokens are a task for encoders; give its perplexity"
        )
    documents, vocabulary, length = as_documents(documents), vocabulary_of(model), length_of(model, window)
    rows: list[Masked] = []
    for i, document in enumerate(documents):
        ids = ids_of(tokenizer, document.text, vocabulary, document.name)
        rows += masked_rows(ids, tokenizer, length, choose, i)
    return MaskedPlan(documents, rows, name, f"disjoint windows of {length} tokens, {rule}", length, vocabulary)


def of_plan(
    model: nn.Module,
    plan: MaskedPlan,
    *,
    batch_size: int = 1,
    padding: str = "right",
    on_window: Callable[[int, int], None] | None = None,
    on_document: Callable[[dict[str, Any]], None] | None = None,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> Scores:
    """The loss at the masks of a plan that is made; for several edits of one model on the same masks.

    known: rows of ``on_document`` by the names of documents, of an earlier call; those are not scored again.
    """
    check_batch(batch_size, padding)
    known, names = known or {}, tuple(document.name for document in plan.documents)
    sums = np.array([[float(known[name][need]) if name in known else 0.0 for name in names] for need in NEEDS])
    rows = [row for row in plan.rows if names[row.document] not in known]
    left = Counter(row.document for row in rows)
    done = 0
    with evaluating(model):
        for batch in batches(rows, batch_size):
            ids, mask = rows_of([row.inputs for row in batch], padding, device_of(model))
            for row, logits, real in zip(batch, logits_of(model, ids, mask), mask.bool(), strict=True):
                targets = torch.tensor(row.targets, device=logits.device)
                places = torch.tensor(row.places, device=logits.device)
                found = likelihood(logits[real][places], targets)
                sums[:, row.document] += found.log_likelihood, len(row.targets)
                left[row.document] -= 1
                if not left[row.document] and on_document is not None:
                    on_document(
                        {"item": names[row.document], **dict(zip(NEEDS, sums[:, row.document].tolist(), strict=True))}
                    )
            done += len(batch)
            if on_window is not None:
                on_window(done, len(rows))
    null: dict[str, Any] = {}
    if plan.vocabulary is not None:
        null = {"null": math.log(plan.vocabulary), "null_kind": f"uniform over {plan.vocabulary} tokens"}
    metrics = (
        Metric(f"{plan.name}_loss", "nats/masked token", NEEDS, lambda ll, n: -ll / n, "lower", **null),
        Metric(f"{plan.name}_perplexity", "", NEEDS, lambda ll, n: np.exp(-ll / n), "lower"),
    )
    read = plan.documents
    facts = {"source": read.source, "documents": read.rule, "sha256": read.sha256, "window": plan.length}
    return Scores(plan.name, plan.rule, names, dict(zip(NEEDS, sums, strict=True)), metrics, facts)


def masked_rows(ids: list[int], tokenizer: Any, length: int, choose: Choose, document: int = 0) -> Iterator[Masked]:
    """The windows of ``length`` tokens (special ones counted in) of a document, with what is masked in each.

    Raises: InputError for a tokenizer without a mask token, or no room beside the special tokens.
    """
    mask = special(tokenizer, "mask")
    if mask is None:
        raise InputError("the tokenizer has no mask token; give the tokenizer that the encoder was trained with")
    before, after = around(tokenizer)
    room = length - len(before) - len(after)
    if room < 1:
        raise InputError(f"the window of {length} tokens has no room beside the special tokens; give a longer one")
    for start in range(0, len(ids), room):
        piece = ids[start : start + room]
        for chosen in choose(len(piece)):
            inputs = [*before, *piece, *after]
            places = [len(before) + int(place) for place in chosen]
            for place in places:
                inputs[place] = mask
            yield Masked(inputs, places, [piece[int(place)] for place in chosen], document)
