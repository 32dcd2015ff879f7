"""Needle prompts as tokens, with the place of the needle's value in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.data.text.tokenizer import token_ids
from thalweg.errors import InputError
from thalweg.evaluation.ruler import Sample
from thalweg.evaluation.subjects import around


@dataclass(frozen=True)
class Needle:
    """ids [1 t]: of a prompt whose next tokens are the answer; its tokens start .. end - 1 hold that answer in the haystack."""

    ids: Tensor
    start: int
    end: int


def needles_of(samples: Sequence[Sample], tokenizer: Any, vocabulary: int | None) -> Iterator[Needle]:
    """The prompts of a needle task, tokenised whole, special tokens of the tokenizer in front.

    The needle's tokens are those whose text ends after the answer begins and begins before it ends: found by tokenising the prompt up to both
    places, so any tokenizer will do. Raises: InputError for a prompt without its answer, or an id that the model does not have.
    """
    front = around(tokenizer)[0]
    for sample in samples:
        answer = sample.answers[0]
        at = sample.prompt.find(answer)
        if at < 0:
            raise InputError(f"sample {sample.index} of {sample.task} does not hold its answer {answer!r}")
        ids = token_ids(tokenizer, sample.prompt)
        start = _shared(token_ids(tokenizer, sample.prompt[:at].rstrip()), ids)
        end = _shared(token_ids(tokenizer, sample.prompt[: at + len(answer)]), ids)
        whole = [*front, *ids]
        if vocabulary is not None and max(whole) >= vocabulary:
            raise InputError(
                f"the tokenizer gives id {max(whole)}, the model has {vocabulary} tokens; give its own tokenizer"
            )
        yield Needle(torch.tensor([whole]), len(front) + start, len(front) + max(end, start + 1))


def _shared(part: Sequence[int], whole: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    count = 0
    for a, b in zip(part, whole, strict=False):
        if a != b:
            break
        count += 1
    return count
