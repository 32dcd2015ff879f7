"""Masked tokens: a text task whose tokens are to be filled in, from both sides."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from thalweg.data.fingerprint import digest_of
from thalweg.data.task import IGNORED, Batch, Task
from thalweg.data.text.tokenizer import MASK, JsonTokenizer
from thalweg.errors import InputError

CHOSEN = 0.15  # of the tokens of a sequence, rounded, at least one
MASKED, RANDOM = 0.8, 0.1  # of those: shown as the mask, as another token; the rest as they are
SCHEMA = 1  # raise when the same text and seed would be masked otherwise


class MaskedTask(Task):
    """A text task with 15 % of the tokens of every sequence chosen; of those 80 % are shown as MASK, 10 % as a random token, 10 % as they are.

    Only the chosen tokens are scored, each at its own place. MASK follows the entries of the tokenizer, or is its last one where it was
    handed on by such a task. What is chosen is a function of the seed and the number of the sample (held out: of the number of the
    sequence), so arms with one seed fill in the same gaps.
    Source: Devlin et al. 2019 (arXiv 1810.04805), appendix A.1. Deviations: a window of text is one sequence, without [CLS] and [SEP], and
    any token of it may be chosen, also the end of a text; the random token is drawn from all entries of the tokenizer.
    """

    kind = "text"
    objective = "masked"
    unit = "nats/masked token"

    def __init__(self, text: Task):
        self.text, self.name = text, text.name
        self.tokenizer = None if text.tokenizer is None else text.tokenizer.with_mask()
        self.splits, self.notes = text.splits, text.notes
        self.mask = text.vocab_size if self.tokenizer is None or self.tokenizer.mask is None else self.tokenizer.mask
        self.vocab_size = self.mask + 1
        self.fingerprint = digest_of(
            {"text": text.fingerprint, "chosen": CHOSEN, "masked": MASKED, "random": RANDOM, "schema": SCHEMA}
        )

    @property
    def has_metrics(self) -> bool:
        return True

    def scored(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def portable_tokenizer(self) -> Any:
        if not isinstance(self.tokenizer, JsonTokenizer):
            return None
        return self.tokenizer.portable(mask_token=(MASK, self.mask))

    def nulls(self) -> dict[str, float]:
        """``uniform`` ln V and ``unigram_entropy`` of the validation split, in nats per token, as for the text itself."""
        return {name: value for name, value in self.text.nulls().items() if name in ("uniform", "unigram_entropy")}

    def metrics(self, logits: Float[Tensor, "b t v"], labels: Int[Tensor, "b t"]) -> dict[str, float]:
        """``masked_accuracy``: the share of the chosen tokens that have the largest logit, in [0, 1]."""
        chosen = labels != IGNORED
        return {"masked_accuracy": float((logits.argmax(-1) == labels)[chosen].double().mean())}

    def describe(self) -> dict[str, Any]:
        return {
            **self.text.describe(),
            **super().describe(),
            "objective": self.objective,
            "text": self.text.fingerprint,
        }

    def _order(self, split: str, length: int, seed: int) -> Callable[[range], Batch]:
        draw, where = self.text._order(split, length, seed), self.splits.index(split)
        return lambda samples: self._masked(draw(samples), [[0, where, seed, sample] for sample in samples])

    def _held_out(self, split: str, length: int) -> tuple[int, Callable[[np.ndarray], Batch]]:
        count, draw = self.text._held_out(split, length)
        where = self.splits.index(split)
        return count, lambda chosen: self._masked(draw(chosen), [[1, where, int(number)] for number in chosen])

    def _masked(self, batch: Batch, seeds: list[list[int]]) -> Batch:
        ids = batch["input_ids"]
        shown, labels = ids.clone(), torch.full_like(ids, IGNORED)
        for row, seed in enumerate(seeds):
            rng = np.random.default_rng(seed)
            count = max(1, round(CHOSEN * ids.shape[1]))
            chosen = rng.permutation(ids.shape[1])[:count]
            labels[row, chosen] = ids[row, chosen]
            fate, drawn = rng.random(count), rng.integers(self.mask, size=count)
            shown[row, chosen[fate < MASKED]] = self.mask
            other = (fate >= MASKED) & (fate < MASKED + RANDOM)
            shown[row, chosen[other]] = torch.from_numpy(drawn[other])
        return {"input_ids": shown, "labels": labels}


def with_objective(task: Task, objective: str | None) -> Task:
    """``task`` with what a model is to learn from it. objective: None for its own. Raises: InputError where it cannot be had."""
    if objective is None or objective == task.objective:
        return task
    if objective == "masked" and task.kind == "text":
        return MaskedTask(task)
    allowed = "next_token or masked" if task.kind == "text" else task.objective
    raise InputError(
        f"objective must be {allowed} for {task.name}, got {objective!r}; leave it out, or choose other data"
    )
