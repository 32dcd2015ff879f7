"""Models and texts of experiments: at hand, or trained here for a seed; opened once for all experiments of a run."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from thalweg.errors import InputError
from thalweg.records import Measurements, jsonl
from thalweg.studies.experiments.base import HAS_LEARNED, DivergedError, ended
from thalweg.studies.observe import why_unlearned

OWN = "own"
CHARACTERS = 1500  # of a piece of text
APART, NEXT = 3, 7  # pieces between two documents of a seed, and between the first ones of two seeds
FEW = 7  # documents of a seed up to which those of two seeds are others: 7 s + 3 i meets 7 (s + 3) + 3 (i - 7)
A_TOKEN = 5  # characters, at most on average: about four of a large vocabulary, two of a small one
WINDOW = 62  # tokens of an encoder's window, its two special ones left out


@dataclass(frozen=True)
class SubjectOptions:
    """model: ``own`` (trained here on every seed, by the fields of ``train``), a model at hand, a folder or a name on a hub. tokens: read, in
    windows of ``length``."""

    model: str = OWN
    train: dict[str, Any] = field(default_factory=dict)
    tokens: int = 512
    length: int = 64


@dataclass(frozen=True)
class Subject:
    """A model to be probed. unlearned: why a model that was trained here has not learned, empty if it has."""

    model: nn.Module
    tokenizer: Any
    name: str
    unlearned: str = ""


def subject_of(options: SubjectOptions, seed: int) -> Subject:
    """The model of an experiment. Raises: InputError where it is not there; DivergedError where its training diverged."""
    if options.model != OWN:
        if options.train:
            raise InputError(f"train belongs to model = {OWN!r}, got model {options.model!r}; leave it out")
        return _opened(options.model)
    return _trained(jsonl.encode(dict(options.train)), seed)


def texts_of(seed: int, count: int) -> list[str]:
    """Pieces of a held-out novel, other ones for every seed. Raises: InputError where it has none left for this seed."""
    found = _pieces()
    # Up to seven as records were made on them; more stand in blocks, since the rule of the few would give a piece to several seeds.
    chosen = _neighbouring(seed, count) if count <= FEW else range(seed * count, (seed + 1) * count)
    if chosen[-1] >= len(found):
        fitting = (len(found) - 1 - APART * (count - 1)) // NEXT if count <= FEW else len(found) // count - 1
        most = f"seeds up to {fitting}" if fitting >= 0 else "no seed"
        raise InputError(
            f"the text has {len(found)} pieces, of which {most} can have {count} each that no other has, got seed {seed}; "
            "read fewer tokens or take smaller seeds"
        )
    return [found[i] for i in chosen]


def neighbouring_texts(seed: int, tokens: int) -> list[str]:
    """Pieces of the same novel that hold so many tokens, more than seven of them also those of seeds three apart; for an experiment whose
    records were made on them. Raises: InputError where the novel is too short.
    """
    found, count = _pieces(), _generous(tokens)
    if count * APART > len(found):
        raise InputError(f"the text has {len(found)} pieces, {count} documents need {count * APART}; read fewer tokens")
    return [found[i % len(found)] for i in _neighbouring(seed, count)]


def _neighbouring(seed: int, count: int) -> range:
    return range(seed * NEXT, seed * NEXT + APART * count, APART)


def _pieces() -> list[str]:
    from thalweg.data.tasks.austen import HELD_OUT, novels
    from thalweg.evaluation.documents import pieces

    return pieces(novels()[HELD_OUT], CHARACTERS)


def documents_for(tokens: int) -> int:
    """Documents that hold so many tokens of any vocabulary."""
    generous = _generous(tokens)
    return generous if generous <= FEW else -(-A_TOKEN * tokens // CHARACTERS)


def _generous(tokens: int) -> int:
    """Twice the need: the documents that records were made on."""
    return max(2, -(-4 * tokens // (CHARACTERS // 2)))


def _check_held(tokens: int, held: int, texts: list[str], seed: int, model: str) -> None:
    if held < tokens:
        raise InputError(
            f"the {len(texts)} documents of seed {seed} have {held} tokens for {model}, the plan reads {tokens}; read fewer tokens"
        )


def probed(
    options: SubjectOptions, seed: int, probe: str, probe_options: Mapping[str, Any]
) -> tuple[Measurements, Subject]:
    """The rows of one probe on the model of an experiment.

    Raises: InputError where it does not apply or failed, or the text is too short; DivergedError where the training of the model diverged.
    """
    from thalweg import continuum
    from thalweg.evaluation.subjects import ids_of

    texts = texts_of(seed, documents_for(options.tokens))
    subject = subject_of(options, seed)
    if subject.tokenizer is not None:
        held = sum(len(ids_of(subject.tokenizer, text, None)) for text in texts)
        _check_held(options.tokens, held, texts, seed, subject.name)
    found = continuum.findings(
        subject.model,
        texts,
        only=[probe],
        options={probe: dict(probe_options)},
        tokenizer=subject.tokenizer,
        length=options.length,
        tokens=options.tokens,
        name=subject.name,
    )[-1]
    if found.not_applicable or found.failed:
        raise InputError(f"the probe {probe} says nothing of {subject.name}: {found.not_applicable or found.failed}")
    return found.rows, subject


def note_learning(rows: Measurements, subject: Subject, arms: tuple[str, ...]) -> None:
    """A row ``has_learned`` for every arm, for a model that was trained here."""
    for arm in arms:
        rows.add(HAS_LEARNED, float(not subject.unlearned), arm=arm, model=subject.name, null_kind=subject.unlearned)


@dataclass(frozen=True)
class LayerStates:
    """inputs [n d]: what the attention of a layer reads, in float64; query, key [heads d w]: its factors, biases left out."""

    inputs: Float[Tensor, "n d"]
    query: Float[Tensor, "h d w"]
    key: Float[Tensor, "h d w"]


def layer_states(model: str, seed: int, layer: int, tokens: int) -> LayerStates:
    """Of an encoder of BERT's kind, special tokens left out. A few documents give their first window each; of more, all windows are read.

    Raises: InputError for another kind, or where the text has too few tokens.
    """
    few = tokens <= FEW * WINDOW
    texts = texts_of(seed, FEW if few else documents_for(tokens))
    opened = _opened(model)
    try:
        attention = opened.model.encoder.layer[layer].attention.self  # type: ignore[union-attr, index]
    except (AttributeError, IndexError):
        raise InputError(f"{model} has no layer {layer} of BERT's kind; give an encoder such as minilm") from None
    rows, seen = [], 0
    for encoded in _windows(opened.tokenizer, texts, first=few):
        with torch.no_grad():
            states = opened.model(**encoded, output_hidden_states=True).hidden_states[layer]
        rows.append(states[0, 1:-1].double())
        seen += len(rows[-1])
        if seen >= tokens:
            break
    _check_held(tokens, seen, texts, seed, model)
    heads = attention.num_attention_heads
    factors = [w.weight.detach().double().unflatten(0, (heads, -1)).mT for w in (attention.query, attention.key)]
    return LayerStates(torch.cat(rows)[:tokens], *factors)


def _windows(tokenizer: Any, texts: list[str], *, first: bool) -> Iterator[Mapping[str, Tensor]]:
    """Windows of texts, each between its special tokens; first: of every text the first alone."""
    if first:
        for text in texts:
            yield tokenizer(text, return_tensors="pt", truncation=True, max_length=WINDOW + 2)
        return
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        for part in ids[:, 1:-1].split(WINDOW, dim=1):
            window = torch.cat([ids[:, :1], part, ids[:, -1:]], dim=1)
            yield {"input_ids": window, "attention_mask": torch.ones_like(window)}


@lru_cache(maxsize=2)
def _opened(model: str) -> Subject:
    from thalweg.capture.opening import open_model

    opened = open_model(model)
    return Subject(opened.model.eval(), opened.require_tokenizer(), model)


@lru_cache(maxsize=2)
def _trained(train: str, seed: int) -> Subject:
    from thalweg import data
    from thalweg.records.run import RunFolder
    from thalweg.training import train as train_run
    from thalweg.training.config import from_table
    from thalweg.training.engine import load_decoder

    made = from_table({**json.loads(train), "seed": seed})
    with tempfile.TemporaryDirectory() as folder:
        train_run(made, Path(folder) / "run")
        run = RunFolder.open(Path(folder) / "run")
        if not ended(run.status, "the model that this experiment trains", seed):
            raise DivergedError(f"the model that this experiment trains diverged at seed {seed}")
        model, _ = load_decoder(run.path, "last")
        last = {name: values[-1][1] for name, values in run.series().items()}
        why = why_unlearned(last.get("val/loss"), last.get("val/bits_per_byte"), run.result.get("nulls", {}))
    task = data.load(made.data, tokenizer=made.tokenizer, vocab_size=made.vocab_size)
    return Subject(model.eval(), getattr(task, "tokenizer", None), f"{OWN} seed {seed}", why)
