"""What every task offers: batches to train on, fixed batches to evaluate on, and the nulls that a result is shown with."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from thalweg.data.sampler import Sampler
from thalweg.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from thalweg.data.text.tokenizer import Tokenizer

Batch = dict[str, Tensor]
Objective = Literal["next_token", "masked", "classification"]
IGNORED = -100  # label of a position that is not scored, as torch's cross-entropy and Hugging Face have it


def scored_tokens(labels: Int[Tensor, "b t"]) -> int:
    """How many predictions a batch scores: labels other than -100, the first position left out because nothing precedes it."""
    return int((labels[:, 1:] != IGNORED).sum())


def next_token_accuracy(logits: Float[Tensor, "b t v"], labels: Int[Tensor, "b t"]) -> dict[str, float]:
    """Shares of scored tokens (``token_accuracy``) and of sequences without a fault (``exact_match``), in [0, 1].

    logits[:, i] predicts labels[:, i + 1]; sequences without a scored token do not count.
    """
    wanted = labels[:, 1:]
    scored = wanted != IGNORED
    right = (logits[:, :-1].argmax(-1) == wanted) & scored
    used = scored.any(-1)
    if not bool(used.any()):
        raise InputError("these labels score no token: nothing to measure")
    exact = (right.sum(-1) == scored.sum(-1))[used]
    return {"token_accuracy": float(right.sum() / scored.sum()), "exact_match": float(exact.float().mean())}


class EvalBatches(Sequence[Batch]):
    """A fixed list of batches that are made when they are asked for; item ``i`` is always the same."""

    def __init__(self, draw: Callable[[np.ndarray], Batch], chosen: np.ndarray, batch: int):
        self._draw, self._chosen, self._batch = draw, chosen, batch

    def __len__(self) -> int:
        return -(-len(self._chosen) // self._batch)

    @overload
    def __getitem__(self, i: int) -> Batch: ...
    @overload
    def __getitem__(self, i: slice) -> list[Batch]: ...
    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        first = (i % len(self)) * self._batch
        return self._draw(self._chosen[first : first + self._batch])


class Task(ABC):
    """A source of sequences with a train split, held-out splits and its nulls.

    Batches are ``{"input_ids": int64 [b t], "labels": int64 [b t]}``; labels are aligned with input_ids (the model shifts), -100 is not
    scored. Where ``objective`` is ``masked`` they stand where the model answers (nothing is shifted); where it is ``classification`` they are
    int64 [b], one of ``classes``. Where sequences are padded there is an ``attention_mask`` int64 [b t] too, 1 for a real token: all that a
    batch holds is what the model is called with. unit: of the loss. ``fingerprint`` is a hash of all that the sequences depend on; arms with
    equal fingerprints may be compared. ``notes`` are the deviations that a record must carry.
    """

    name: str
    kind: Literal["text", "synthetic", "classification"]
    objective: Objective = "next_token"
    unit: str = "nats/token"
    classes: int | None = None
    vocab_size: int
    fingerprint: str
    splits: tuple[str, ...] = ("train", "valid")
    notes: tuple[str, ...] = ()
    tokenizer: "Tokenizer | None" = None

    @property
    def watched(self) -> tuple[str, ...]:
        """The held-out splits that training looks at."""
        return tuple(split for split in self.splits if split != "train")

    @property
    def evaluated_whole(self) -> bool:
        """Whether a held-out split is so small that it is always evaluated as a whole."""
        return False

    @property
    def has_metrics(self) -> bool:
        """Whether :meth:`metrics` says more than the loss does."""
        return self.kind == "synthetic"

    def scored(self, batch: Batch) -> int:
        """How many predictions a batch scores: the weight of its mean loss."""
        return scored_tokens(batch["labels"])

    def summary(self, shares: dict[str, float], sequences: int) -> dict[str, float]:
        """What is recorded of the mean :meth:`metrics` over ``sequences`` held-out sequences."""
        return shares

    def notes_at(self, length: int) -> tuple[str, ...]:
        """``notes``, and what follows from sequences of ``length`` tokens."""
        return self.notes

    def unpadded(self, split: str, length: int, count: int) -> Batch:
        """About ``count`` sequences of one length without padding, up to ``length`` tokens, the same for every arm: for the geometry."""
        return self.eval_batches(split, length, count, 1)[0]

    def portable_tokenizer(self) -> Any:
        """A fast tokenizer of transformers with the special tokens of this task, to stand beside a model; None where there is none to make."""
        return None

    def saved_tokenizer(self) -> Any:
        """What is written beside a model of this task: the portable tokenizer, or the task's own where there is none to make."""
        return self.portable_tokenizer() or self.tokenizer

    def portable_settings(self) -> dict[str, Any]:
        """What the configuration of a model in transformers holds of this task: names of classes, the start and the padding."""
        return {}

    def natural_length(self, split: str = "train") -> int | None:
        """Tokens of the longest sequence of a synthetic task; None for text, which can be cut to any length."""
        self._check_split(split)
        return None

    def sampler(
        self,
        split: str = "train",
        length: int | None = None,
        batch: int = 1,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> Sampler:
        """Endless batches of ``length`` tokens; ``batch`` counts sequences over all ranks.

        length may be left out where :meth:`natural_length` gives one. Raises: InputError, UnknownNameError.
        """
        self._check_split(split)
        length = self._check_length(split, length)
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise InputError(f"seed must be a whole number of at least 0, got {seed!r}")
        identity = {"task": self.fingerprint, "split": split, "length": length, "seed": seed}
        return Sampler(self._order(split, length, seed), identity=identity, batch=batch, rank=rank, world=world)

    def eval_batches(
        self, split: str = "valid", length: int | None = None, batch: int = 1, max_batches: int | None = None
    ) -> EvalBatches:
        """The same batches for every arm, spread evenly over ``split``.

        With ``max_batches`` only full batches (if the split holds one); without it every sequence once, so the last batch may be smaller:
        weigh by :func:`scored_tokens`. Raises: InputError, UnknownNameError.
        """
        self._check_split(split)
        length = self._check_length(split, length)
        for what, value in (("batch", batch), ("max_batches", max_batches)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(f"{what} must be a whole number of at least 1, got {value!r}")
        count, draw = self._held_out(split, length)
        wanted = count if max_batches is None or count <= batch else min(max_batches, count // batch) * batch
        return EvalBatches(draw, np.arange(wanted) * count // wanted, batch)

    @abstractmethod
    def nulls(self) -> dict[str, float]:
        """What no model, or a model that learned nothing, reaches; the unit is in each task's text."""

    def nulls_of(self, split: str) -> dict[str, float]:
        """The same of one held-out split, as far as they are of it; empty where they are not."""
        self._check_split(split)
        return self.nulls() if split == "valid" else {}

    def bytes_per_token(self, split: str = "valid") -> float | None:
        """UTF-8 bytes of text per token; None for a synthetic task."""
        self._check_split(split)
        return None

    def metrics(self, logits: Float[Tensor, "b t v"], labels: Int[Tensor, "b t"]) -> dict[str, float]:
        """Shares in [0, 1] of one batch."""
        return next_token_accuracy(logits, labels)

    def describe(self) -> dict[str, Any]:
        """Plain values for the record of a run."""
        return {
            "name": self.name,
            "kind": self.kind,
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            "notes": list(self.notes),
        }

    @abstractmethod
    def _order(self, split: str, length: int, seed: int) -> Callable[[range], Batch]:
        """Sample numbers -> batch, for training."""

    @abstractmethod
    def _held_out(self, split: str, length: int) -> tuple[int, Callable[[np.ndarray], Batch]]:
        """How many sequences there are to evaluate on, and the function from their indices to a batch."""

    def _check_split(self, split: str) -> None:
        if split not in self.splits:
            raise UnknownNameError("split", split, self.splits)

    def _check_length(self, split: str, length: int | None) -> int:
        natural = self.natural_length(split)
        if length is None:
            if natural is None:
                raise InputError(f"{self.name} can be cut to any length; give length (tokens per sequence)")
            return natural
        if not isinstance(length, int) or isinstance(length, bool) or length < 2:
            why = " (the first token predicts the second)" if self.objective == "next_token" else ""
            raise InputError(f"length must be a whole number of at least 2{why}, got {length!r}")
        if natural is not None and length < natural:
            raise InputError(
                f"{self.name} needs sequences of {natural} tokens in split {split!r}, got length={length}; raise the length"
            )
        return length


def as_batch(ids: np.ndarray, labels: np.ndarray | None = None) -> Batch:
    """NumPy integers [b t] as a batch; without labels every token is scored."""
    input_ids = torch.from_numpy(ids.astype(np.int64))
    return {
        "input_ids": input_ids,
        "labels": input_ids.clone() if labels is None else torch.from_numpy(labels.astype(np.int64)),
    }
