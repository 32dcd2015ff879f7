"""overwrite: keys are written again and again; the latest value is asked for."""

import math
from dataclasses import dataclass

import numpy as np

from thalweg.data.synthetic import SyntheticTask, answers, at_least, choose_places, draw_other
from thalweg.data.tasks import register
from thalweg.errors import InputError

ASK = 1
FIRST_KEY = 2


@dataclass(frozen=True)
class OverwriteOptions:
    """keys, values: how many of each; pairs: writes before the questions; queries: questions, about distinct keys."""

    keys: int = 8
    values: int = 16
    pairs: int = 16
    queries: int = 2

    def __post_init__(self) -> None:
        at_least(self, keys=1, values=2, pairs=2, queries=1)
        if self.queries > self.keys:
            raise InputError(f"queries={self.queries} asks for more distinct keys than keys={self.keys}")
        if 2 * self.queries > self.pairs:
            raise InputError(
                f"queries={self.queries} needs pairs of at least {2 * self.queries} (two writes of every key asked), got {self.pairs}"
            )


class Overwrite(SyntheticTask):
    """``k v k v ... [ASK] k v [ASK] k v``, the v after a question scored: the value last written to k.

    Every key that is asked for was written at least twice, and a write always changes the value, so the value before the last is wrong.
    Answers are uniform over the values: chance is ln(values) nats, 1/values of the tokens, values^-queries of the sequences.
    """

    Options = OverwriteOptions
    options: OverwriteOptions

    def __init__(self, name: str, options: OverwriteOptions):
        super().__init__(name, options)
        self.first_value = FIRST_KEY + options.keys
        self.vocab_size = self.first_value + options.values

    @property
    def values(self) -> range:
        return range(self.first_value, self.vocab_size)

    def natural_length(self, split: str = "train") -> int:
        self._check_split(split)
        return 2 * self.options.pairs + 3 * self.options.queries

    def chance(self) -> dict[str, float]:
        one = 1 / self.options.values
        return {"chance": -math.log(one), "chance_accuracy": one, "chance_exact_match": one**self.options.queries}

    def examples(self, rng: np.random.Generator, count: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        o = self.options
        rows = np.arange(count)
        asked = choose_places(rng, np.ones((count, o.keys), bool), o.queries)
        keys = rng.integers(o.keys, size=(count, o.pairs))
        twice = choose_places(rng, np.ones((count, o.pairs), bool), 2 * o.queries)
        keys[rows[:, None], twice] = np.concatenate([asked, asked], axis=1)
        latest = np.full((count, o.keys), -1)
        ids = np.empty((count, self.natural_length()), np.int64)
        for pair in range(o.pairs):
            key = keys[:, pair]
            value = draw_other(rng, o.values, latest[rows, key])
            latest[rows, key] = value
            ids[:, 2 * pair] = FIRST_KEY + key
            ids[:, 2 * pair + 1] = self.first_value + value
        return ask(ids, 2 * o.pairs, FIRST_KEY + asked, self.first_value + latest[rows[:, None], asked])


def ask(ids: np.ndarray, start: int, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Write ``[ASK] key value`` for every query from column ``start`` on; ids and labels that score the values."""
    ids[:, start::3], ids[:, start + 1 :: 3], ids[:, start + 2 :: 3] = ASK, keys, values
    return ids, answers(ids, np.arange(start + 2, ids.shape[1], 3))


register(
    "overwrite",
    summary="key-value pairs are rewritten; recall the latest",
    source="parameters keys, values, pairs, queries",
)(Overwrite.open)
