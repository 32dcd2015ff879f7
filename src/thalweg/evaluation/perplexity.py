"""Perplexity of a text under a causal model: by token, by word and by byte, each under its own name, with its windows said."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from thalweg.capture.limits import longest_of, vocabulary_of, window_length
from thalweg.errors import InputError
from thalweg.evaluation.documents import Document, Documents, as_documents
from thalweg.evaluation.scores import Metric, Scores
from thalweg.evaluation.scoring import check_batch, score
from thalweg.evaluation.subjects import check_causal, check_tokenizer, ids_of, special
from thalweg.evaluation.windows import WIDEST, Windows

COLUMNS = ("log_likelihood", "tokens", "words", "bytes")


@dataclass(frozen=True)
class Plan:
    """What will be done. ids: the tokens of each document; windows, tokens: how many are read by one pass over everything."""

    documents: Documents
    ids: list[list[int]]
    rule: Windows
    vocabulary: int | None

    @property
    def windows(self) -> int:
        return sum(1 for ids in self.ids for _ in self.rule.cut(ids))

    @property
    def tokens(self) -> int:
        return sum(len(window.inputs) for ids in self.ids for window in self.rule.cut(ids))


class Perplexity(Scores):
    """Sums by document, and the perplexities of all of them together: exp of minus the summed log likelihood by token, word or byte."""

    @property
    def token_perplexity(self) -> float:
        """Depends on the tokenizer: compare it between models of one tokenizer only."""
        return self.value("token_perplexity")

    @property
    def word_perplexity(self) -> float:
        return self.value("word_perplexity")

    @property
    def byte_perplexity(self) -> float:
        return self.value("byte_perplexity")

    @property
    def bits_per_byte(self) -> float:
        return self.value("bits_per_byte")

    @property
    def loss(self) -> float:
        """Nats per scored token."""
        return self.value("loss")


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str | Document],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 1,
    bos: int | bool | None = None,
    padding: str = "right",
    on_window: Callable[[int, int], None] | None = None,
    on_document: Callable[[dict[str, Any]], None] | None = None,
) -> Perplexity:
    """The perplexity of ``documents`` under a causal model of transformers or of ours.

    window: tokens (None: what the model takes, at most 2,048). stride: None for the disjoint windows of lm-eval's
    ``loglikelihood_rolling``, a number for windows that overlap. bos: the token before a document; None: BOS of the tokenizer, else EOS, as
    in lm-eval; an id; False: none, and the first token of a document is not scored (the loss of transformers). Tokens that a tokenizer
    would put round a text by itself are left out (lm-eval keeps them). Words are the pieces between runs of white space in the raw text,
    bytes its UTF-8, as lm-eval counts both; also where a first token is not scored. padding: the side of shorter rows in a batch.
    on_window(done, of); on_document(its row), as each is done. A document shorter than the window is one window of its own length.
    Raises: InputError for a model without logits, an encoder, a missing tokenizer, a document without tokens to score, or numbers out of
    range.
    """
    check_batch(batch_size, padding)
    check_tokenizer(tokenizer)
    check_causal(model)
    plan = plan_of(model, tokenizer, documents, window=window, stride=stride, bos=bos)
    return of_plan(model, plan, batch_size=batch_size, padding=padding, on_window=on_window, on_document=on_document)


def plan_of(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str | Document],
    *,
    window: int | None = None,
    stride: int | None = None,
    bos: int | bool | None = None,
) -> Plan:
    """The windows of :func:`perplexity`, before anything is computed. Raises: InputError."""
    documents, vocabulary = as_documents(documents), vocabulary_of(model)
    rule = Windows(length_of(model, window), stride, prefix_of(tokenizer, bos))
    ids = []
    for document in documents:
        ids.append(ids_of(tokenizer, document.text, vocabulary, document.name))
        if rule.prefix is None and len(ids[-1]) < 2:
            raise InputError(
                f"{document.name} has one token, and the first is not scored without bos; give more text or bos"
            )
    return Plan(documents, ids, rule, vocabulary)


def length_of(model: nn.Module, window: int | None) -> int:
    """Tokens of a window. Raises: InputError for more than the model takes."""
    return window_length(longest_of(model), window, WIDEST)


def prefix_of(tokenizer: Any, bos: int | bool | None) -> int | None:
    """The token before a text. Raises: InputError where none was named and the tokenizer has none."""
    if bos is False:
        return None
    if bos is None or bos is True:
        found = special(tokenizer, "bos", "eos") if bos is None else special(tokenizer, "bos")
        if found is None:
            raise InputError("the tokenizer names no token to begin a text with; give bos=ID, or bos=False (--no-bos)")
        return found
    return int(bos)


def begin_of(tokenizer: Any, prefix: int | None) -> str:
    """What stands before a document, for people: BOS, the EOS in its place, another token, or none."""
    if prefix is None:
        return "no BOS put before a document"
    name = next((kind.upper() for kind in ("bos", "eos") if special(tokenizer, kind) == prefix), "BOS")
    return f"{name}: token {prefix} before every document"


def of_plan(
    model: nn.Module,
    plan: Plan,
    *,
    batch_size: int = 1,
    padding: str = "right",
    on_window: Callable[[int, int], None] | None = None,
    on_document: Callable[[dict[str, Any]], None] | None = None,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> Perplexity:
    """:func:`perplexity` of a plan that is made; for several edits of one model on the same windows.

    known: rows of ``on_document`` by the names of documents, of an earlier call; those are not scored again.
    """
    known = known or {}
    cut = [list(plan.rule.cut(ids)) for ids in plan.ids]
    left = [windows for document, windows in zip(plan.documents, cut, strict=True) if document.name not in known]
    sums = {name: np.zeros(len(cut)) for name in COLUMNS}
    every = [window for windows in left for window in windows]
    scored, done = score(model, every, batch_size=batch_size, padding=padding), 0
    for i, (document, windows) in enumerate(zip(plan.documents, cut, strict=True)):
        if document.name in known:
            for name, column in sums.items():
                column[i] = known[document.name][name]
            continue
        for window in windows:
            sums["log_likelihood"][i] += next(scored).log_likelihood
            sums["tokens"][i] += len(window.targets)
            done += 1
            if on_window is not None:
                on_window(done, len(every))
        sums["words"][i], sums["bytes"][i] = words(document.text), len(document.text.encode())
        if on_document is not None:
            on_document({"item": document.name, **{name: float(column[i]) for name, column in sums.items()}})
    facts = {
        "source": plan.documents.source,
        "documents": plan.documents.rule,
        "sha256": plan.documents.sha256,
        "window": plan.rule.length,
        "stride": plan.rule.stride,
        "prefix": plan.rule.prefix,
    }
    names = tuple(document.name for document in plan.documents)
    return Perplexity("text", plan.rule.words, names, sums, metrics(plan.vocabulary), facts)


def words(text: str) -> int:
    """The pieces between runs of white space: lm-eval's count, which for a text that begins or ends in white space is one or two more than
    its words.
    """
    return len(re.split(r"\s+", text))


def metrics(vocabulary: int | None) -> tuple[Metric, ...]:
    """The loss and the four names; the null of what is counted by token is the uniform guess over the vocabulary."""
    null: dict[str, Any] = {} if vocabulary is None else {"null_kind": f"uniform over {vocabulary} tokens"}
    at = {} if vocabulary is None else {"loss": math.log(vocabulary), "token_perplexity": float(vocabulary)}

    def perplexity_by(unit: str) -> Metric:
        name = f"{unit}_perplexity"
        known = {**null, "null": at[name]} if name in at else {}
        return Metric(name, "", ("log_likelihood", f"{unit}s"), lambda ll, n: np.exp(-ll / n), "lower", **known)

    loss = {**null, "null": at["loss"]} if "loss" in at else {}
    return (
        Metric("loss", "nats/token", ("log_likelihood", "tokens"), lambda ll, n: -ll / n, "lower", **loss),
        *map(perplexity_by, ("token", "word", "byte")),
        Metric("bits_per_byte", "bits/byte", ("log_likelihood", "bytes"), lambda ll, n: -ll / n / math.log(2), "lower"),
    )
