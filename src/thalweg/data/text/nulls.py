"""What a text model must beat to have learned anything: the uniform guess, the unigram model and ``xz``."""

import lzma
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np

DICTIONARY = 8 * 2**20  # of xz -6: it looks no further back, so no more text is given to it


def token_counts(tokens: np.ndarray, vocab_size: int, block: int = 2**24) -> np.ndarray:
    """How often each token occurs, [vocab_size]."""
    counts = np.zeros(vocab_size, np.int64)
    for first in range(0, len(tokens), block):
        counts += np.bincount(tokens[first : first + block], minlength=vocab_size)
    return counts


def unigram_cross_entropy(train: np.ndarray, valid: np.ndarray, vocab_size: int) -> float:
    """Nats per validation token of the train split's unigram model.

    Probabilities are (count + 1/2) / (tokens + vocab_size / 2), the Krichevsky-Trofimov estimate, so that unseen tokens cost a finite
    amount.
    """
    counts = token_counts(train, vocab_size) + 0.5
    held_out = token_counts(valid, vocab_size)
    return float(-(held_out @ np.log(counts / counts.sum())) / held_out.sum())


def xz_rates(train_tail: bytes, valid: bytes) -> dict[str, float]:
    """Bits per byte that ``xz -6`` (LZMA preset 6, container included) spends on ``valid``, the first 8 MiB of it.

    ``xz_bits_per_byte``: on its own. ``xz_after_train_bits_per_byte``: by how much the last 8 MiB of train text grow, packed, when it is
    appended; this is what a model that has seen the train split is fairly compared with.
    """
    train_tail, valid = train_tail[-DICTIONARY:], valid[:DICTIONARY]
    with ThreadPoolExecutor(2) as pool:  # lzma works outside the interpreter's lock
        both, train = pool.map(_packed, (train_tail + valid, train_tail))
    return {
        "xz_bits_per_byte": 8 * _packed(valid) / len(valid),
        "xz_after_train_bits_per_byte": 8 * (both - train) / len(valid),
    }


def _packed(text: bytes) -> int:
    return len(lzma.compress(text, preset=6))


def uniform(vocab_size: int) -> float:
    """Nats per token of a guess that knows nothing, ln V."""
    return math.log(vocab_size)
