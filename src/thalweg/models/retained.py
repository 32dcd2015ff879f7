"""The module that an edit of updates is in a model: the retained scales of one place, and what is done with them.

Axis legend: ``b`` batch, ``t`` tokens, ``h`` query heads, ``kv`` key-value heads, ``w`` width of a head.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from thalweg.models.edits import LEARNED, Scale, Schedule, UpdateEdit
from thalweg.ops.precision import wide, wide_dtype
from thalweg.ops.value_edit import value_coefficient, value_edit


class RetainedScale(nn.Module):
    """One retained scale: a number, one for each head, 1 plus a parameter that starts at 0, or what a schedule says.

    ``updates`` counts the updates of the weights so far where there is a schedule; it is saved with the weights, so that a resumed run, a
    loaded model and a run that begins from one go on from the scale that was reached.
    """

    updates: Tensor

    def __init__(self, scale: Scale, size: int = 1):
        super().__init__()
        self.fixed: float | tuple[float, ...] | None = scale if isinstance(scale, float | tuple) else None
        self.schedule = scale if isinstance(scale, Schedule) else None
        self.offset = nn.Parameter(torch.zeros(size)) if scale == LEARNED else None
        if self.schedule is not None:
            self.register_buffer("updates", torch.zeros(1, dtype=torch.int64))

    def forward(self, like: Tensor) -> float | Tensor:
        """A number, or a tensor [1] or [h] on the device of ``like``, in float32 or wider."""
        if self.offset is not None:
            return 1 + wide(self.offset)
        if self.schedule is not None:
            first, last, updates = self.schedule.first, self.schedule.last, self.schedule.updates
            done = self.updates.to(wide_dtype(like.dtype))  # 16 bits cannot count
            return first + (last - first) * (done / updates).clamp(max=1.0)
        assert self.fixed is not None  # one of the three
        if isinstance(self.fixed, float):
            return self.fixed
        return torch.tensor(self.fixed, dtype=wide_dtype(like.dtype), device=like.device)

    @torch.no_grad()
    def count(self, updates: int) -> None:
        """Tell a schedule how many updates of the weights are done; nothing where there is none."""
        if self.schedule is not None:
            self.updates.fill_(updates)

    def reset_parameters(self) -> None:
        if self.offset is not None:
            nn.init.zeros_(self.offset)
        self.count(0)

    def extra_repr(self) -> str:
        return f"{self.fixed if self.fixed is not None else self.schedule or LEARNED}"


class Edit(nn.Module):
    """o' = perpendicular * o + (parallel - perpendicular) * (its part along v), head by head; see :func:`thalweg.ops.value_edit.value_edit`.

    Shapes: o [b t h w], v [b t kv w], own [b h t] (A_tt, where an edit of values leaves alone what a token reads of itself) -> as o. An
    update of the residual stream is one head as wide as the stream.
    control ``random_direction``: o' = o + (parallel - 1) * beta * |v| * g with a fixed random unit vector g [h w]: as much is taken away
    as by the edit, with its sign, but not along v.
    """

    direction: Tensor

    def __init__(self, edit: UpdateEdit, layer: int, heads: int, width: int):
        super().__init__()
        self.exclude_self, self.group, self.detached = edit.exclude_self, edit.group, edit.detach
        parallel, perpendicular = edit.at(layer)
        size = heads if edit.per == "head" else 1
        self.parallel, self.perpendicular = RetainedScale(parallel, size), RetainedScale(perpendicular, size)
        self.random = edit.control == "random_direction"
        if self.random:
            generator = torch.Generator().manual_seed(edit.seed * 1_000_003 + layer)
            drawn = torch.randn(heads, width, generator=generator, dtype=torch.float64, device="cpu")
            self.register_buffer("direction", (drawn / drawn.norm(dim=-1, keepdim=True)).to(torch.get_default_dtype()))

    def forward(
        self,
        o: Float[Tensor, "b t h w"],
        v: Float[Tensor, "b t kv w"],
        own: Float[Tensor, "b h t"] | None = None,
    ) -> Float[Tensor, "b t h w"]:
        if self.detached:
            v, own = v.detach(), None if own is None else own.detach()
        parallel, perpendicular = self.parallel(o), self.perpendicular(o)
        if not self.random:
            return value_edit(o, v, parallel, perpendicular, own, self.group)
        length = torch.linalg.vector_norm(wide(v), dim=-1).repeat_interleave(o.shape[2] // v.shape[2], -1)
        taken = (parallel - 1) * value_coefficient(o, v, own, self.group) * length
        return torch.addcmul(wide(o), taken.unsqueeze(-1), wide(self.direction)).to(o.dtype)

    def along(self, update: Float[Tensor, "b t d"], reference: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """The same of an update [b t d] along a reference [b t d]."""
        return self(update.unsqueeze(2), reference.unsqueeze(2)).squeeze(2)

    def reset_parameters(self) -> None:
        self.parallel.reset_parameters()
        self.perpendicular.reset_parameters()


def edit_at(edit: UpdateEdit | None, space: str, layer: int, depth: int, heads: int, width: int) -> Edit | None:
    """The module for one place; None where nothing is edited there."""
    if edit is None or edit.space != space or edit.is_one or layer not in edit.chosen(depth):
        return None
    edit.check_heads(heads, layer)
    scales: Any = [entry if isinstance(entry, tuple) else (entry,) for entry in edit.at(layer)]
    return None if all(number == 1 for entry in scales for number in entry) else Edit(edit, layer, heads, width)


def edits_of(model: nn.Module) -> dict[str, Edit]:
    """Every edit of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Edit)}


def edit_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of the edits of a model by name."""
    return {
        f"{name}.{part}": value for name, edit in edits_of(model).items() for part, value in edit.state_dict().items()
    }


def take_weights(decoder: nn.Module, source: nn.Module) -> None:
    """Give a decoder the weights of another one that differs in its edits at most.

    An edit that both have goes on from where it was; one of ``decoder`` alone stays as it is, one of ``source`` alone ends here.
    """
    weights, ours, theirs = source.state_dict(), edit_state(decoder), edit_state(source)
    gone = {name for name, value in theirs.items() if name not in ours or ours[name].shape != value.shape}
    decoder.load_state_dict({**ours, **{name: value for name, value in weights.items() if name not in gone}})


def count_updates(model: nn.Module, updates: int) -> None:
    """Tell every schedule of a model how many updates of the weights are done."""
    for scale in scheduled(model):
        scale.count(updates)


def count_one_update(model: nn.Module) -> None:
    """Tell every schedule of a model that one more update of the weights is done."""
    for scale in scheduled(model):
        scale.updates += 1


def scheduled(model: nn.Module) -> list[RetainedScale]:
    """The scales of a model that follow a schedule."""
    return [module for module in model.modules() if isinstance(module, RetainedScale) and module.schedule is not None]
