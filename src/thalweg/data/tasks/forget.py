"""forget: a marker voids all earlier pairs."""

import math
from dataclasses import dataclass

import numpy as np

from thalweg.data.synthetic import KeyValueTask, at_least, choose_places, last_written
from thalweg.data.task import IGNORED, next_token_accuracy
from thalweg.data.tasks import register
from thalweg.errors import InputError

RESET = 2
UNKNOWN = 3


@dataclass(frozen=True)
class ForgetOptions:
    """keys, values: how many of each; pairs: writes in all; queries: questions, about distinct keys; unknown: how often the answer is
    'unknown', 0 to 1.
    """

    keys: int = 8
    values: int = 16
    pairs: int = 16
    queries: int = 2
    unknown: float = 0.5

    def __post_init__(self) -> None:
        at_least(self, keys=2, values=2, pairs=2, queries=1)
        if self.queries >= self.keys:
            raise InputError(
                f"queries must be below keys={self.keys} (a key must stay that may be written at any time), got {self.queries}"
            )
        if 2 * self.queries > self.pairs:
            raise InputError(
                f"every key that is asked for needs a write before the reset and room for one after it, so queries={self.queries} needs "
                f"pairs of at least {2 * self.queries}, got {self.pairs}"
            )
        if not 0 <= self.unknown <= 1:
            raise InputError(f"unknown must be from 0 to 1, got {self.unknown:g}")


class Forget(KeyValueTask):
    """``k v ... [RESET] k v ... [ASK] k a``, a scored: the value last written to k after the reset, or ``unknown`` if there is none.

    The reset stands at a random place. Every key that is asked for was written before it, and what is written after it differs from that
    key's last value before it, so the stale value is always wrong. Chance: with probability ``unknown`` the answer is
    'unknown', else uniform over the values; the best guess that reads nothing is right for max(unknown, (1 - unknown)/values).
    """

    Options = ForgetOptions
    options: ForgetOptions
    first_key = 4

    def natural_length(self, split: str = "train") -> int:
        self._check_split(split)
        return 2 * self.options.pairs + 1 + 3 * self.options.queries

    def chance(self) -> dict[str, float]:
        u, v = self.options.unknown, self.options.values
        entropy = -sum(p * math.log(p) for p in (u, 1 - u) if p > 0) + (1 - u) * math.log(v)
        best = max(u, (1 - u) / v)
        return {"chance": entropy, "chance_accuracy": best, "chance_exact_match": best**self.options.queries}

    def metrics(self, logits, labels):
        """Also the token accuracy of both kinds of answer, ``unknown_accuracy`` and ``known_accuracy``, where the batch has them."""
        found = super().metrics(logits, labels)
        for name, kept in (("unknown_accuracy", labels == UNKNOWN), ("known_accuracy", labels != UNKNOWN)):
            some = labels.masked_fill(~kept, IGNORED)
            if bool((some[:, 1:] != IGNORED).any()):
                found[name] = next_token_accuracy(logits, some)["token_accuracy"]
        return found

    def examples(self, rng: np.random.Generator, count: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        o = self.options
        rows, pairs = np.arange(count), np.arange(o.pairs)
        reset = rng.integers(o.queries, o.pairs - o.queries + 1, size=count)  # pairs before the reset
        before = pairs < reset[:, None]
        asked = self.draw_keys_asked(rng, count)
        void = rng.random((count, o.queries)) < o.unknown
        voided = np.zeros((count, o.keys), bool)
        voided[rows[:, None], asked] = void
        # Any key may be written before the reset, after it only those whose answer is known.
        allowed = before[:, :, None] | ~voided[:, None, :]
        keys = np.where(allowed, rng.random(allowed.shape), -1.0).argmax(-1)
        keys[rows[:, None], choose_places(rng, before, o.queries)] = asked
        after = choose_places(rng, ~before, o.queries)
        keys[rows[:, None], after] = np.where(void, keys[rows[:, None], after], asked)

        values = self.draw_values(rng, keys, binding=before)  # so that the stale value is wrong
        latest = last_written(keys, values, asked, counted=~before)
        said = np.where(latest >= 0, self.first_value + latest, UNKNOWN)
        ids = np.full((count, 2 * o.pairs + 1), RESET)
        places = 2 * pairs + (pairs >= reset[:, None])
        for offset, tokens in enumerate((self.first_key + keys, self.first_value + values)):
            np.put_along_axis(ids, places + offset, tokens, axis=1)
        return self.ask(ids, asked, said)


register(
    "forget",
    summary="a reset voids earlier key-value pairs; recall what is left or say 'unknown'",
    source="parameters keys, values, pairs, queries, unknown",
)(Forget.open)
