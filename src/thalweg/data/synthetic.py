"""The frame of the synthetic tasks: their own random numbers, held-out seeds, options and chance levels."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from thalweg import config
from thalweg.data.fingerprint import digest_of
from thalweg.data.task import IGNORED, Batch, Task, as_batch
from thalweg.data.tasks import Request
from thalweg.errors import InputError

ASK = 1  # stands before a key that is asked for
PAD = 0  # fills a sequence up to the length asked for; never scored
SCHEMA = 1  # raise when the same seed would give other sequences
CHUNK = 64  # examples per generator: the order of examples does not depend on the batch size
EVAL_EXAMPLES = 1024
_STREAMS = ("train", "valid", "longer")  # place in this list = part of the generator's seed; append only


def at_least(options: Any, **least: int) -> None:
    """Raises: InputError for a field of ``options`` below its least value."""
    for name, bound in least.items():
        if getattr(options, name) < bound:
            raise InputError(f"{name} must be at least {bound}, got {getattr(options, name)}")


class SyntheticTask(Task):
    """Sequences from a rule, with the answers alone scored.

    Every example comes from ``SeedSequence([stream, purpose, seed, chunk])``: train and held-out splits have other streams, and sampling
    and evaluation other purposes, so an evaluation example meets a train example by chance only.
    """

    kind = "synthetic"
    Options: ClassVar[type]

    def __init__(self, name: str, options: Any):
        self.name = name
        self.options = options
        self.fingerprint = digest_of(
            {"task": type(self).__name__, "options": config.to_plain(options), "schema": SCHEMA}
        )

    @classmethod
    def open(cls, rest: str, request: Request) -> "SyntheticTask":
        """From ``vocab=16,half=12``. Raises: UnknownNameError, InputError."""
        request.refuse_text_options()
        kind = request.spec.partition(":")[0].strip()
        values = config.parse_assignments(
            [part for part in rest.split(",") if part.strip()], where=f"a parameter of {kind}"
        )
        return cls(request.spec, config.build(cls.Options, values, where=kind))

    @abstractmethod
    def examples(self, rng: np.random.Generator, count: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        """``count`` examples: ids and labels, [count t], -100 where not scored."""

    @property
    @abstractmethod
    def values(self) -> range:
        """Token numbers of the symbols that answers are made of."""

    @abstractmethod
    def natural_length(self, split: str = "train") -> int:
        """Tokens of the longest sequence."""

    @abstractmethod
    def chance(self) -> dict[str, float]:
        """``chance`` (nats per scored token), ``chance_accuracy`` and ``chance_exact_match`` of the best guess that reads nothing."""

    def nulls(self) -> dict[str, float]:
        """Chance levels; ``uniform``, ln V in nats; and ``context_accuracy``: the token accuracy of naming, unbound, some value that stands
        before the first answer (mean over 1,024 held-out examples), which a model reaches by looking at what occurs without remembering
        what belongs to what.
        """
        ids, labels = self._chunks("valid", (1, 0), np.arange(EVAL_EXAMPLES))
        scored = labels != IGNORED
        before = np.cumsum(scored, axis=1) == 0
        candidates = before & (ids >= self.values.start) & (ids < self.values.stop)
        rows, places = np.nonzero(scored)
        hits = (ids[rows] == labels[rows, places][:, None]) & candidates[rows]
        share = hits.sum(1) / np.maximum(candidates[rows].sum(1), 1)
        return {"uniform": float(np.log(self.vocab_size)), **self.chance(), "context_accuracy": float(share.mean())}

    def notes_at(self, length: int) -> tuple[str, ...]:
        """Also how much of the sequences is padding, where they are longer than the task needs."""
        natural = self.natural_length()
        if length <= natural:
            return self.notes
        padding = f"{1 - natural / length:.0%} of what is computed is padding, and a length of {natural} is enough"
        return (*self.notes, f"sequences of {natural} tokens are filled up to {length}: {padding}")

    def unpadded(self, split: str, length: int, count: int) -> Batch:
        """``count`` examples, cut to the shortest of them, whatever ``length`` is filled up."""
        batch = self.eval_batches(split, self.natural_length(split), count, 1)[0]
        shortest = int((batch["input_ids"] != PAD).sum(dim=1).min())
        return {name: values[:, :shortest] for name, values in batch.items()}

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "options": dataclasses.asdict(self.options)}

    def _order(self, split: str, length: int, seed: int) -> Callable[[range], Batch]:
        def draw(samples: range) -> Batch:
            return _padded(self._chunks(split, (0, seed), np.arange(samples.start, samples.stop)), length)

        return draw

    def _held_out(self, split: str, length: int) -> tuple[int, Callable[[np.ndarray], Batch]]:
        return EVAL_EXAMPLES, lambda chosen: _padded(self._chunks(split, (1, 0), chosen), length)

    def _chunks(self, split: str, purpose: tuple[int, int], numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The examples with these ascending numbers."""
        parts = []
        for chunk in np.unique(numbers // CHUNK):
            rng = np.random.default_rng([_STREAMS.index(split), *purpose, int(chunk)])
            inside = numbers[numbers // CHUNK == chunk] % CHUNK
            parts.append(tuple(part[inside] for part in self.examples(rng, CHUNK, split)))
        ids, labels = zip(*parts, strict=True)
        return np.concatenate(ids), np.concatenate(labels)


class KeyValueTask(SyntheticTask):
    """Keys are written with values, then asked for: the vocabulary and the drawing that such tasks share.

    Keys and values are the ``keys`` and ``values`` of the options; keys are numbered from ``first_key`` on, values follow them.
    """

    first_key: ClassVar[int]

    def __init__(self, name: str, options: Any):
        super().__init__(name, options)
        self.first_value = self.first_key + options.keys
        self.vocab_size = self.first_value + options.values

    @property
    def values(self) -> range:
        return range(self.first_value, self.vocab_size)

    def draw_keys_asked(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Distinct keys for the queries, [count queries]."""
        return choose_places(rng, np.ones((count, self.options.keys), bool), self.options.queries)

    def draw_values(self, rng: np.random.Generator, keys: np.ndarray, binding: np.ndarray | None = None) -> np.ndarray:
        """A value for each write, one write after the other: [count pairs] of keys -> the same of values.

        It differs from the last value that the key got in a write that is ``binding`` [count pairs] (None: in any).
        """
        rows, values = np.arange(len(keys)), np.empty_like(keys)
        last = np.full((len(keys), self.options.keys), -1)
        for pair, key in enumerate(keys.T):
            values[:, pair] = value = draw_other(rng, self.options.values, last[rows, key])
            last[rows, key] = value if binding is None else np.where(binding[:, pair], value, last[rows, key])
        return values

    def ask(self, pairs: np.ndarray, asked: np.ndarray, answer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``pairs`` [count tokens], then ``[ASK] key answer`` for every query: ids, and labels that score the answers alone.

        asked: keys [count queries]; answer: token numbers, the same shape.
        """
        queries = np.stack([np.full_like(asked, ASK), self.first_key + asked, answer], axis=-1)
        ids = np.concatenate([pairs, queries.reshape(len(pairs), -1)], axis=1)
        return ids, answers(ids, np.arange(pairs.shape[1] + 2, ids.shape[1], 3))

    def tokens_of(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """``k v k v ...``: [count pairs] twice -> token numbers [count 2 pairs]."""
        return np.stack([self.first_key + keys, self.first_value + values], axis=-1).reshape(len(keys), -1)


def last_written(
    keys: np.ndarray, values: np.ndarray, asked: np.ndarray, counted: np.ndarray | None = None
) -> np.ndarray:
    """The value of the last write of each key that is asked for, among those ``counted`` [count pairs]; -1 where there is none.

    Shapes: keys, values [count pairs], asked [count queries] -> [count queries].
    """
    hits = keys[:, None, :] == asked[:, :, None]
    if counted is not None:
        hits = hits & counted[:, None, :]
    last = hits.shape[-1] - 1 - hits[..., ::-1].argmax(-1)
    return np.where(hits.any(-1), np.take_along_axis(values, last, axis=1), -1)


def _padded(example: tuple[np.ndarray, np.ndarray], length: int) -> Batch:
    ids, labels = example
    room = ((0, 0), (0, length - ids.shape[1]))
    return as_batch(np.pad(ids, room, constant_values=PAD), np.pad(labels, room, constant_values=IGNORED))


def answers(ids: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Labels that score the columns ``places`` alone."""
    labels = np.full_like(ids, IGNORED)
    labels[:, places] = ids[:, places]
    return labels


def draw_other(rng: np.random.Generator, size: int, present: np.ndarray) -> np.ndarray:
    """Uniform numbers below ``size``, other than ``present`` where that is not negative."""
    fresh = rng.integers(size, size=present.shape)
    other = rng.integers(size - 1, size=present.shape)
    return np.where(present < 0, fresh, other + (other >= present))


def choose_places(rng: np.random.Generator, allowed: np.ndarray, count: int) -> np.ndarray:
    """``count`` distinct columns of each row among the allowed ones, in random order: [rows columns] of bool -> [rows count]."""
    return np.argsort(np.where(allowed, rng.random(allowed.shape), 2.0), axis=1)[:, :count]
