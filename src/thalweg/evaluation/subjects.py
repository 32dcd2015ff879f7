"""What a model and its tokenizer must be before anything is evaluated; each slip is one line."""

from typing import Any

import torch
from torch import nn

from thalweg.capture.evaluating import evaluating
from thalweg.capture.limits import vocabulary_of
from thalweg.data.text.tokenizer import Tokenizer, token_ids
from thalweg.errors import InputError
from thalweg.evaluation.scoring import device_of, logits_of

TRIED = 8  # tokens of the rows on which causality is tried
ROUNDING = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
}  # by which logits may differ, in their own spread; 2e-2 in half precision


def check_tokenizer(tokenizer: Any) -> None:
    """Raises: InputError where there is none."""
    if tokenizer is None:
        raise InputError(
            "this model has no tokenizer beside it, and a text cannot be evaluated without; give tokenizer= or a folder that holds one"
        )


def ids_of(tokenizer: Any, text: str, vocabulary: int | None, what: str = "the text") -> list[int]:
    """Token ids of a text, none of them special.

    Raises: InputError where there are none, or for one that the model does not have.
    """
    ids = token_ids(tokenizer, text)
    if not ids:
        raise InputError(f"{what} holds no token; give text")
    if vocabulary is not None and max(ids) >= vocabulary:
        raise InputError(
            f"the tokenizer gives id {max(ids)}, the model has {vocabulary} tokens; give the tokenizer that it was trained with"
        )
    return ids


def special(tokenizer: Any, *names: str) -> int | None:
    """The id of the first special token of these names (``bos``, ``eos``, ``mask`` ...) that a tokenizer has."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.end_of_text if {"bos", "eos"} & set(names) else tokenizer.mask if "mask" in names else None
    found = (getattr(tokenizer, f"{name}_token_id", None) for name in names)
    return next((i for i in found if i is not None), None)


def is_causal(model: nn.Module) -> bool:
    """Whether no place of the logits sees a later token: tried on two rows that differ in their last token, not read from a name.

    Raises: InputError for a model without logits.
    """
    size = min(vocabulary_of(model) or 2, 1000)
    rows = (torch.arange(TRIED) * 7 % size).repeat(2, 1)
    rows[1, -1] = (rows[0, -1] + max(1, size // 2)) % size
    with evaluating(model):
        logits = logits_of(model, rows.to(device_of(model)))
    if not bool(logits.isfinite().all()):
        raise InputError(
            f"{type(model).__name__} gives logits that are not finite on {TRIED} tokens; look for NaN in its weights, or use a wider dtype"
        )
    before = logits[:, :-1].double()
    return bool((before[0] - before[1]).abs().max() <= ROUNDING.get(logits.dtype, 2e-2) * before.std())


def witness(model: nn.Module) -> float:
    """The mean size of what the model gives on a few tokens: another model of the same name gives another number."""
    size = min(vocabulary_of(model) or 2, 1000)
    ids = (torch.arange(TRIED) * 7 % size)[None].to(device_of(model))
    with evaluating(model):
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    found = getattr(out, "logits", None)
    return float((out[0] if found is None else found).double().abs().mean())


def check_causal(model: nn.Module) -> None:
    """Raises: InputError for an encoder, whose likelihood of a text is not the product of its predictions."""
    if not is_causal(model):
        raise InputError(
            f"{type(model).__name__} is an encoder: its tokens see what follows, so it has no perplexity; "
            "evaluate it by its masked loss or its embeddings"
        )


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and after a text of its own accord; ours put none.

    Raises: InputError where they cannot be told apart from the text's own.
    """
    if isinstance(tokenizer, Tokenizer):
        return [], []
    plain, full = token_ids(tokenizer, "a"), [int(i) for i in tokenizer.encode("a")]
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    raise InputError("the tokenizer changes a text when it adds its special tokens, so windows cannot be made with it")
