"""Edits that stay: part of somebody's model, in training, in use, and in what it saves.

attached = editing.attach(model, site="value", parallel=0.0)      # before the optimiser is made
trainer.train()
model = AutoModelForCausalLM.from_pretrained(folder); editing.attach_from(model)
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thalweg import config
from thalweg.capture import Located, Point, SitePlace, locate
from thalweg.capture.attention import SLOT, attention_tap, refuse_compiled
from thalweg.capture.attention_call import AttentionCall
from thalweg.capture.layout import Heads
from thalweg.capture.watching import given, item_of
from thalweg.editing.hooks import with_input, with_output
from thalweg.editing.options import EditOptions, site_of
from thalweg.editing.places import chosen, counts, reference_of
from thalweg.editing.stored import stored_tensors
from thalweg.errors import InputError
from thalweg.models.edits import UpdateEdit
from thalweg.models.retained import Edit, count_updates, edit_at

ENTRY = "thalweg_edit"  # of the configuration, and the name of the module in every edited layer
OWN, HELD = "_thalweg_own_edit", "_thalweg_attached"  # attributes of an attention, of the model
SPACES = {"value": "value", "attention": "residual", "mlp": "residual"}


@dataclass
class Attached:
    """An edit that a model has. site; edit: what is done; layers; places: names of the sublayers; modules: the scales of every place."""

    model: nn.Module = field(repr=False)
    site: str
    edit: UpdateEdit
    layers: tuple[int, ...]
    places: tuple[str, ...]
    modules: tuple[Edit, ...] = field(repr=False)
    _undo: ExitStack = field(repr=False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The learned scales (as offsets from 1), for a group of the optimiser without weight decay."""
        for module in self.modules:
            yield from module.parameters()

    def retained(self) -> dict[str, dict[str, list[float]]]:
        """Place -> the scales parallel and perpendicular as they are now, one number or one for each head."""
        found = {}
        for name, module in zip(self.places, self.modules, strict=True):
            like = next(self.model.parameters())
            scales = {"parallel": module.parallel(like), "perpendicular": module.perpendicular(like)}
            found[name] = {
                part: scale.detach().flatten().tolist() if isinstance(scale, Tensor) else [scale]
                for part, scale in scales.items()
            }
        return found

    def count_updates(self, updates: int) -> None:
        """Tell a schedule how many updates of the weights are done; call it after each."""
        for module in self.modules:
            count_updates(module, updates)

    def callback(self) -> Any:
        """The same for a ``Trainer``: a TrainerCallback that counts."""
        from transformers.trainer_callback import TrainerCallback

        attached = self

        class Counting(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                attached.count_updates(state.global_step)

        return Counting()

    def detach(self) -> None:
        """Take the edit away: hooks, modules and the entry of the configuration."""
        self._undo.close()


def attach(
    model: nn.Module, edit: UpdateEdit | str | None = None, *, site: str | None = None, map: Any = None, **values: Any
) -> Attached:
    """Make an edit part of a model of transformers, for training loops of any kind, until :meth:`Attached.detach`.

        attach(model, site="value", parallel=0.0)                    # exclusive self attention
        attach(model, "residual:learned", site="mlp")

    The same operation as ``attention_edit`` and ``mlp_edit`` of our decoders: gradients pass through update and reference (``detach=True``:
    not the latter). site: ``value``, ``attention`` or ``mlp``, as of :func:`thalweg.editing.edit`. edit: as text; or the fields of
    :class:`thalweg.models.edits.UpdateEdit` as keywords. Unlike there, an edit of values takes all that a token reads unless
    ``exclude_self`` is set. Learned scales are parameters named ``...thalweg_edit.SITE.parallel.offset`` in every edited layer: attach
    before the optimiser is made, and give them no weight decay. The configuration says it under ``thalweg_edit``, which is saved with
    the model; after loading call :func:`attach_from`. Every pass of the model is edited, padded tokens too (nobody reads them).
    map: how the layers are spelled (:func:`thalweg.capture.locate`).
    Raises: InputError, UnknownNameError for what the model cannot have; with ``exclude_self`` also what
    :func:`thalweg.capture.attention_tap` raises.
    """
    site, edit = _asked(edit, site, values)
    if any(SLOT in vars(module) for module in model.modules()):
        name = "mlp_edit" if site == "mlp" else "attention_edit"
        raise InputError(f"a model of thalweg has edits of its own: make it with {name}={edit.describe()!r}")
    refuse_compiled(model)
    if site in _entry(model):
        raise InputError(f"this model has an edit of {site} already; detach it first")
    located = locate(model, map)
    places = chosen(located, _options(site, edit))
    edit.chosen(located.depth)
    made = {place: _made(located, place, edit) for place in places}
    kept = {place: module for place, module in made.items() if module is not None}
    with ExitStack() as stack:
        for place, module in kept.items():
            _add(stack, located.module(place.block), site, module)
        if edit.space == "residual":
            for place, module in kept.items():
                _along(stack, located, place, module)
        elif edit.exclude_self or any(place.heads is None for place in kept):
            _by_tap(stack, located, kept)
        else:
            for place, module in kept.items():
                _by_hooks(stack, located, place, module)
        _enter(stack, model, site, edit)
        held = model.__dict__.setdefault(HELD, {})
        stack.callback(held.pop, site)
        undo = stack.pop_all()
        held[site] = _Held(undo)
    layers = tuple(sorted({place.layer for place in kept}))
    return Attached(model, site, edit, layers, tuple(p.name for p in kept), tuple(kept.values()), undo)


def attach_from(model: nn.Module, folder: str | None = None, *, map: Any = None) -> list[Attached]:
    """Attach the edits that the configuration of a loaded model names, with the scales that were learned.

    folder: where the weights lie (None: where the model says that it came from). Raises: InputError for a model whose configuration names
    none; CheckpointError where learned scales are not among the weights.
    """
    entry = dict(_entry(model))
    if not entry:
        raise InputError(f"the configuration of this model has no {ENTRY}; attach an edit by editing.attach")
    getattr(model, "config").__dict__.pop(ENTRY)  # noqa: B009  # any model; attach writes it anew
    found = []
    try:
        for site, table in entry.items():
            found.append(attach(model, config.build(UpdateEdit, table, f"{ENTRY}.{site}"), site=site, map=map))
        if wanted := _state(model):
            stored = stored_tensors(folder or getattr(model, "name_or_path", ""), list(wanted))
            with torch.no_grad():
                for name, value in wanted.items():
                    value.copy_(stored[name])
    except BaseException:
        for attached in found:
            attached.detach()
        setattr(getattr(model, "config"), ENTRY, entry)  # noqa: B009
        raise
    return found


def _asked(edit: UpdateEdit | str | None, site: str | None, values: Mapping[str, Any]) -> tuple[str, UpdateEdit]:
    if edit is not None and values:
        raise InputError(f"give an edit or its fields, not both; got both, with {', '.join(sorted(values))}")
    found = UpdateEdit.of(edit, "edit")
    if site is None:
        if found is not None and found.space == "residual":
            raise InputError("an edit in the residual stream needs its site: say site='attention' or site='mlp'")
        site = "value"
    site = site_of(site)
    if site not in SPACES:
        raise InputError(f"edits are attached to value, attention or mlp, got site {site!r}")
    if found is None:
        found = config.build(UpdateEdit, {"space": SPACES[site], **values}, "edit")
    if found.space != SPACES[site]:
        raise InputError(f"site {site!r} is edited in the space {SPACES[site]!r}, got {found.describe()!r}")
    return site, found


def _options(site: str, edit: UpdateEdit) -> EditOptions:
    """What :func:`chosen` looks at."""
    values = {"exclude_self": edit.exclude_self, "group": edit.group} if site == "value" else {}
    return EditOptions(site=site, layers=edit.layers, **values)


def _made(located: Located, place: SitePlace, edit: UpdateEdit) -> Edit | None:
    heads = counts(located, place) if edit.space == "value" else (1, 1)
    assert heads is not None  # checked when the places were chosen
    if edit.control != "none" and edit.space == "value" and place.heads is None:
        raise InputError(f"the width of the heads of {place.name} is not known, so it has no random direction")
    width = located.width if edit.space == "residual" or place.heads is None else place.heads.width
    made = edit_at(edit, edit.space, place.layer, located.depth, heads[0], width)
    like = next(located.module(place.block).parameters())
    # Scales stay in float32 in a model of 16 bits: an update of the weights would be lost in their rounding.
    return (
        None if made is None else made.to(like.device, torch.float64 if like.dtype == torch.float64 else torch.float32)
    )


def _add(stack: ExitStack, block: nn.Module, site: str, module: Edit) -> None:
    """Let a layer own the scales, so that they are trained, moved and saved with it."""
    if not hasattr(block, ENTRY):
        block.add_module(ENTRY, nn.ModuleDict())
    held: Any = getattr(block, ENTRY)
    held[site] = module

    def remove() -> None:
        del held[site]
        if not len(held):
            delattr(block, ENTRY)

    stack.callback(remove)


class _Turning:
    """What is seen at one module until it is used at another. An object, not a closure: a copy of the model gets a copy of its own."""

    def __init__(self, edit: Edit, name: str, item: int = 0, heads: Heads | None = None):
        self.edit, self.name, self.item, self.heads = edit, name, item, heads
        self.seen: Tensor | None = None

    def see_input(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.seen = given(args, kwargs)

    def see_output(self, _: nn.Module, args: Any, output: Any) -> None:
        self.seen = item_of(output, self.item)

    def take(self, near: Tensor) -> Tensor:
        """What was seen, once: nothing of a pass is kept after it."""
        seen, self.seen = self.seen, None
        if seen is None or seen.shape[:2] != near.shape[:2]:
            raise InputError(
                f"what {self.name} is edited along was not seen before it; the model runs its layers in another way"
            )
        return seen.to(near.device)

    def turn_output(self, _: nn.Module, args: Any, output: Any) -> Any:
        """An update of the stream."""
        update = item_of(output, 0)
        return with_output(output, self.edit.along(update, self.take(update)))

    def turn_input(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """What the heads read, on its way into the output projection."""
        assert self.heads is not None  # of edits of values
        flat = given(args, kwargs)
        o = self.edit(self.heads.outputs(flat), self.heads.values(self.take(flat)))
        return with_input(args, kwargs, self.heads.flat(o))


def _see(stack: ExitStack, located: Located, point: Point, turning: _Turning) -> None:
    module = located.module(point.module)
    if point.side == "input":
        handle = module.register_forward_pre_hook(turning.see_input, with_kwargs=True)
    else:
        turning.item = point.item
        handle = module.register_forward_hook(turning.see_output)
    stack.callback(handle.remove)


def _along(stack: ExitStack, located: Located, place: SitePlace, module: Edit) -> None:
    turning = _Turning(module, place.name)
    _see(stack, located, reference_of(located, place), turning)
    stack.callback(located.module(place.update).register_forward_hook(turning.turn_output).remove)


def _by_hooks(stack: ExitStack, located: Located, place: SitePlace, module: Edit) -> None:
    assert place.heads is not None  # the tap is taken otherwise
    turning = _Turning(module, place.name, heads=place.heads)
    _see(stack, located, Point(place.heads.value, "output"), turning)
    output = located.module(place.heads.output)
    stack.callback(output.register_forward_pre_hook(turning.turn_input, with_kwargs=True).remove)


def _by_tap(stack: ExitStack, located: Located, kept: Mapping[SitePlace, Edit]) -> None:
    """Modules find their edit themselves, so that those of a copy find the copied one; beside the children, which would save it twice."""
    for place, module in kept.items():
        for part in located.module(place.sublayer).modules():
            part.__dict__[OWN] = module
            stack.callback(part.__dict__.pop, OWN, None)

    def on_attention(call: AttentionCall) -> Tensor | None:
        module = call.module.__dict__.get(OWN)
        if module is None:
            return None
        return module(call.output, call.own_values(), call.own() if module.exclude_self else None)

    stack.enter_context(attention_tap(located.model, on_attention))


class _Held:
    """What undoes an edit, kept by the model: a tap ends when nobody holds it. A copy of the model has nothing to undo."""

    def __init__(self, undo: ExitStack | None):
        self.undo = undo

    def __reduce__(self) -> Any:
        return _Held, (None,)


def _entry(model: nn.Module) -> Mapping[str, Any]:
    return getattr(getattr(model, "config", None), ENTRY, None) or {}


def _enter(stack: ExitStack, model: nn.Module, site: str, edit: UpdateEdit) -> None:
    """Write the edit into the configuration, where the model has one."""
    held: Any = getattr(model, "config", None)
    if held is None:
        return
    setattr(held, ENTRY, {**_entry(model), site: config.to_plain(edit)})

    def remove() -> None:
        left = {name: table for name, table in _entry(model).items() if name != site}
        setattr(held, ENTRY, left) if left else held.__dict__.pop(ENTRY, None)

    stack.callback(remove)


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Learned scales and counts of updates by their names in the model; random directions are drawn anew."""
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if f".{ENTRY}." in f".{name}" and not name.endswith(".direction")
    }
