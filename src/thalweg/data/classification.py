"""Texts with a class each as a task: padded sequences, the share of the majority class beside every accuracy."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import stats
from torch import Tensor

from thalweg.data.fingerprint import digest_of
from thalweg.data.task import Batch, Task
from thalweg.data.text.tokenizer import JsonTokenizer, Tokenizer
from thalweg.errors import InputError

SCHEMA = 1  # raise when the same texts would become other sequences
LEVEL = 0.95  # of the interval of an accuracy
PAD, START = "<|pad|>", "<|start|>"  # what the two further numbers are called where a tokenizer is handed on


@dataclass(frozen=True)
class Labelled:
    """Texts and the number of the class of each, in the order of the source."""

    texts: Sequence[str]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.texts)


class ClassificationTask(Task):
    """Which of ``class_names`` a text is of.

    A sequence is ``[START] tokens [PAD] ...``, cut behind ``length`` tokens; START and PAD follow the entries of the tokenizer, or are
    its last ones where it was handed on by such a task. Training shuffles all texts of every epoch; held-out splits are always evaluated as a
    whole. ``test`` is not looked at in training.

    Raises: InputError for a split or a text that is empty, a class that the train split does not have, and texts that are all the same.
    """

    kind = "classification"
    objective = "classification"
    unit = "nats/sequence"

    def __init__(
        self,
        name: str,
        splits: Mapping[str, Labelled],
        class_names: Sequence[str],
        tokenizer: Tokenizer,
        split_rule: str,
        notes: Sequence[str] = (),
    ):
        self.name, self.split_rule, self.tokenizer = name, split_rule, tokenizer
        self.splits, self.class_names, self.classes = tuple(splits), tuple(class_names), len(class_names)
        check_texts(name, splits, class_names)
        self.pad = tokenizer.vocab_size - (2 if tokenizer.ends_with(PAD, START) else 0)
        self.start, self.vocab_size = self.pad + 1, self.pad + 2
        self.labels = {split: np.asarray(part.labels, np.int64) for split, part in splits.items()}
        self.tokens = {split: self._tokens(split, part.texts) for split, part in splits.items()}
        self.fingerprint = digest_of(
            {
                "schema": SCHEMA,
                "split": split_rule,
                "classes": list(class_names),
                "tokenizer": tokenizer.digest,
                "content": {split: _digest(part) for split, part in splits.items()},
            }
        )
        self.notes = (*notes, *(self._counted(split) for split in self.splits))

    def _tokens(self, split: str, texts: Sequence[str]) -> list[np.ndarray]:
        found = self.tokenizer.encode_texts(texts) if self.tokenizer is not None else [[]] * len(texts)
        for number, ids in enumerate(found):
            if not ids:
                raise InputError(
                    f"{self.name}: the tokenizer makes no token of text {number} of the {split} split; give another"
                )
        return [np.array([self.start, *ids], np.int64) for ids in found]

    def _counted(self, split: str) -> str:
        counts = self.counts(split)
        total = sum(counts.values())
        classes = ", ".join(f"{count} {name}" for name, count in counts.items())
        return (
            f"{split}: {total} texts ({classes}); the majority class of training is {self._majority_share(split):.1%}"
        )

    def counts(self, split: str) -> dict[str, int]:
        """Texts of each class."""
        self._check_split(split)
        return dict(
            zip(
                self.class_names, np.bincount(self.labels[split], minlength=len(self.class_names)).tolist(), strict=True
            )
        )

    def _majority_share(self, split: str) -> float:
        return float((self.labels[split] == np.bincount(self.labels["train"]).argmax()).mean())

    @property
    def watched(self) -> tuple[str, ...]:
        return ("valid",)

    @property
    def evaluated_whole(self) -> bool:
        return True

    @property
    def has_metrics(self) -> bool:
        return True

    def scored(self, batch: Batch) -> int:
        return len(batch["labels"])

    def nulls(self) -> dict[str, float]:
        """``uniform`` ln C and ``chance``, both in nats per sequence: the cross-entropy of the validation classes under their shares in
        training; ``majority_accuracy``: the share of the validation split that is of the majority class of training.
        """
        return self.nulls_of("valid")

    def nulls_of(self, split: str) -> dict[str, float]:
        self._check_split(split)
        shares = np.bincount(self.labels["train"], minlength=len(self.class_names)) / len(self.labels["train"])
        return {
            "uniform": float(np.log(len(self.class_names))),
            "chance": float(-np.log(shares[self.labels[split]]).mean()),
            "majority_accuracy": self._majority_share(split),
        }

    def metrics(self, logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> dict[str, float]:
        """``accuracy``: the share of texts whose class has the largest logit, in [0, 1]."""
        return {"accuracy": float((logits.argmax(-1) == labels).double().mean())}

    def summary(self, shares: dict[str, float], sequences: int) -> dict[str, float]:
        """``accuracy`` with its 95 % Wilson interval, ``accuracy_low`` and ``accuracy_high``.

        Source: Wilson 1927, Probable inference, the law of succession, and statistical inference.
        """
        low, high = wilson(round(shares["accuracy"] * sequences), sequences)
        return {**shares, "accuracy_low": low, "accuracy_high": high}

    def notes_at(self, length: int) -> tuple[str, ...]:
        """Also how many texts are cut at ``length`` tokens, and how much of the sequences is padding."""
        parts = []
        for split in self.splits:
            sizes = self._sizes[split]
            padding = 1 - np.minimum(sizes, length).mean() / length
            parts.append(f"{split} {int((sizes > length).sum())} of {len(sizes)} cut, {padding:.0%} padding")
        return (*self.notes, f"sequences of {length} tokens, the first ones of a text: {'; '.join(parts)}")

    def unpadded(self, split: str, length: int, count: int) -> Batch:
        """About ``count`` texts that are no shorter than half of all, cut to that length."""
        self._check_split(split)
        length = min(self._check_length(split, length), max(2, int(np.median(self._sizes[split]))))
        long = np.nonzero(self._sizes[split] >= length)[0]
        count = min(count, len(long))
        batch = self._batch(split, long[np.arange(count) * len(long) // count], length)
        del batch["attention_mask"]  # nothing is padded
        return batch

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "split_rule": self.split_rule,
            "tokenizer": self.tokenizer.digest if self.tokenizer is not None else None,
            "classes": {split: self.counts(split) for split in self.splits},
            "majority": {split: self._majority_share(split) for split in self.splits},
        }

    def portable_tokenizer(self) -> Any:
        """A fast tokenizer of transformers that gives the very numbers of this task: it puts the start before every text, and can pad.

        None where the tokens are not of a tokenizer of ours.
        """
        if not isinstance(self.tokenizer, JsonTokenizer):
            return None
        from tokenizers.processors import TemplateProcessing

        found = self.tokenizer.portable(pad_token=(PAD, self.pad), bos_token=(START, self.start))
        if found is not None:
            found.backend_tokenizer.post_processor = TemplateProcessing(
                single=f"{START} $A", special_tokens=[(START, self.start)]
            )
        return found

    def portable_settings(self) -> dict[str, Any]:
        names = dict(enumerate(self.class_names))
        numbers = {name: i for i, name in names.items()}
        return {"id2label": names, "label2id": numbers, "pad_token_id": self.pad, "bos_token_id": self.start}

    @cached_property
    def _sizes(self) -> dict[str, np.ndarray]:
        return {split: np.array([len(ids) for ids in tokens]) for split, tokens in self.tokens.items()}

    def _order(self, split: str, length: int, seed: int) -> Callable[[range], Batch]:
        order = _ShuffledTexts(len(self.labels[split]), (seed, self.splits.index(split)))
        return lambda samples: self._batch(split, order.chosen(samples), length)

    def _held_out(self, split: str, length: int) -> tuple[int, Callable[[np.ndarray], Batch]]:
        return len(self.labels[split]), lambda chosen: self._batch(split, chosen, length)

    def _batch(self, split: str, chosen: np.ndarray, length: int) -> Batch:
        ids = np.full((len(chosen), length), self.pad, np.int64)
        for row, number in enumerate(chosen):
            tokens = self.tokens[split][number][:length]
            ids[row, : len(tokens)] = tokens
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy((ids != self.pad).astype(np.int64)),
            "labels": torch.from_numpy(self.labels[split][chosen]),
        }


class _ShuffledTexts:
    """Sample number -> text: epoch ``g // count`` gives the permutation, from the seed and the epoch alone."""

    def __init__(self, count: int, seed: tuple[int, ...]):
        self._count, self._seed = count, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def chosen(self, samples: range) -> np.ndarray:
        return np.array([self._one(sample) for sample in samples], np.int64)

    def _one(self, sample: int) -> int:
        epoch, position = divmod(sample, self._count)
        if epoch != self._epoch:
            self._order = np.random.default_rng([*self._seed, epoch]).permutation(self._count)
            self._epoch = epoch
        return int(self._order[position])


def wilson(right: int, count: int, level: float = LEVEL) -> tuple[float, float]:
    """The Wilson score interval of a share: (low, high) in [0, 1]. Source: Wilson 1927, J. Am. Stat. Assoc. 22, 209-212."""
    found = stats.binomtest(right, count).proportion_ci(confidence_level=level, method="wilson")
    return float(found.low), float(found.high)


def check_texts(name: str, splits: Mapping[str, Labelled], class_names: Sequence[str]) -> None:
    """Raises: InputError, in one line, for what cannot be learned or scored."""
    known = range(len(class_names))
    for split, part in splits.items():
        if len(part.texts) != len(part.labels):
            raise InputError(
                f"{name}: the {split} split has {len(part.texts)} texts and {len(part.labels)} labels; give one each"
            )
        if not len(part):
            raise InputError(f"{name}: the {split} split holds no text; give more")
        for number, (text, label) in enumerate(zip(part.texts, part.labels, strict=True)):
            if text is None:
                raise InputError(
                    f"{name}: text {number} of the {split} split is missing (tables read an empty cell, and words such as null or NA, as "
                    "missing); leave it out, or quote it in .jsonl"
                )
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"{name}: text {number} of the {split} split is empty; leave it out")
            if label not in known:
                raise InputError(
                    f"{name}: text {number} of the {split} split has label {label!r}, allowed are 0..{len(known) - 1}"
                )
    train = splits.get("train")
    if train is None or "valid" not in splits:
        raise InputError(f"{name} needs the splits train and valid, got {', '.join(splits) or 'none'}")
    found = sorted(set(train.labels))
    if len(found) < 2:
        raise InputError(
            f"{name}: the train split holds one class only ({class_names[found[0]]}); there is nothing to tell apart"
        )
    for split, part in splits.items():
        if new := sorted(set(part.labels) - set(found)):
            raise InputError(
                f"{name}: the train split lacks class {class_names[new[0]]!r} of the {split} split; it cannot be learned"
            )
    if len(set(train.texts)) == 1:
        raise InputError(
            f"{name}: all {len(train)} texts of the train split are the same; there is nothing to tell classes by"
        )


def _digest(part: Labelled) -> str:
    digest = hashlib.sha256()
    for text, label in zip(part.texts, part.labels, strict=True):
        digest.update(f"{label}\t{text}\0".encode())
    return digest.hexdigest()
