"""Byte-level BPE trained on the train split only."""

from collections.abc import Iterable

from thalweg.data.text.source import lines
from thalweg.data.text.tokenizer import BYTE_VOCAB, END_OF_TEXT, JsonTokenizer
from thalweg.errors import InputError

DEFAULT_VOCAB = 4096
TRAINING_BYTES = 64_000_000  # more text no longer moves the merges of vocabularies this small
RULE = 1  # raise when the training below changes


def check_vocab(vocab_size: int) -> None:
    """Raises: InputError for a vocabulary that does not hold the bytes."""
    if vocab_size < BYTE_VOCAB:
        raise InputError(
            f"a byte-level BPE needs vocab_size of at least {BYTE_VOCAB} (256 bytes and the end of a text), got {vocab_size}"
        )


def train_bpe(texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB, name: str = "bpe") -> JsonTokenizer:
    """A byte-level BPE (GPT-2's pre-tokenisation) with at most ``vocab_size`` entries; fewer where the text has no more pairs.

    Deterministic: the same texts give the same file, whatever the number of threads.
    Source: Sennrich et al. 2016 (arXiv 1508.07909); bytes as in Radford et al. 2019.
    """
    check_vocab(vocab_size)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((line for text in texts for line in lines(text)), trainer)
    return JsonTokenizer(tokenizer.to_str(), name, by_lines=True)
