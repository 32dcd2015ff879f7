"""Evaluations as jobs: checked and planned once, then run on the model as it stands, edited or not."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thalweg._words import counted
from thalweg.capture.evaluating import evaluating
from thalweg.capture.limits import longest_of, vocabulary_of, window_length
from thalweg.data.text.tokenizer import token_ids
from thalweg.errors import InputError
from thalweg.evaluation import lm_eval, masked, ruler
from thalweg.evaluation.choices import choices, read_choices
from thalweg.evaluation.documents import Document, Documents, digest_of, pieces
from thalweg.evaluation.embeddings import PAIRED, embed, embedding_similarity
from thalweg.evaluation.masked import masked_plan
from thalweg.evaluation.paired import Role
from thalweg.evaluation.perplexity import begin_of, length_of, of_plan, plan_of
from thalweg.evaluation.ruler.run import run as run_ruler
from thalweg.evaluation.scores import Scores
from thalweg.evaluation.scoring import device_of
from thalweg.evaluation.subjects import around, check_causal, check_tokenizer

OnRow = Callable[[dict[str, Any]], None]
OnStep = Callable[[int, int], None]
Known = Mapping[str, Mapping[str, Any]]
NONE: Known = {}
PROBE = 256  # tokens of the pass that is timed
PARAGRAPH = 400  # characters of a text whose embedding is taken, at least


@dataclass(frozen=True)
class Job:
    """One evaluation. plan: what it will do, in words; tokens: read by one run of it, None where that is not known before; width: the most
    tokens of a pass, times rows; run(role, on_row, on_step, known): the scores by task, rows and steps told as they come; known: rows by the
    names of their items, of an earlier run of the same role, which are not scored again. digest: SHA-256 of what is scored.
    """

    name: str
    plan: str
    tokens: int | None
    width: int
    run: Callable[..., Mapping[str, Scores]]
    digest: str = ""


def text_job(
    model: nn.Module,
    tokenizer: Any,
    documents: Documents,
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 1,
    bos: int | bool | None = None,
) -> Job:
    """Perplexity of documents. Raises: InputError."""
    check_tokenizer(tokenizer)
    check_causal(model)
    plan = plan_of(model, tokenizer, documents, window=window, stride=stride, bos=bos)

    def run(role: Role, on_row: OnRow, on_step: OnStep, known: Known = NONE) -> Mapping[str, Scores]:
        told = {"on_window": on_step, "on_document": on_row, "known": known}
        return {"text": of_plan(model, plan, batch_size=batch_size, **told)}

    begins = begin_of(tokenizer, plan.rule.prefix)
    said = (
        f"text: {counted(len(documents), 'document')} of {documents.source} ({documents.rule}), {counted(plan.windows, 'window')}; "
        f"{plan.rule.words}; {begins}"
    )
    return Job("text", said, plan.tokens, batch_size * plan.rule.length, run, documents.sha256)


def masked_job(
    model: nn.Module,
    tokenizer: Any,
    documents: Documents,
    *,
    window: int | None = None,
    seed: int = 0,
    batch_size: int = 1,
) -> Job:
    """Masked loss of documents. Raises: InputError."""
    plan = masked_plan(model, tokenizer, documents, window=window, seed=seed)

    def run(role: Role, on_row: OnRow, on_step: OnStep, known: Known = NONE) -> Mapping[str, Scores]:
        told = {"on_window": on_step, "on_document": on_row, "known": known}
        return {"masked": masked.of_plan(model, plan, batch_size=batch_size, **told)}

    said = f"masked loss: {counted(len(documents), 'document')} of {documents.source}; {plan.rule}"
    return Job("masked", said, plan.tokens, batch_size * plan.length, run, documents.sha256)


def embedding_job(
    model: nn.Module, tokenizer: Any, documents: Documents, *, texts: int = 200, batch_size: int = 8, seed: int = 0
) -> Job:
    """How far edits move mean-pooled embeddings of paragraphs from those of the unedited model, and the order of their similarities.

    Of every document the paragraphs (joined to at least 400 characters, cut at a word where the window ends) are taken in turn. Embeddings
    are not kept, so an evaluation that is gone on with takes them anew. Raises: InputError.
    """
    check_tokenizer(tokenizer)
    length = length_of(model, None)
    chosen = _paragraphs(documents, tokenizer, texts, length - sum(map(len, around(tokenizer))))
    original: list[Tensor] = []

    def run(role: Role, on_row: OnRow, on_step: OnStep, known: Known = NONE) -> Mapping[str, Scores]:
        found = embed(model, tokenizer, chosen, batch_size=batch_size, on_text=on_step)
        if role == "unedited":
            original[:] = [found]
        similarity = embedding_similarity(original[0], found, seed=seed)
        pairs = similarity.pairs
        order: dict[str, Any] = {"value": pairs.estimate, "low": pairs.low, "high": pairs.high, "null": 0.0}
        if pairs.n < PAIRED:
            order["note"] = f"an interval needs {PAIRED} texts, got {pairs.n}"
        facts = {"pair_similarity_spearman": order}
        scores = replace(similarity.kept, items=tuple(text.name for text in chosen), facts=facts)
        for row in scores.rows():
            if row["item"] not in known:
                on_row(row)
        return {"embeddings": scores}

    said = f"embeddings: {len(chosen)} paragraphs of {documents.source}, mean over tokens, against the unedited model"
    tokens = sum(len(token_ids(tokenizer, text.text)) for text in chosen)
    return Job("embeddings", said, tokens, 0, run, documents.sha256)


def _paragraphs(documents: Documents, tokenizer: Any, most: int, room: int) -> list[Document]:
    """room: tokens of a paragraph; what is longer is cut at a word."""
    found: list[Document] = []
    for document in documents:
        for i, text in enumerate(pieces(document.text, PARAGRAPH)):
            while (used := len(token_ids(tokenizer, text))) > room:
                shorter = text[: len(text) * room // used]
                text = shorter[: shorter.rfind(" ")] if " " in shorter else shorter
            found.append(Document(f"{document.name}, paragraph {i}", text))
    found = [paragraph for paragraph in found if paragraph.text.strip()]
    if len(found) < 3:
        raise InputError(f"embeddings are compared over at least 3 paragraphs, {documents.source} has {len(found)}")
    step = max(1, len(found) // most)
    return found[::step][:most]


def choices_job(
    model: nn.Module, tokenizer: Any, path: str | Path, *, shots: int = 0, seed: int = 0, batch_size: int = 1
) -> Job:
    """Multiple choice from a file. Raises: InputError."""
    check_tokenizer(tokenizer)
    check_causal(model)
    items, name = read_choices(path), Path(path).stem
    options: dict[str, Any] = {"name": name, "shots": shots, "seed": seed, "batch_size": batch_size}

    def run(role: Role, on_row: OnRow, on_step: OnStep, known: Known = NONE) -> Mapping[str, Scores]:
        return {name: choices(model, tokenizer, items, on_item=on_step, on_row=on_row, known=known, **options)}

    said = f"{name}: {counted(len(items), 'question')}, {shots}-shot, seed {seed}, by log likelihood"
    return Job(name, said, None, 0, run, digest_of(map(repr, items)))


def ruler_job(
    model: nn.Module,
    tokenizer: Any,
    tasks: str | Sequence[str],
    *,
    length: int,
    count: int,
    seed: int = 0,
    haystack: Any = None,
    text: str | None = None,
    batch_size: int = 1,
) -> Job:
    """Long-context tasks, made now. Raises: InputError."""
    check_tokenizer(tokenizer)
    check_causal(model)
    window_length(longest_of(model), length, length)
    names = ruler.names_of(tasks)
    options: dict[str, Any] = {"seed": seed, "text": text}
    made = {
        name: ruler.samples(
            name, tokenizer, length, count, **options, haystack=haystack if "text" in _takes(name) else None
        )
        for name in names
    }
    tokens = sum(sample.tokens + sample.generate for samples in made.values() for sample in samples)
    run = partial(_run_ruler, model, tokenizer, made, length, batch_size)
    said = f"long context: {', '.join(names)}, {counted(count, 'sample')} each in {length:,} tokens, seed {seed}"
    prompts = (sample.prompt for samples in made.values() for sample in samples)
    return Job("ruler", said, tokens, batch_size * length, run, digest_of(prompts))


def _takes(name: str) -> tuple[str, ...]:
    return () if name in ("cwe", "fwe") else ("noise", "text")


def _run_ruler(
    model, tokenizer, made, length, batch_size, role, on_row, on_step, known: Known = NONE
) -> Mapping[str, Scores]:
    told = {"on_row": on_row, "on_sample": on_step, "known": known}
    return run_ruler(model, tokenizer, made, length=length, batch_size=batch_size, **told)


def lm_eval_job(
    model: nn.Module,
    tokenizer: Any,
    tasks: Mapping[str, int | None] | Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    window: int | None = None,
) -> Job:
    """Tasks of lm-eval. Raises: MissingExtraError before anything else."""
    lm_eval.check_installed()
    options: dict[str, Any] = {
        "include_path": include_path,
        "limit": limit,
        "batch_size": batch_size,
        "max_length": window,
    }

    def run(role: Role, on_row: OnRow, on_step: OnStep, known: Known = NONE) -> Mapping[str, Scores]:
        found: dict[str, Scores] = {}
        wanted = dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(tasks)
        for i, (name, shots) in enumerate(wanted.items()):
            scored = lm_eval.from_rows(name, known)
            if scored is None:
                scored = lm_eval.evaluate(model, tokenizer, {name: shots}, **options)
                for row in lm_eval.kept_rows(name, scored):
                    on_row(row)
            found |= scored
            on_step(i + 1, len(wanted))
        return found

    named = (
        [f"{name} ({shots}-shot)" if shots is not None else name for name, shots in dict(tasks).items()]
        if isinstance(tasks, Mapping)
        else list(tasks)
    )
    decided = {name: str(value) for name, value in options.items() if name != "batch_size" and value is not None}
    return Job(
        "lm-eval", f"lm-eval: {', '.join(named)}", None, 0, run, digest_of([*named, *map(repr, decided.items())])
    )


@dataclass(frozen=True)
class Cost:
    """What a run of jobs will take. seconds: of all passes, NaN where a job's tokens are not known; bytes: of weights and logits."""

    seconds: float
    bytes: int


def cost_of(model: nn.Module, jobs: Sequence[Job], passes: int) -> Cost:
    """Memory from sizes, time from one timed pass of up to 256 tokens after one to warm up."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    widest = max((job.width for job in jobs), default=0)
    logits = 4 * widest * (vocabulary_of(model) or 0)
    known = [job.tokens for job in jobs if job.tokens is not None]
    if len(known) < len(jobs):
        return Cost(float("nan"), weights + logits)
    width = max(1, min(PROBE, longest_of(model) or PROBE))
    ids = (torch.arange(width, device=device_of(model)) % max(1, vocabulary_of(model) or 1))[None]
    with evaluating(model):
        model(input_ids=ids)
        start = time.perf_counter()
        model(input_ids=ids)
        spent = time.perf_counter() - start
    return Cost(spent / width * sum(known) * passes, weights + logits)
