"""Models and texts of experiments: at hand, or trained here for a seed; opened once for all experiments of a run."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from thalweg.errors import InputError
from thalweg.records import Measurements, jsonl
from thalweg.studies.experiments.base import HAS_LEARNED
from thalweg.studies.observe import why_unlearned

OWN = "own"
CHARACTERS = 1500  # of a piece of text
APART = 3  # pieces between two documents of a seed; seeds take neighbouring ones


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
    """The model of an experiment. Raises: InputError where it is not there, or its training diverged."""
    if options.model != OWN:
        if options.train:
            raise InputError(f"train belongs to model = {OWN!r}, got model {options.model!r}; leave it out")
        return _opened(options.model)
    return _trained(jsonl.encode(dict(options.train)), seed)


def texts_of(seed: int, count: int) -> list[str]:
    """Pieces of a held-out novel, other ones for every seed up to the end of the novel. Raises: InputError where it is too short."""
    from thalweg.data.tasks.austen import HELD_OUT, novels
    from thalweg.evaluation.documents import pieces

    found = pieces(novels()[HELD_OUT], CHARACTERS)
    if count * APART > len(found):
        raise InputError(f"the text has {len(found)} pieces, {count} documents need {count * APART}; read fewer tokens")
    return [found[(seed * 7 + APART * i) % len(found)] for i in range(count)]


def probed(
    options: SubjectOptions, seed: int, probe: str, probe_options: Mapping[str, Any]
) -> tuple[Measurements, Subject]:
    """The rows of one probe on the model of an experiment. Raises: InputError where it does not apply or failed."""
    from thalweg import continuum

    subject = subject_of(options, seed)
    # A token is about four characters of the text, two where the vocabulary is small: enough for the tokens in any case.
    count = max(2, -(-4 * options.tokens // (CHARACTERS // 2)))
    found = continuum.findings(
        subject.model,
        texts_of(seed, count),
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
    """Of an encoder of BERT's kind, special tokens left out. Raises: InputError for another kind."""
    opened = _opened(model)
    try:
        attention = opened.model.encoder.layer[layer].attention.self  # type: ignore[union-attr, index]
    except (AttributeError, IndexError):
        raise InputError(f"{model} has no layer {layer} of BERT's kind; give an encoder such as minilm") from None
    rows, seen = [], 0
    for text in texts_of(seed, 12):
        encoded = opened.tokenizer(text, return_tensors="pt", truncation=True, max_length=64)
        with torch.no_grad():
            states = opened.model(**encoded, output_hidden_states=True).hidden_states[layer]
        rows.append(states[0, 1:-1].double())
        seen += len(rows[-1])
        if seen >= tokens:
            break
    heads = attention.num_attention_heads
    factors = [w.weight.detach().double().unflatten(0, (heads, -1)).mT for w in (attention.query, attention.key)]
    return LayerStates(torch.cat(rows)[:tokens], *factors)


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
        if run.status != "done":
            raise InputError(
                f"the model that this experiment trains ended as {run.status} at seed {seed}; use a lower lr"
            )
        model, _ = load_decoder(run.path, "last")
        last = {name: values[-1][1] for name, values in run.series().items()}
        why = why_unlearned(last.get("val/loss"), last.get("val/bits_per_byte"), run.result.get("nulls", {}))
    task = data.load(made.data, tokenizer=made.tokenizer, vocab_size=made.vocab_size)
    return Subject(model.eval(), getattr(task, "tokenizer", None), f"{OWN} seed {seed}", why)
