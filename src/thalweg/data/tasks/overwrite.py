"""overwrite: keys are written again and again; the latest value is asked for."""

import math
from dataclasses import dataclass

import numpy as np

from thalweg.data.synthetic import KeyValueTask, at_least, choose_places, last_written
from thalweg.data.tasks import register
from thalweg.errors import InputError


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


class Overwrite(KeyValueTask):
    """``k v k v ... [ASK] k v [ASK] k v``, the v after a question scored: the value last written to k.

    Every key that is asked for was written at least twice, and a write always changes the value, so the value before the last is wrong.
    Answers are uniform over the values: chance is ln(values) nats, 1/values of the tokens, values^-queries of the sequences.
    """

    Options = OverwriteOptions
    options: OverwriteOptions
    first_key = 2

    def natural_length(self, split: str = "train") -> int:
        self._check_split(split)
        return 2 * self.options.pairs + 3 * self.options.queries

    def chance(self) -> dict[str, float]:
        one = 1 / self.options.values
        return {"chance": -math.log(one), "chance_accuracy": one, "chance_exact_match": one**self.options.queries}

    def examples(self, rng: np.random.Generator, count: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        o = self.options
        asked = self.draw_keys_asked(rng, count)
        keys = rng.integers(o.keys, size=(count, o.pairs))
        twice = choose_places(rng, np.ones((count, o.pairs), bool), 2 * o.queries)
        np.put_along_axis(keys, twice, np.concatenate([asked, asked], axis=1), axis=1)
        values = self.draw_values(rng, keys)
        latest = last_written(keys, values, asked)
        return self.ask(self.tokens_of(keys, values), asked, self.first_value + latest)


register(
    "overwrite",
    summary="key-value pairs are rewritten; recall the latest",
    source="parameters keys, values, pairs, queries",
)(Overwrite.open)
