"""The tasks by name, and their samples."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from thalweg.data.tasks.austen import HELD_OUT, novels
from thalweg.errors import InputError, UnknownNameError
from thalweg.evaluation.ruler.counting import common, frequent
from thalweg.evaluation.ruler.needles import HAYSTACKS, Haystack, NeedleTask, sentences, tracking
from thalweg.evaluation.ruler.sample import Draft, Sample, fitted
from thalweg.evaluation.subjects import check_tokenizer

Maker = Callable[[Random, int, Any, Sequence[str]], Draft]

# Sizes as in RULER's 13 tasks. multivalue and multiquery hide among other needles, where RULER takes essays.
TASKS: dict[str, Maker] = {
    "single": NeedleTask("noise").draft,
    "single_2": NeedleTask("text").draft,
    "single_3": NeedleTask("text", holds="identifier").draft,
    "multikey_1": NeedleTask("text", keys=4).draft,
    "multikey_2": NeedleTask("needles").draft,
    "multikey_3": NeedleTask("needles", names="identifiers", holds="identifier").draft,
    "multivalue": NeedleTask("needles", values=4).draft,
    "multiquery": NeedleTask("needles", keys=4, asked=4).draft,
    "vt": tracking,
    "cwe": common,
    "fwe": frequent,
}
SUMMARIES = {
    "single": "one number among noise",
    "single_2": "one number in a text",
    "single_3": "one identifier in a text",
    "multikey_1": "one number in a text that holds three others",
    "multikey_2": "one number, everything else numbers of other keys",
    "multikey_3": "one identifier of an identifier, everything else the same of others",
    "multivalue": "four numbers of one key, among those of other keys",
    "multiquery": "the numbers of four keys, among those of other keys",
    "vt": "all variables that a chain of assignments gives one value",
    "cwe": "the ten words that come up most often in a list",
    "fwe": "the three coded words that come up most often",
}
OF = 13  # tasks of RULER
FAMILIES = {"niah": [*TASKS][:8], "vt": ["vt"], "cwe": ["cwe"], "fwe": ["fwe"], "qa": []}
OFFLINE = ("single", "multikey_2", "multikey_3", "multivalue", "multiquery", "vt", "cwe", "fwe")
ALIASES = {"single_1": "single"}


def names_of(given: str | Sequence[str]) -> list[str]:
    """Names of tasks: a list, a string with commas, ``all``, or ``offline`` for those that need no text. Raises: UnknownNameError."""
    wanted = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
    found: list[str] = []
    for name in wanted:
        several = {"all": [*TASKS], "offline": [*OFFLINE]}.get(name, [ALIASES.get(name, name)])
        for one in several:
            if one not in TASKS:
                raise UnknownNameError("long-context task", one, [*TASKS, "all", "offline"])
            if one not in found:
                found.append(one)
    return found


def samples(
    task: str,
    tokenizer: Any,
    length: int,
    count: int,
    *,
    seed: int = 0,
    haystack: Haystack | None = None,
    text: str | None = None,
) -> list[Sample]:
    """``count`` samples of a task for a budget of ``length`` tokens (prompt and answer, counted by this tokenizer).

    Sample i of a seed has the same needles, keys and depths at every length; its haystack grows. haystack: ``noise`` (five sentences
    repeated), ``needles`` (others of the same kind) or ``text`` in place of the task's own. text: what ``text`` haystacks are made of;
    None: a shipped novel.
    Raises: UnknownNameError; InputError for a length that a sample does not fit into, or a text without sentences.
    """
    (task,) = names_of([task])
    check_tokenizer(tokenizer)
    if count < 1 or length < 1:
        raise InputError(f"samples need a count and a length of at least 1, got {count} and {length}")
    if haystack is not None and haystack not in HAYSTACKS:
        raise UnknownNameError("haystack", haystack, HAYSTACKS)
    found = sentences(novels()[HELD_OUT] if text is None else text)
    made = []
    for index in range(count):
        rng = Random(f"{seed} {task} {index}")
        start = rng.randrange(len(found))  # not every sample hides in the same page
        draft = TASKS[task](rng, length, haystack, [*found[start:], *found[:start]])
        made.append(fitted(draft, tokenizer, length, task, index))
    return made
