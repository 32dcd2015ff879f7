"""Needles in a haystack: one or several sentences to be found among noise, among other needles, or in a text."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Literal

from thalweg.errors import InputError
from thalweg.evaluation.ruler import words
from thalweg.evaluation.ruler.sample import LONGEST_HAYSTACK, Draft

Haystack = Literal["noise", "needles", "text"]
HAYSTACKS = ("noise", "needles", "text")
DEPTHS = 40  # places from the first to the last unit, evenly spaced
MOST_NEEDLES = 16_384  # of one sample, distractors among them
NOISE = (
    "The morning is cool.",
    "A cart rolls along the lane.",
    "Smoke rises from the roof.",
    "Somebody sweeps the yard.",
    "Then it is quiet again.",
)
_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z])")


@dataclass(frozen=True)
class NeedleTask:
    """keys: how many needle keys are put in; values: of each key; asked: how many keys are asked for; names, holds: what keys and values are;
    haystack: where nothing else is said.
    """

    haystack: Haystack
    keys: int = 1
    values: int = 1
    asked: int = 1
    names: Literal["words", "identifiers"] = "words"
    holds: Literal["number", "identifier"] = "number"

    def draft(self, rng: Random, length: int, haystack: Haystack | None, text: Sequence[str]) -> Draft:
        """The needles, their depths and the question, drawn from ``rng``."""
        kind = haystack or self.haystack
        values = self.keys * self.values
        # One draw for needles and distractors, so that none of them is like another.
        names = self._names(rng, MOST_NEEDLES if kind == "needles" else self.keys)
        held = self._held(rng, MOST_NEEDLES if kind == "needles" else values)
        keys = names[: self.keys]
        needles = [self._sentence(keys[i // self.values], held[i]) for i in range(values)]
        depths = [rng.randrange(DEPTHS) for _ in needles]
        asked = keys[: self.asked]
        answers = tuple(held[: self.asked * self.values])
        unit: Callable[[int], str]
        if kind == "needles":
            unit = lambda i: self._sentence(names[self.keys + i], held[values + i])  # noqa: E731
        elif kind == "noise":
            unit = lambda i: NOISE[i % len(NOISE)]  # noqa: E731
        else:
            unit = lambda i: text[i % len(text)]  # noqa: E731
        between = "\n" if kind == "needles" else " "

        def render(units: int) -> str:
            body = between.join(insert([unit(i) for i in range(units)], needles, depths))
            return f"{self._opening()}\n\n{body}\n\n{self._question(asked)}"

        others = (lambda units: units + values) if kind == "needles" else (lambda units: values)
        return Draft(render, answers, others, most=MOST_NEEDLES - values if kind == "needles" else LONGEST_HAYSTACK)

    def _names(self, rng: Random, count: int) -> list[str]:
        return words.keys(rng, count) if self.names == "words" else words.identifiers(rng, count)

    def _held(self, rng: Random, count: int) -> list[str]:
        return words.numbers(rng, count) if self.holds == "number" else words.identifiers(rng, count)

    def _sentence(self, key: str, value: str) -> str:
        return f"The secret {self.holds} of {key} is {value}."

    def _opening(self) -> str:
        return f"One or more secret {self.holds}s are hidden in the text below. Keep them in mind: you will be asked for them afterwards."

    def _question(self, asked: Sequence[str]) -> str:
        listed = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
        if len(asked) * self.values == 1:
            return f"Question: What is the secret {self.holds} of {listed} in the text?\nAnswer: The secret {self.holds} of {listed} is"
        return f"Question: What are all the secret {self.holds}s of {listed} in the text?\nAnswer: The secret {self.holds}s of {listed} are"


def insert(units: list[str], needles: Sequence[str], depths: Sequence[int]) -> list[str]:
    """Needles among units; depth d of 0..39 is the place d/39 of the way. Needles at one place keep their order."""
    places = [depth * len(units) // (DEPTHS - 1) for depth in depths]
    found: list[str] = []
    for place in range(len(units) + 1):
        found += [needle for needle, at in zip(needles, places, strict=True) if at == place]
        found += units[place : place + 1]
    return found


def sentences(text: str) -> list[str]:
    """The sentences of a text, each on one line. Raises: InputError for fewer than 20: they would be repeated too often to hide anything."""
    found = [" ".join(sentence.split()) for sentence in _SENTENCE.split(text)]
    found = [sentence for sentence in found if sentence]
    if len(found) < 20:
        raise InputError(f"a text to hide needles in needs at least 20 sentences, got {len(found)}")
    return found


def chain(rng: Random, hops: int) -> tuple[list[str], str, list[str]]:
    """A chain of variables: its assignments in order, the value, and the names."""
    names = words.letters(rng, hops + 1, 5, "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    value = words.numbers(rng, 1, 5)[0]
    steps = [f"LET {names[0]} = {value}."]
    steps += [f"LET {later} = {earlier}." for earlier, later in zip(names, islice(names, 1, None), strict=False)]
    return steps, value, names


def tracking(rng: Random, length: int, haystack: Haystack | None, text: Sequence[str], hops: int = 4) -> Draft:
    """Variable tracking: one chain of assignments scattered in order, one solved example before. All variables of the chain are asked for."""
    example, shown, listed = chain(rng, hops)
    while True:
        steps, value, names = chain(rng, hops)
        if not set(names) & set(listed) and value != shown:
            break
    depths = sorted(rng.randrange(DEPTHS) for _ in steps)
    solved = " ".join(
        insert([NOISE[i % len(NOISE)] for i in range(len(example))], example, [i * 9 for i in range(hops + 1)])
    )
    if haystack == "needles":
        raise InputError("vt takes the haystack noise or text, got needles")
    straw: Sequence[str] = text if haystack == "text" else NOISE

    def render(units: int) -> str:
        body = " ".join(insert([straw[i % len(straw)] for i in range(units)], steps, depths))
        return f"{_track(solved, shown, hops)} {', '.join(listed)}.\n\n{_track(body, value, hops)}"

    return Draft(render, tuple(names), lambda units: 2 * (hops + 1))


def _track(body: str, value: str, hops: int) -> str:
    return (
        "Follow the assignments that are scattered in the text below.\n\n"
        f"{body}\n\nQuestion: Which variables have the value {value}?\nAnswer: The {hops + 1} variables with the value {value} are"
    )
