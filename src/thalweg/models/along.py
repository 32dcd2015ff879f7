"""Edits of updates along the stream, for every connection: what a site reads goes with the context to where it writes.

Every connection reads through its input norm and writes through its update norm, whatever its state is. An edited site notes what its input
norm is given (what it reads of the stream, raw), hands it on in the context, and scales what its update norm gives along it.
"""

import functools
from typing import Any, cast

from torch import Tensor

from thalweg.connections import Stream, StreamSite
from thalweg.errors import InputError
from thalweg.models.config import DecoderConfig
from thalweg.models.retained import Edit, edit_at
from thalweg.ops.norms import Norm

KINDS = {"attention": "attention_edit", "feed_forward": "mlp_edit", "moe": "mlp_edit"}


class ReadNorm(Norm):
    """A norm that keeps what it was given until its site takes it, within the same call."""

    seen: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return super().forward(x)


class WriteNorm(Norm):
    """A norm whose output is edited along ``reference`` while its site writes."""

    edit: Edit
    reference: Tensor | None
    used: bool

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.reference is None:
            return y
        self.used = True
        return self.edit.along(y, self.reference)


class EditedSite(StreamSite):
    """Mixed in before the class of a site: context = (context of the connection, what was read [b t d])."""

    inner: type[StreamSite]

    def read(self, state, tokens=None):
        norm = cast(ReadNorm, self.input_norm)
        x, context = super().read(state, tokens)
        raw, norm.seen = norm.seen, None
        if raw is None:
            raise InputError(
                f"{self.inner.__name__} reads past its input norm, so what it reads is not known; leave residual edits out"
            )
        return x, (context, raw)

    def write(self, state, update, context):
        norm = cast(WriteNorm, self.update_norm)
        inner, norm.reference = context
        norm.used = False
        after = super().write(state, update, inner)
        norm.reference = None
        if not norm.used:
            raise InputError(
                f"{self.inner.__name__} writes past its update norm, so nothing can be edited; leave residual edits out"
            )
        return after

    def gates(self, state, context, update=None):
        norm = cast(WriteNorm, self.update_norm)
        inner, norm.reference = context
        found = super().gates(state, inner, update)
        norm.reference = None
        return found

    def mixing(self, state, context):
        return super().mixing(state, context[0])

    def __reduce_ex__(self, protocol: Any) -> Any:  # the class is made when it is asked for: no import finds it
        return _blank, (self.inner,), self.__dict__


def edit_sites(stream: Stream, config: DecoderConfig) -> None:
    """Let the sites of ``stream`` edit their updates as ``config`` says. Raises: InputError for a connection with fused sites."""
    for site in cast("list[StreamSite]", list(stream.sites)):
        name = KINDS.get(site.site.kind)
        edit = None if name is None else config.edits.get(name)
        made = edit_at(edit, "residual", site.site.layer, config.depth, 1, config.width)
        if made is None:
            continue
        if type(site).advance is not StreamSite.advance:
            raise InputError(
                f"connection {config.connection!r} writes and reads in one step, so that nothing can be edited between; leave {name} out"
            )
        # As torch.nn.utils.parametrize does: the class changes and the parameters keep their names.
        site.input_norm.__class__, site.update_norm.__class__ = ReadNorm, WriteNorm
        reading, writing = cast(ReadNorm, site.input_norm), cast(WriteNorm, site.update_norm)
        reading.seen, writing.reference, writing.used = None, None, False
        writing.edit = made
        site.__class__ = _edited(type(site))


@functools.cache
def _edited(kind: type[StreamSite]) -> type[EditedSite]:
    return type(f"Edited{kind.__name__}", (EditedSite, kind), {"inner": kind, "__module__": __name__})


def _blank(kind: type[StreamSite]) -> EditedSite:
    return _edited(kind).__new__(_edited(kind))
