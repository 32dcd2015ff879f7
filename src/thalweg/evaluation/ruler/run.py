"""Answers of a model to long-context tasks, and their scores: recall of the reference strings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thalweg.capture.evaluating import evaluating
from thalweg.capture.limits import longest_of, window_length
from thalweg.data.text.tokenizer import Tokenizer, token_ids
from thalweg.errors import InputError
from thalweg.evaluation.ruler.sample import Sample
from thalweg.evaluation.ruler.tasks import FAMILIES, OF
from thalweg.evaluation.scores import Metric, Scores, share
from thalweg.evaluation.scoring import batches, check_batch, device_of, rows_of
from thalweg.evaluation.subjects import around, check_causal, check_tokenizer, special
from thalweg.models import Decoder, DecoderCache

NULL = "outputs against the answers of other samples"


def recall(output: str, answers: Sequence[str]) -> float:
    """The share of answers that stand in the output, whatever the case of letters."""
    text = output.casefold()
    return sum(answer.casefold() in text for answer in answers) / len(answers)


def run(
    model: nn.Module,
    tokenizer: Any,
    samples: Mapping[str, Sequence[Sample]],
    *,
    length: int,
    batch_size: int = 1,
    on_sample: Callable[[int, int], None] | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Scores]:
    """Greedy answers to ``samples`` (by task) and their recall, by task, with :func:`aggregate` under ``ruler`` where there are several
    tasks.

    length: the budget that the samples were made for. Rows of a batch are padded on the left. The null beside each score is the recall of
    the same outputs against the answers of the next sample. on_row gets the output too. known: its rows by the names of items, of an earlier
    call; those are not answered again.
    Raises: InputError for an encoder, no tokenizer, or a length beyond what the model takes.
    """
    check_batch(batch_size)
    check_tokenizer(tokenizer)
    check_causal(model)
    window_length(longest_of(model), length, length)
    known, total, done = known or {}, sum(map(len, samples.values())), 0
    found: dict[str, Scores] = {}
    for task, made in samples.items():
        outputs = {i: str(known[name]["output"]) for i, sample in enumerate(made) if (name := _name(sample)) in known}
        done += len(outputs)
        for batch in batches([i for i in range(len(made)) if i not in outputs], batch_size):
            texts = answer(model, tokenizer, [made[i] for i in batch])
            outputs |= zip(batch, texts, strict=True)
            done += len(batch)
            for sample, text in zip([made[i] for i in batch], texts, strict=True):
                if on_row is not None:
                    on_row(_row(sample, text))
            if on_sample is not None:
                on_sample(done, total)
        found[task] = _scores(task, made, [outputs[i] for i in range(len(made))], length)
    return {**found, "ruler": aggregate(found)} if len(found) > 1 else found


def _name(sample: Sample) -> str:
    return f"{sample.task} {sample.index}"


def _row(sample: Sample, output: str) -> dict[str, Any]:
    return {
        "item": _name(sample),
        "recall": recall(output, sample.answers),
        "answers": list(sample.answers),
        "output": output,
        "tokens": sample.tokens,
        "candidates": sample.candidates,
    }


def _scores(task: str, made: Sequence[Sample], outputs: Sequence[str], length: int) -> Scores:
    hits = [recall(output, sample.answers) for output, sample in zip(outputs, made, strict=True)]
    others = [recall(output, made[(i + 1) % len(made)].answers) for i, output in enumerate(outputs)]
    null: dict[str, Any] = {"null": float(np.mean(others)), "null_kind": NULL} if len(made) > 1 else {}
    guess = float(np.mean([min(1.0, len(sample.answers) / sample.candidates) for sample in made]))
    return Scores(
        task,
        f"{length} tokens, greedy, recall of the reference strings",
        tuple(map(_name, made)),
        {"recall": np.array(hits), "samples": np.ones(len(made))},
        (share(("recall", "samples"), "recall", **null),),
        {"length": length, "candidate_guess": guess, "tokens": [sample.tokens for sample in made]},
    )


def aggregate(scores: Mapping[str, Scores]) -> Scores:
    """Two means that are never mixed: over tasks, and over families of tasks (needles, tracking, common, frequent words), of what was run.

    The families are our reading of a "five-family macro" that is named in print and not defined; the fifth, question answering, is not made
    here.
    """
    tasks = [*scores]
    families = {name: [t for t in tasks if t in members] for name, members in FAMILIES.items()}
    families = {name: members for name, members in families.items() if members}
    items = tuple(item for task in tasks for item in scores[task].items)
    columns: dict[str, np.ndarray] = {}
    start = 0
    weights = {"mean_of_tasks": np.zeros(len(items)), "family_macro": np.zeros(len(items))}
    for task in tasks:
        here = slice(start, start + len(scores[task].items))
        start = here.stop
        for kind in ("recall", "samples"):
            columns[f"{task} {kind}"] = np.zeros(len(items))
            columns[f"{task} {kind}"][here] = scores[task].columns[kind]
        (family,) = (members for members in families.values() if task in members)
        by = {"mean_of_tasks": len(tasks), "family_macro": len(families) * len(family)}
        for name, parts in by.items():
            weights[name][here] = scores[task].columns["recall"] / (parts * len(scores[task].items))
    columns |= weights

    def mean(_: Any, *sums: Any) -> Any:
        return _mean([sums[2 * i] / sums[2 * i + 1] for i in range(len(tasks))])

    def macro(_: Any, *sums: Any) -> Any:
        share_of = {task: sums[2 * i] / sums[2 * i + 1] for i, task in enumerate(tasks)}
        return _mean([_mean([share_of[task] for task in members]) for members in families.values()])

    needs = tuple(f"{task} {kind}" for task in tasks for kind in ("recall", "samples"))
    return Scores(
        "ruler",
        f"mean of {len(tasks)} of {OF} tasks; macro over {len(families)} of {len(FAMILIES)} families; {next(iter(scores.values())).rule}",
        items,
        columns,
        (
            Metric(
                "mean_of_tasks", "", ("mean_of_tasks", *needs), mean, "higher", **_null(scores, [[t] for t in tasks])
            ),
            Metric(
                "family_macro", "", ("family_macro", *needs), macro, "higher", **_null(scores, [*families.values()])
            ),
        ),
        {"tasks": tasks, "families": families},
    )


def _mean(values: Sequence[Any]) -> Any:
    """Over those that a resample holds: a small one may miss a task."""
    stacked = np.stack([np.asarray(value, dtype=np.float64) for value in values])
    held = np.isfinite(stacked)
    return np.where(held, stacked, 0).sum(0) / held.sum(0)


def _null(scores: Mapping[str, Scores], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    known = [[scores[task].metric("recall").null for task in group] for group in groups]
    if any(value is None for group in known for value in group):
        return {}
    return {"null": float(np.mean([np.mean(group) for group in known])), "null_kind": NULL}  # type: ignore[arg-type]


def answer(model: nn.Module, tokenizer: Any, batch: Sequence[Sample]) -> list[str]:
    """What the model adds to the prompts, greedily, until it ends the text or the room of the largest answer is used."""
    start = around(tokenizer)[0]
    rows = [[*start, *token_ids(tokenizer, sample.prompt)] for sample in batch]
    ids, mask = rows_of(rows, "left", device_of(model))
    most, end = max(sample.generate for sample in batch), special(tokenizer, "eos")
    with evaluating(model):
        added = (
            _greedy(model, ids, mask, most, end)
            if isinstance(model, Decoder)
            else _generate(model, ids, mask, most, end)
        )
    texts = []
    for sample, row in zip(batch, added.tolist(), strict=True):
        row = row[: sample.generate]  # a longer answer of another row in the batch gives this one no more room
        row = row[: row.index(end)] if end in row else row
        texts.append(_decode(tokenizer, row))
    return texts


def _generate(model: Any, ids: Tensor, mask: Tensor, most: int, end: int | None) -> Tensor:
    if not hasattr(model, "generate"):
        raise InputError(f"{type(model).__name__} cannot generate; give a model with a language-modelling head")
    greedy = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
    full = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=most,
        eos_token_id=end,
        pad_token_id=0 if end is None else end,
        **greedy,
    )
    return full[:, ids.shape[1] :]


def _greedy(model: Decoder, ids: Tensor, mask: Tensor, most: int, end: int | None) -> Tensor:
    """The same for our decoder without its shell."""
    cache, added, given = DecoderCache(), [], ids
    for _ in range(most):
        following = model(given, attention_mask=mask, cache=cache, logits_to_keep=1).logits[:, -1].argmax(-1)
        added.append(following)
        if end is not None and bool((torch.stack(added, 1) == end).any(1).all()):
            break
        given, mask = following[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return torch.stack(added, 1)


def _decode(tokenizer: Any, row: list[int]) -> str:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.decode(row)
    return tokenizer.decode(row, skip_special_tokens=True)
