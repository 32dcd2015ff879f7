"""Where a conversion starts: a model of transformers or one of ours, from memory, a folder or a hub."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.capture.opening import EDITED, open_model
from thalweg.errors import InputError
from thalweg.models import Decoder
from thalweg.models.hf_base import ThalwegPreTrainedModel
from thalweg.models.hf_config import ThalwegConfig, ThalwegEncoderConfig
from thalweg.models.transformer import Transformer
from thalweg.surgery import families
from thalweg.surgery.change import settings_of
from thalweg.surgery.wide import in_dtype, renew_angles

OURS = (ThalwegConfig.model_type, ThalwegEncoderConfig.model_type)
FAMILY = OURS[0]  # what both are called here


@dataclass(frozen=True)
class Source:
    """A model with its name, the name of its family (``thalweg`` for ours) and, where there is one, its tokenizer.

    further: fields of Hugging Face that the result's configuration shall hold, beside the special tokens and classes of the model's own.
    """

    model: nn.Module
    name: str
    family: str
    tokenizer: Any = None
    further: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> Transformer | None:
        """The decoder or encoder, where the model is one of ours."""
        model = self.model.transformer if isinstance(self.model, ThalwegPreTrainedModel) else self.model
        return model if isinstance(model, Transformer) else None

    @property
    def settings(self) -> dict[str, Any]:
        """What the shell keeps of their configuration: the special tokens, the names of classes."""
        bare = isinstance(self.model, Transformer)  # whose configuration is of the shape alone
        return {**({} if bare else settings_of(getattr(self.model, "config", None))), **self.further}


def open_source(model: Any, *, tokenizer: Any = None, dtype: torch.dtype = torch.float32) -> Source:
    """A source from a model, the path of a folder or the name of a repository on a hub.

    tokenizer: one of transformers; None takes the one beside a folder, if there is one.
    Raises: InputError for another kind of thing or an unknown family, and as ``open_model``.
    """
    if isinstance(model, Transformer | ThalwegPreTrainedModel):
        return Source(model, type(model).__name__, FAMILY, tokenizer)
    if isinstance(model, str | Path):
        return _load(str(model), tokenizer, dtype)
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None:
        raise InputError(
            f"the model must be a decoder of transformers, a model of thalweg, a folder or a name on a hub, got {type(model).__name__}"
        )
    families.of(getattr(config, "model_type", None))
    _refuse_edited(config)
    name = getattr(config, "name_or_path", "") or type(model).__name__
    return Source(model, name, config.model_type, tokenizer)


def _load(where: str, tokenizer: Any, dtype: torch.dtype) -> Source:
    def check(config: Any) -> None:
        if getattr(config, "model_type", None) not in OURS:
            families.of(getattr(config, "model_type", None))
        _refuse_edited(config)

    opened = open_model(where, dtype=dtype, tokenizer=tokenizer, check=check)
    kind = str(getattr(opened.model.config, "model_type", None))
    if kind not in OURS:
        renew_angles(opened.model, dtype)
    return Source(opened.model, opened.name, FAMILY if kind in OURS else kind, opened.tokenizer)


def _refuse_edited(config: Any) -> None:
    if entry := getattr(config, EDITED, None):
        raise InputError(
            f"the model has an edit of its own ({', '.join(entry) if isinstance(entry, dict) else entry!r}, under {EDITED} of its "
            "configuration), which a conversion does not carry over; detach what attach or attach_from gave, and convert the model then"
        )


def as_ours(source: Source, dtype: torch.dtype) -> tuple[nn.Module, Transformer]:
    """A model of ours in ``dtype`` as it is, whatever its connection, twice: to compare with and to go on from."""
    theirs = in_dtype(source.ours, dtype) if source.ours is not None else None
    assert isinstance(theirs, Transformer)  # the caller has looked
    return theirs, theirs


def as_additive(source: Source, dtype: torch.dtype) -> tuple[nn.Module, Transformer]:
    """The source in ``dtype``, to compare with, and our model with the same weights and the additive connection.

    Raises: InputError for a model of ours with another connection, a family's part that our decoder has not, or weights left over.
    """
    if source.ours is not None:
        if source.ours.config.connection != "additive":
            raise InputError(
                f"a conversion starts from the additive connection, got a model with {source.ours.config.connection!r}; convert "
                "the model that it was made from, or name no connection and let this one grow as it is"
            )
        return as_ours(source, dtype)
    theirs: Any = in_dtype(source.model, dtype)
    family = families.of(source.family)
    config = family.config(theirs)
    decoder = Decoder(config).to(dtype)
    fill(decoder, theirs, list(family.pieces(theirs, config)))
    return theirs, decoder


@torch.no_grad()
def fill(decoder: Decoder, theirs: nn.Module, pieces: list[families.Piece]) -> None:
    """Put their weights in place. Raises: InputError if a parameter of either side is left over, or a shape does not fit."""
    ours, given = dict(decoder.named_parameters()), dict(theirs.named_parameters(remove_duplicate=False))
    taken = {id(given[piece.theirs]) for piece in pieces if piece.theirs in given}
    missing = sorted(set(ours) - {piece.ours for piece in pieces}) + sorted({p.theirs for p in pieces} - set(given))
    spare = sorted(name for name, parameter in given.items() if id(parameter) not in taken)
    if missing or spare:
        names = ", ".join((missing or spare)[:3])
        raise InputError(
            f"the weights do not fit: {len(missing)} missing, {len(spare)} left over ({names}); the model has parts that cannot be converted"
        )
    for piece in pieces:
        weight = given[piece.theirs]
        found = weight if piece.change is None else piece.change(weight)
        if found.shape != ours[piece.ours].shape:
            raise InputError(
                f"{piece.theirs} is {list(found.shape)}, {piece.ours} needs {list(ours[piece.ours].shape)}; the model is of another form"
            )
        ours[piece.ours].copy_(found)
