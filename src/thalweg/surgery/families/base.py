"""What a family says: which of our configurations spells its own, and where each of our parameters is found in its weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thalweg.errors import InputError
from thalweg.models import DecoderConfig
from thalweg.models.rotary import RotaryScaling

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Piece:
    """One of our parameters: its name, the name of theirs, and what is done to theirs on the way (None: nothing)."""

    ours: str
    theirs: str
    change: Change | None = None


class Family:
    """One family; subclass it, once per file. ``theirs`` is a model of transformers, read and never changed."""

    def config(self, theirs: Any) -> DecoderConfig:
        """Our configuration of the same function, with the additive connection. Raises: InputError for what cannot be spelled."""
        raise NotImplementedError(f"{type(self).__name__} gives no configuration")

    def pieces(self, theirs: Any, config: DecoderConfig) -> Iterator[Piece]:
        """Where each of our parameters comes from."""
        raise NotImplementedError(f"{type(self).__name__} maps no weights")


def refuse(what: str, got: object, allowed: str) -> InputError:
    """The error for a part that our decoder does not have."""
    return InputError(f"the model has {what} {got!r}, which our decoder has not; {allowed}")


def only(theirs: Any, **wanted: Any) -> None:
    """Raises: InputError for the first field of their configuration that differs from the one value that can be spelled."""
    for name, value in wanted.items():
        got = getattr(theirs, name, value)
        if got != value:
            raise refuse(name, got, f"only {value!r} can be converted")


def rotary(parameters: dict[str, Any]) -> tuple[float, RotaryScaling | None]:
    """Base and scaling of their ``rope_parameters``. Raises: InputError for a rule that our decoder has not."""
    kind = parameters.get("rope_type", "default")
    base, share = float(parameters["rope_theta"]), parameters.get("partial_rotary_factor", 1.0)
    if share not in (None, 1.0):
        raise refuse("partial_rotary_factor", share, "heads are rotated as a whole")
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, RotaryScaling("linear", float(parameters["factor"]))
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        length = int(parameters["original_max_position_embeddings"])
        return base, RotaryScaling("llama3", float(parameters["factor"]), low, high, length)
    raise refuse("rope_type", kind, "default, linear and llama3 can be converted")


def windows(theirs: Any) -> tuple[int, ...]:
    """The window of every layer, 0 for none; empty where no layer has one."""
    kinds, size = getattr(theirs, "layer_types", None), getattr(theirs, "sliding_window", None)
    if kinds is None:  # one window for all layers
        return (int(size),) * theirs.num_hidden_layers if size else ()
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention") or (kind == "sliding_attention" and not size):
            raise refuse(
                "layer type", kind, "full_attention, and sliding_attention with a sliding_window, can be converted"
            )
    found = tuple(int(size or 0) if kind == "sliding_attention" else 0 for kind in kinds)
    return found if any(found) else ()
