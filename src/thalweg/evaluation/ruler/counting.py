"""Aggregation over a whole context: the words that come up most often."""

from collections.abc import Sequence
from random import Random

from thalweg.evaluation.ruler import words
from thalweg.evaluation.ruler.sample import Draft

COMMON = 10  # words asked for
SHORT = 4096  # tokens below which the list repeats its words less
TOP = 3  # coded words asked for
EXPONENT = 2.0  # of the Zipf law of coded words
FILLER = "..."
MOST_WORDS = 2**14


def common(rng: Random, length: int, haystack: str | None, text: Sequence[str]) -> Draft:
    """A numbered list in which ten words come 30 times and all others 3 times (6 and once in a budget below 4,096), one solved example
    before. A unit is an uncommon word.
    """
    often, seldom = (6, 1) if length < SHORT else (30, 3)
    shown = words.single(rng, 2 * COMMON)
    example = _numbered(rng, shown[:COMMON], shown[COMMON:], 3, 1)
    pool = [word for word in words.single(rng, MOST_WORDS) if word not in set(shown)]
    asked, rest = pool[:COMMON], pool[COMMON:]
    order = rng.getrandbits(64)

    def render(units: int) -> str:
        listed = _numbered(Random(order), asked, rest[:units], often, seldom)
        return f"{_list(example)} {', '.join(shown[:COMMON])}.\n\n{_list(listed)}"

    return Draft(render, tuple(asked), lambda units: COMMON + units, most=len(rest))


def _numbered(rng: Random, asked: Sequence[str], rest: Sequence[str], often: int, seldom: int) -> str:
    every = [*asked] * often + [*rest] * seldom
    rng.shuffle(every)
    return " ".join(f"{i}. {word}" for i, word in enumerate(every, 1))


def _list(listed: str) -> str:
    return (
        "Below is a numbered list of words. Some words come up more often than the others. Keep the ones that come up most often in mind.\n\n"
        f"{listed}\n\nQuestion: Which {COMMON} words come up most often in the list?\nAnswer: The {COMMON} words that come up most often are"
    )


def frequent(rng: Random, length: int, haystack: str | None, text: Sequence[str]) -> Draft:
    """Coded words of six letters whose counts fall as rank^-2; the most frequent one is dots, the next three are asked for. A unit is a
    word of the text.
    """
    vocabulary = max(2 * TOP, length // 50)
    coded = words.letters(rng, vocabulary - 1, 6, "abcdefghijklmnopqrstuvwxyz")
    order = rng.getrandbits(64)

    def render(units: int) -> str:
        text = [
            word for word, count in zip((FILLER, *coded), counts(units, vocabulary), strict=True) for _ in range(count)
        ]
        Random(order).shuffle(text)
        return (
            "The text below is in code, and its dots mean nothing. Keep track of how often the coded words come up.\n\n"
            f"{' '.join(text)}\n\nQuestion: Which {TOP} coded words come up most often?\n"
            f"Answer: The {TOP} coded words that come up most often are"
        )

    return Draft(render, tuple(coded[:TOP]), lambda units: vocabulary - 1, least=8 * TOP)


def counts(units: int, vocabulary: int) -> list[int]:
    """How often each rank comes up in about ``units`` words: proportional to rank^-2, at least once, and strictly falling over the ranks
    that matter.
    """
    weights = [rank**-EXPONENT for rank in range(1, vocabulary + 1)]
    total = sum(weights)
    found = [max(1, int(units * weight / total)) for weight in weights]
    for rank in range(TOP, -1, -1):
        found[rank] = max(found[rank], found[rank + 1] + 1)
    return found
