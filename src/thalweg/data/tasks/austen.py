"""Jane Austen's six novels, shipped with the package: five to train on, Persuasion held out."""

import hashlib
import lzma
from functools import cache
from importlib import resources

from thalweg.data.tasks import Request, register
from thalweg.data.text.bpe import train_bpe
from thalweg.data.text.source import TextSource, cap_documents
from thalweg.data.text.task import TextTask, text_task
from thalweg.data.text.tokenizer import JsonTokenizer
from thalweg.errors import InputError

# Where each novel begins in the unpacked corpus, in bytes; the next one begins two newlines after its end.
STARTS = {
    "Emma": 0,
    "Mansfield Park": 863143,
    "Northanger Abbey": 1733770,
    "Persuasion": 2153568,
    "Pride and Prejudice": 2612631,
    "Sense and Sensibility": 3277615,
}
HELD_OUT = "Persuasion"
TEXT_SHA256 = "1bcd69344010ff80c8219a2cadbf3bcdf8a2ae7c8d91a76f754fd0b17906d2b8"
# What xz -6 spends on Persuasion, kept because it takes seconds; a test computes it anew.
XZ = {"xz_bits_per_byte": 2.3683127078972075, "xz_after_train_bits_per_byte": 2.0300221539185426}
# Small CPU models: at 2,048 entries a width of 64 spends 0.13 M parameters and 0.26 MFLOP a token on the vocabulary, and half of
# the entries occur over 170 times in training; 4,096 would double the first, leave 50 of the second and save 12 % of the tokens.
VOCAB_SIZE = 2048
TOKENIZER_FILE = "austen-bpe-2048.json"
_CORPUS = resources.files("thalweg.data") / "corpus"


@cache
def novels() -> dict[str, str]:
    """Title -> text, in the order of the file. Raises: InputError where the installed file is damaged."""
    try:
        text = lzma.decompress((_CORPUS / "austen.txt.xz").read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise InputError(f"the shipped corpus cannot be read ({error}); install thalweg anew") from error
    if hashlib.sha256(text).hexdigest() != TEXT_SHA256:
        raise InputError(
            "the shipped corpus was changed; install thalweg anew, or use text:FILE for a text of your own"
        )
    ends = [*list(STARTS.values())[1:], len(text) + 2]
    return {title: text[start : end - 2].decode() for (title, start), end in zip(STARTS.items(), ends, strict=True)}


def training_novels() -> dict[str, str]:
    """Title -> text of the novels that are not held out."""
    return {title: text for title, text in novels().items() if title != HELD_OUT}


@cache
def shipped_tokenizer() -> JsonTokenizer:
    """The BPE trained on the five train novels."""
    return JsonTokenizer((_CORPUS / TOKENIZER_FILE).read_text(encoding="utf-8"), "austen-bpe", by_lines=True)


def train_shipped_tokenizer() -> str:
    """The text of ``corpus/austen-bpe-2048.json``, made anew; equal to the file."""
    return train_bpe(training_novels().values(), VOCAB_SIZE).library_json()


@register(
    "austen",
    summary="six novels, shipped; Persuasion is the validation split",
    source="Jane Austen, 1811-1818, as in the R package janeaustenr; public domain",
)
def austen(rest: str, request: Request) -> TextTask:
    """Next-token prediction on five novels (3.5 MB), validated on the sixth (0.46 MB): no paragraph is shared."""
    if rest:
        raise InputError(f"austen takes no parameters, got {rest!r}")
    source = TextSource(
        name="austen",
        identity=f"austen {TEXT_SHA256}",
        split_rule=f"by novel; validation: {HELD_OUT}",
        splits={
            "train": list(cap_documents(training_novels().values(), request.max_bytes)),
            "valid": list(cap_documents([novels()[HELD_OUT]], request.max_bytes)),
        },
        known_xz=XZ if request.max_bytes is None else None,
    )
    return text_task(source, request, "austen", shipped_tokenizer)
