"""A sample of a long-context task, and how its haystack is made to fill a budget of tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thalweg.data.text.tokenizer import token_ids
from thalweg.errors import InputError
from thalweg.evaluation.subjects import around

SPARE = 16  # tokens beside the answer itself
LONGEST_HAYSTACK = 2**22  # units; more means that the budget is no number of tokens


@dataclass(frozen=True)
class Sample:
    """One question. prompt: ends with the beginning of the answer; answers: what must stand in the output; tokens: of the prompt, special
    ones included; generate: tokens that may be added; units: of the haystack; candidates: things in the prompt that look like an answer,
    among which guessing finds each with chance len(answers)/candidates.
    """

    task: str
    index: int
    prompt: str
    answers: tuple[str, ...]
    tokens: int
    generate: int
    units: int
    candidates: int


@dataclass(frozen=True)
class Draft:
    """A sample whose haystack has no size yet. render(units): the whole prompt; candidates(units): as of :class:`Sample`; least: the fewest
    units.
    """

    render: Callable[[int], str]
    answers: tuple[str, ...]
    candidates: Callable[[int], int]
    least: int = 1
    most: int = LONGEST_HAYSTACK


def fitted(draft: Draft, tokenizer: Any, length: int, task: str, index: int) -> Sample:
    """The sample with the largest haystack for which prompt and answer fit into ``length`` tokens of this tokenizer.

    Room for the answer: one and a half times the tokens of the answers written out, and 16. One unit more would not fit.
    Raises: InputError for a length that the smallest haystack does not fit into, or that the haystack cannot fill.
    """
    generate = -(-3 * len(token_ids(tokenizer, ", ".join(draft.answers))) // 2) + SPARE
    special, budget = len(around(tokenizer)[0]), length - generate

    def tokens(units: int) -> int:
        return special + len(token_ids(tokenizer, draft.render(units)))

    low, used = draft.least, tokens(draft.least)
    if used > budget:
        raise InputError(
            f"{task} needs at least {used + generate} tokens with this tokenizer, got a length of {length}; choose a larger one"
        )
    step = 1
    while low < draft.most:  # grow until it does not fit, by what the last step cost
        more = min(low + step, draft.most)
        now = tokens(more)
        if now > budget:
            low, used = _between(tokens, low, more, used, budget)
            break
        step = max(1, int((budget - now) * (more - low) / max(1, now - used)))
        low, used = more, now
    else:
        raise InputError(f"{task}: {length} tokens are more than the haystack can fill; choose a smaller length")
    return Sample(task, index, draft.render(low), draft.answers, used, generate, low, draft.candidates(low))


def _between(tokens: Callable[[int], int], low: int, high: int, used: int, budget: int) -> tuple[int, int]:
    """The most units from ``low``, which fits, to below ``high``, which does not."""
    while high - low > 1:
        middle = (low + high) // 2
        now = tokens(middle)
        if now > budget:
            high = middle
        else:
            low, used = middle, now
    return low, used
