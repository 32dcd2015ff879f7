"""Text as a task: windows of a token cache."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from thalweg.data import units
from thalweg.data.fingerprint import digest_of
from thalweg.data.task import Batch, Task, as_batch
from thalweg.data.tasks import Request
from thalweg.data.text import bpe, nulls
from thalweg.data.text.cache import TokenCache, open_cache
from thalweg.data.text.encoding import encode_source
from thalweg.data.text.source import Source, cap_documents
from thalweg.data.text.tokenizer import ByteTokenizer, Tokenizer, read_tokenizer
from thalweg.errors import InputError


class TextTask(Task):
    """Predict the next token of a text.

    Training takes windows without replacement: every epoch has a new offset and a new order of windows that do not overlap. Evaluation
    takes windows that share one token, so that every token but the first is predicted once.
    """

    kind = "text"

    def __init__(self, name: str, cache: TokenCache, split_rule: str):
        self.name = name
        self.cache = cache
        self.tokenizer = cache.tokenizer
        self.vocab_size = cache.meta["vocab_size"]
        self.split_rule = split_rule
        made_of = ("content", "tokenizer", "vocab_size", "tokens")
        self.fingerprint = digest_of({"split": split_rule, **{key: cache.meta[key] for key in made_of}})
        self.notes = (*cache.meta["notes"], *cache.notes)

    def bytes_per_token(self, split: str = "valid") -> float:
        self._check_split(split)
        return self.cache.meta["bytes"][split] / self.cache.meta["tokens"][split]

    def nulls(self) -> dict[str, float]:
        """``uniform`` ln V and ``unigram_entropy`` (of the validation split under the train split's unigram model) in nats per token;
        ``xz_bits_per_byte`` and ``xz_after_train_bits_per_byte`` of the validation text, and both as ``..._nats_per_token``.
        """
        known = self.cache.meta["nulls"]
        size = self.bytes_per_token("valid")
        converted = {
            name.replace("bits_per_byte", "nats_per_token"): units.nats_per_token(value, size)
            for name, value in known.items()
            if name.endswith("bits_per_byte")
        }
        return {"uniform": nulls.uniform(self.vocab_size), **known, **converted}

    def describe(self) -> dict[str, Any]:
        meta = self.cache.meta
        kept = {key: meta[key] for key in ("tokenizer", "content", "documents", "tokens", "bytes")}
        return {**super().describe(), "split_rule": self.split_rule, **kept}

    def _order(self, split: str, length: int, seed: int) -> Callable[[range], Batch]:
        windows = _ShuffledWindows(self._tokens(split, length), length, (seed, self.splits.index(split)))
        return windows.draw

    def _held_out(self, split: str, length: int) -> tuple[int, Callable[[np.ndarray], Batch]]:
        tokens = self._tokens(split, length)
        return (len(tokens) - 1) // (length - 1), lambda chosen: _windows(tokens, chosen * (length - 1), length)

    def _tokens(self, split: str, length: int) -> np.ndarray:
        tokens = self.cache.tokens[split]
        if len(tokens) < length:
            raise InputError(
                f"{self.name}: the {split} split holds {len(tokens)} tokens, less than one sequence of {length}; "
                "shorten the sequence or give more text"
            )
        return tokens


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    return as_batch(tokens[starts[:, None] + np.arange(length)])


class _ShuffledWindows:
    """Sample number -> window: epoch ``g // count`` gives offset and permutation, both from the seed and the epoch alone."""

    def __init__(self, tokens: np.ndarray, length: int, seed: tuple[int, ...]):
        self._tokens, self._length, self._seed = tokens, length, seed
        self._count = max(1, len(tokens) // length - 1)  # one less than fit, which leaves room for the offset
        self._epoch = -1
        self._starts = np.empty(0, np.int64)

    def draw(self, samples: range) -> Batch:
        return _windows(self._tokens, np.array([self._start(sample) for sample in samples]), self._length)

    def _start(self, sample: int) -> int:
        epoch, position = divmod(sample, self._count)
        if epoch != self._epoch:
            rng = np.random.default_rng([*self._seed, epoch])
            offset = rng.integers(len(self._tokens) - self._count * self._length + 1)
            self._starts = offset + self._length * rng.permutation(self._count)
            self._epoch = epoch
        return int(self._starts[position])


@dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer that may still have to be trained; ``identity`` is known before."""

    identity: str
    make: Callable[[Source], Tokenizer]


def choose_tokenizer(request: Request, shipped: Callable[[], Tokenizer] | None = None) -> TokenizerChoice:
    """What ``tokenizer=`` and ``vocab_size=`` ask for; ``shipped`` is the BPE of a corpus that has one. Raises: InputError."""
    wanted, vocab_size = request.tokenizer or "bpe", request.vocab_size
    if wanted == "bpe":
        ready = shipped() if shipped is not None else None
        if ready is not None and vocab_size in (None, ready.vocab_size):
            return TokenizerChoice(ready.digest, lambda _: ready)
        size = vocab_size or bpe.DEFAULT_VOCAB
        bpe.check_vocab(size)
        return TokenizerChoice(
            f"bpe rule {bpe.RULE} vocab {size}", partial(_trained, vocab_size=size, max_tokens=request.max_tokens)
        )
    if wanted == "byte":
        made: Tokenizer = ByteTokenizer()
    else:
        made = read_tokenizer(wanted)
    if vocab_size not in (None, made.vocab_size):
        raise InputError(
            f"vocab_size={vocab_size} is for a BPE that is trained; the tokenizer {str(wanted)!r} has {made.vocab_size}: leave vocab_size out"
        )
    return TokenizerChoice(made.digest, lambda _: made)


def _trained(source: Source, vocab_size: int, max_tokens: int | None) -> Tokenizer:
    train: Iterable[str] = (text for split, text in source.documents() if split == "train")
    enough = bpe.TRAINING_BYTES if max_tokens is None else min(bpe.TRAINING_BYTES, 8 * max_tokens)
    made = bpe.train_bpe(cap_documents(train, enough), vocab_size)
    if made.vocab_size < vocab_size:
        source.notes.append(
            f"the train split has pairs for a vocabulary of {made.vocab_size} only; {vocab_size} was asked for"
        )
    return made


def text_task(source: Source, request: Request, label: str, shipped: Callable[[], Tokenizer] | None = None) -> TextTask:
    """The task of ``source``, from the cache or made now. Raises: InputError."""
    choice = choose_tokenizer(request, shipped)
    making = {
        "source": source.identity,
        "split": source.split_rule,
        "tokenizer": choice.identity,
        "max_bytes": request.max_bytes,
        "max_tokens": request.max_tokens,
    }

    def build(folder: Path) -> dict[str, Any]:
        return encode_source(source, choice.make(source), folder, request.max_tokens)

    cache = open_cache(making, build, request.cache_dir, label)
    return TextTask(request.spec, cache, source.split_rule)
