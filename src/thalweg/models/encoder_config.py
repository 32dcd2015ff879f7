"""What an encoder is: the fields of a decoder, and what it predicts."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from thalweg.errors import InputError
from thalweg.models.config import DecoderConfig


@dataclass(frozen=True)
class EncoderConfig(DecoderConfig):
    """A transformer whose tokens see each other in both directions, with a head on top.

    All fields of :class:`thalweg.models.DecoderConfig`; a window of w tokens reaches w - 1 tokens to both sides. objective: what the head
    predicts, the ``classification`` of a sequence or the tokens that were ``masked``. classes: how many, of a classification. pooling: what
    is classified of what the stream left, over the real tokens: their ``mean``, the ``first`` one, or the ``max`` of each entry. The head of
    a classification is a map of its own with a bias, so that ``tie_embeddings`` says nothing there.

    Raises: InputError or UnknownNameError with one line for the first value that is not allowed.
    """

    causal: ClassVar[bool] = False

    objective: Literal["classification", "masked"] = "classification"
    classes: int | None = None
    pooling: Literal["mean", "first", "max"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classifies:
            if self.classes is None or self.classes < 2:
                raise InputError(
                    f"classes must be at least 2 for a classification, got {self.classes}; give their number, or objective 'masked'"
                )
        elif self.classes is not None or self.pooling != "mean":
            name, value = ("classes", self.classes) if self.classes is not None else ("pooling", self.pooling)
            raise InputError(
                f"{name} belongs to objective 'classification', got {value!r} with objective {self.objective!r}; leave it out"
            )

    @property
    def classifies(self) -> bool:
        """Whether a sequence as a whole is scored, and not its tokens."""
        return self.objective == "classification"

    @property
    def head_parameters(self) -> int:
        return (self.classes or 0) * (self.width + 1) if self.classifies else super().head_parameters

    def head_flops(self, length: int) -> float:
        return 2.0 * (self.classes or 0) * self.width / length if self.classifies else super().head_flops(length)
