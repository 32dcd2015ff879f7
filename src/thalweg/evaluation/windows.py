"""How a text that is longer than a model's reach is cut into windows, so that every token is scored once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thalweg.errors import InputError

WIDEST = 2048  # tokens of a window when nobody asks for another: what a CPU holds the logits of


class Window(NamedTuple):
    """``inputs`` are read; the logits at their last ``len(targets)`` places are scored against ``targets``."""

    inputs: list[int]
    targets: list[int]


@dataclass(frozen=True)
class Windows:
    """The rule: ``length`` tokens are scored by the first window and read by every one.

    stride: by how many tokens a window moves, which are the ones that it scores; None: by its length, the disjoint windows of lm-eval's
    ``loglikelihood_rolling``. Every later window is full: it begins with the last token of the one before, or earlier where windows overlap,
    and the last one reaches back as far as it must. prefix: token put before the text (lm-eval: BOS, else EOS); None: none, and then the
    first token of a text is not scored.
    Raises: InputError for a length below 2 or a stride outside 1..length.
    """

    length: int
    stride: int | None = None
    prefix: int | None = None

    def __post_init__(self) -> None:
        if self.length < 2:
            raise InputError(f"a window needs at least 2 tokens, got {self.length}")
        if self.stride is not None and not 1 <= self.stride <= self.length:
            raise InputError(f"the stride must lie in 1..{self.length} (the window), got {self.stride}")

    @property
    def words(self) -> str:
        """The rule in words, for every record of a number that depends on it."""
        how = "disjoint windows" if self.stride is None else f"windows moved by {self.stride}"
        start = "first token not scored" if self.prefix is None else f"first token scored after token {self.prefix}"
        return f"{how} of {self.length} tokens, {start}"

    def cut(self, ids: Sequence[int]) -> Iterator[Window]:
        """The windows of one text. A text shorter than the window is one window of its own length."""
        ids = list(ids)
        if self.prefix is not None:
            ids = [self.prefix, *ids]
        # From here on ids[0] is read and never scored.
        end = min(self.length + 1, len(ids))
        if end > 1:
            yield Window(ids[: end - 1], ids[1:end])
        done = end
        while done < len(ids):
            end = min(done + (self.stride or self.length), len(ids))
            yield Window(ids[end - 1 - self.length : end - 1], ids[done:end])  # always full: the last one reaches back
            done = end
