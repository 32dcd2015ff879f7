"""Multiple choice from local files: the choice with the largest log likelihood after the question, few examples before it if wanted."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from thalweg.capture.limits import longest_of, vocabulary_of
from thalweg.config import checked_path
from thalweg.data.tasks.text_file import decode, read_bytes
from thalweg.data.text.tokenizer import token_ids
from thalweg.errors import InputError
from thalweg.evaluation.scores import Scores, share
from thalweg.evaluation.scoring import check_batch, score
from thalweg.evaluation.subjects import around, check_causal, check_tokenizer, ids_of
from thalweg.evaluation.windows import Window

FIELDS = ("question", "choices", "answer")
BETWEEN = "\n\n"


@dataclass(frozen=True)
class Item:
    """A question (white space at its end is dropped), its choices as they follow it after one space, and the number of the right one."""

    question: str
    choices: tuple[str, ...]
    answer: int


def read_choices(path: str | Path) -> list[Item]:
    """Items from JSON lines: ``{"question": "...", "choices": ["...", "..."], "answer": 0}``.

    Raises: InputError that names the line.
    """
    path = checked_path(path, expand=True)
    items = []
    for number, line in enumerate(decode(read_bytes(path), path).split("\n"), 1):
        if line.strip():
            items.append(_item(line, f"{path}:{number}"))
    if not items:
        raise InputError(f"{path} holds no question")
    return items


def _item(line: str, where: str) -> Item:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{where} is not JSON") from None
    if not isinstance(row, dict) or set(FIELDS) - row.keys():
        raise InputError(f"{where} must be a table with {', '.join(FIELDS)}")
    question, given, answer = (row[name] for name in FIELDS)
    texts = isinstance(given, list) and len(given) > 1 and all(isinstance(c, str) and c.strip() for c in given)
    if not isinstance(question, str) or not question.strip() or not texts:
        raise InputError(f"{where}: question must be a text and choices at least two texts")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(given):
        raise InputError(f"{where}: answer must be the number of a choice, 0 to {len(given) - 1}, got {answer!r:.40}")
    return Item(question, tuple(given), answer)


def choices(
    model: nn.Module,
    tokenizer: Any,
    items: Sequence[Item],
    *,
    name: str = "choices",
    shots: int = 0,
    seed: int = 0,
    batch_size: int = 1,
    padding: str = "right",
    on_item: Callable[[int, int], None] | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> Scores:
    """Accuracy by the likeliest choice: ``acc`` (sum), ``acc_norm`` (by characters of the choice) and ``acc_bytes`` (by its bytes).

    A choice is scored as lm-eval scores it: question and choice are cut into tokens together (the special tokens that the tokenizer adds
    stand before), and what stands after the tokens of the question belongs to the choice. shots: other items of the list put before each
    question with their answers, drawn from ``seed`` and its number. known: rows of ``on_row`` by the names of items, of an earlier call;
    those are not scored again.
    Raises: InputError for an encoder, no tokenizer, too few items for the shots, or a question longer than the model takes.
    """
    check_batch(batch_size, padding)
    check_tokenizer(tokenizer)
    check_causal(model)
    check_shots(shots, items, name)
    known = known or {}
    longest, (start, _) = longest_of(model), around(tokenizer)
    ids_of(tokenizer, items[0].question, vocabulary_of(model), f"{name}, item 0")
    windows: list[Window] = []
    for i, item in enumerate(items):
        before = _shots(items, i, shots, seed)
        for choice in item.choices:
            context, rest = split(tokenizer, before + item.question.rstrip(), " " + choice)
            context = [*start, *context]
            if not rest:
                raise InputError(f"{name}, item {i}: choice {choice!r:.40} has no token of its own after the question")
            if f"{name} {i}" not in known:
                windows.append(Window([*context, *rest][:-1], rest))
            if longest is not None and len(context) + len(rest) - 1 > longest:
                helps = "give fewer shots" if shots else "shorten the question, or leave it out of the file"
                raise InputError(
                    f"{name}, item {i} has {len(context) + len(rest)} tokens, the model takes {longest}; {helps}"
                )
    scored = score(model, windows, batch_size=batch_size, padding=padding)
    columns = {key: np.zeros(len(items)) for key in ("acc", "acc_norm", "acc_bytes", "chance", "items")}
    for i, item in enumerate(items):
        if (row := known.get(f"{name} {i}")) is not None:
            for key, column in columns.items():
                column[i] = row[key]
            continue
        found = np.array([next(scored).log_likelihood for _ in item.choices])
        by = {
            "acc": np.ones(len(found)),
            "acc_norm": np.array([len(choice) for choice in item.choices]),
            "acc_bytes": np.array([len(choice.encode()) for choice in item.choices]),
        }
        for key, size in by.items():
            columns[key][i] = float(np.argmax(found / size) == item.answer)
        columns["chance"][i], columns["items"][i] = 1 / len(item.choices), 1
        if on_row is not None:
            on_row({"item": f"{name} {i}", **{key: float(column[i]) for key, column in columns.items()}})
        if on_item is not None:
            on_item(i + 1, len(items))
    null = {"null": float(columns["chance"].mean()), "null_kind": "one of the choices at random"}
    return Scores(
        name,
        f"{shots}-shot, by log likelihood",
        tuple(f"{name} {i}" for i in range(len(items))),
        columns,
        tuple(share((key, "items"), key, **null) for key in ("acc", "acc_norm", "acc_bytes")),
        {"shots": shots, "seed": seed},
    )


def check_shots(shots: int, items: Sequence[Item], name: str) -> None:
    """Raises: InputError for more solved examples than there are other items."""
    if not 0 <= shots < len(items):
        raise InputError(f"{name}: shots must lie in 0..{len(items) - 1} (the other items), got {shots}")


def split(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokens of a context and of what follows it, cut as one text; white space at the end of the context goes to what follows."""
    kept = context.rstrip()
    continuation, context = context[len(kept) :] + continuation, kept
    whole, first = token_ids(tokenizer, context + continuation), token_ids(tokenizer, context)
    return first, whole[len(first) :]


def _shots(items: Sequence[Item], index: int, shots: int, seed: int) -> str:
    others: Iterable[int] = (j + (j >= index) for j in np.random.default_rng([seed, index]).permutation(len(items) - 1))
    chosen = [items[j] for j, _ in zip(others, range(shots), strict=False)]
    return "".join(f"{item.question.rstrip()} {item.choices[item.answer]}{BETWEEN}" for item in chosen)
