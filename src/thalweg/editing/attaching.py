"""Edits that stay: part of somebody's model, in training, in use, and in what it saves.

attached = editing.attach(model, site="value", parallel=0.0)      # before the optimiser is made
trainer.train()
model = AutoModelForCausalLM.from_pretrained(folder); editing.attach_from(model)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thalweg import config
from thalweg.capture import Located, Point, SitePlace, locate
from thalweg.capture.attention import PREFIX, SLOT, attention_tap, refuse_compiled
from thalweg.editing import standing, stored
from thalweg.editing.hooks import Turning
from thalweg.editing.options import EditOptions, site_of
from thalweg.editing.places import chosen, counts, reference_of
from thalweg.editing.stored import ENTRY, SPACES
from thalweg.errors import InputError
from thalweg.models.edits import UpdateEdit
from thalweg.models.retained import Edit, count_one_update, count_updates, edit_at
from thalweg.ops.precision import wide_dtype

HELD = "_thalweg_attached"  # attribute of the model: its edits by site


@dataclass
class Attached:
    """An edit that a model has. site; edit: what is done; layers; places: names of the sublayers; modules: the scales of every place."""

    model: nn.Module = field(repr=False)
    site: str
    edit: UpdateEdit
    layers: tuple[int, ...]
    places: tuple[str, ...]
    modules: tuple[Edit, ...] = field(repr=False)
    _handles: list[Any] = field(repr=False, default_factory=list)  # of hooks; a copy of the model gets those of its own

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
        """The same for a ``Trainer``: a TrainerCallback that counts on from what the model has, also after it was loaded."""
        from transformers.trainer_callback import TrainerCallback

        attached = self

        class Counting(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                for module in attached.modules:
                    count_one_update(module)

        return Counting()

    def detach(self) -> None:
        """Take the edit away: hooks, modules and the entry of the configuration. Nothing where that was done."""
        if _attached(self.model).get(self.site) is not self:
            return
        vars(self.model)[HELD].pop(self.site)
        for handle in self._handles:
            handle.remove()
        for block, scales in _scales(self.model, self.site):
            scales.pop(_key(self.site))
            if not len(scales):
                delattr(block, ENTRY)
        if self.site == "value":
            standing.leave(self.model)
        stored.strike(self.model, self.site)


def attach(
    model: nn.Module, edit: UpdateEdit | str | None = None, *, site: str | None = None, map: Any = None, **values: Any
) -> Attached:
    """Make an edit part of a model of transformers, for training loops of any kind, until :meth:`Attached.detach`.

        attach(model, site="value", parallel=0.0)                    # exclusive self attention
        attach(model, "residual:learned", site="mlp")

    The same operation as ``attention_edit`` and ``mlp_edit`` of our decoders: gradients pass through update and reference (``detach=True``:
    not the latter). site: ``value``, ``attention`` or ``mlp``, as of :func:`thalweg.editing.edit`. edit: as text; or the fields of
    :class:`thalweg.models.edits.UpdateEdit` as keywords. Unlike there, an edit of values takes all that a token reads unless
    ``exclude_self`` is set. Learned scales are parameters named ``...thalweg_edit.SITE_bias.parallel.offset`` in every edited layer (of a
    bias, ``Trainer`` knows that it does not decay): attach before the optimiser is made, and give them no weight decay. They stay in
    float32 in a model of 16 bits. The configuration says it under ``thalweg_edit``, which is saved with the model (from the first edit on
    the model has a configuration of its own); after loading call :func:`attach_from`. Every pass of the model is edited, padded tokens too
    (nobody reads them). map: how the layers are spelled (:func:`thalweg.capture.locate`).
    Raises: InputError, UnknownNameError for what the model cannot have; with ``exclude_self`` also what
    :func:`thalweg.capture.attention_tap` raises.
    """
    owner = _owner(model)
    site, edit = _asked(edit, site, values)
    if site in stored.named(owner) and site not in _attached(model) and not _scales(owner, site):
        raise InputError(
            f"the configuration of this model names an edit of {site} that it was saved with; attach that by editing.attach_from(model), or "
            f"delete config.{ENTRY} for a model without it"
        )
    return _attach(owner, site, edit, map)


def attach_from(model: nn.Module, folder: str | None = None, *, map: Any = None) -> list[Attached]:
    """Attach the edits that the configuration of a loaded model names, with the scales that were learned.

    An edit that the model has already (the call is made twice; a copy of an edited model) stays as it is, with its scales of now, and what
    :func:`attach` gave is given again. folder: where the weights lie (None: where the model says that it came from).
    Raises: InputError for a model whose configuration names none; CheckpointError for an entry that is none, and where learned scales are
    not among the weights or do not fit.
    """
    owner = _owner(model)
    edits, found = stored.named(owner), _attached(model)
    if not edits and not found:
        raise InputError(f"the configuration of this model has no {ENTRY}; attach an edit by editing.attach")
    new: list[Attached] = []
    entry = getattr(getattr(owner, "config", None), ENTRY, None)
    try:
        for site, edit in edits.items():
            if site not in found:
                new.append(_attach(owner, *_asked(edit, site, {}), map))
        if wanted := _state(owner, new):
            tensors = stored.stored_tensors(folder or getattr(owner, "name_or_path", ""), wanted)
            with torch.no_grad():
                for name, tensor in wanted.items():
                    tensor.copy_(tensors[name])
    except BaseException:
        for attached in new:
            attached.detach()
        setattr(getattr(owner, "config"), ENTRY, entry)  # noqa: B009  # it named the edit that failed
        raise
    return list(_attached(model).values())


def _attach(model: nn.Module, site: str, edit: UpdateEdit, map: Any) -> Attached:
    _check(model, site, edit)
    located = locate(model, map)
    places = chosen(located, _options(site, edit))
    edit.chosen(located.depth)
    made = {place: _made(located, place, edit) for place in places}
    kept = {place: module for place, module in made.items() if module is not None}
    tapped = edit.space == "value" and (edit.exclude_self or any(place.heads is None for place in kept))
    if tapped and kept:
        with attention_tap(model, lambda call: None):
            pass  # it proves that this attention can be tapped
    if not _attached(model):
        stored.own_configuration(model)
    layers = tuple(sorted({place.layer for place in kept}))
    attached = Attached(model, site, edit, layers, tuple(p.name for p in kept), tuple(kept.values()))
    vars(model).setdefault(HELD, {})[site] = attached
    try:
        stored.enter(model, site, edit)
        for place, module in kept.items():
            _add(located.module(place.block), site, module)
        if tapped and kept:
            attached._handles += standing.stand(model, kept, located)
        else:
            for place, module in kept.items():
                attached._handles += (_along if edit.space == "residual" else _by_hooks)(located, place, module)
    except BaseException:
        attached.detach()
        raise
    return attached


def _owner(model: Any) -> nn.Module:
    """Who has the configuration, is saved, and holds the edits: the outermost model of transformers in ``model``, else ``model``."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"edits are attached to a model, a torch module, got {type(model).__name__}; load it first, as by "
            "AutoModelForCausalLM.from_pretrained"
        )
    from transformers.modeling_utils import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def _attached(model: nn.Module) -> dict[str, Attached]:
    """The edits that a model, or a part of it, has by site."""
    return {site: one for module in model.modules() for site, one in vars(module).get(HELD, {}).items()}


def _scales(model: nn.Module, site: str) -> "list[tuple[nn.Module, Scales]]":
    """The layers that have scales of an edit, with what holds them."""
    found = [(block, getattr(block, ENTRY, None)) for block in model.modules()]
    return [(block, held) for block, held in found if isinstance(held, Scales) and _key(site) in held]


def _check(model: nn.Module, site: str, edit: UpdateEdit) -> None:
    """Raises: InputError for a model that cannot have the edit."""
    if any(SLOT in vars(module) for module in model.modules()):
        name = "mlp_edit" if site == "mlp" else "attention_edit"
        raise InputError(f"a model of thalweg has edits of its own: make it with {name}={edit.describe()!r}")
    refuse_compiled(model)
    if site in _attached(model) or _scales(model, site):
        raise InputError(
            f"this model has an edit of {site} already; detach it first (editing.attach_from gives what attach gave)"
        )
    held = getattr(model, "config", None)
    if getattr(held, "is_encoder_decoder", False) and any(
        name.endswith("decoder") for name, _ in model.named_modules()
    ):
        raise InputError(
            f"{type(model).__name__} is an encoder with a decoder, and edits are attached to either kind alone; give a decoder "
            "(AutoModelForCausalLM) or an encoder (AutoModel, AutoModelForMaskedLM)"
        )
    attention = getattr(held, "_attn_implementation", None)
    if not isinstance(attention, standing.Standing) and str(attention).startswith(PREFIX):
        raise InputError("this model is watched or edited in a block at the moment; attach edits outside of it")


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
    return None if made is None else made.to(like.device, wide_dtype(like.dtype))


def _key(site: str) -> str:
    """Name of an edit in its layer. Trainers give no weight decay to what has "bias" in its name, and an offset from 1 is one."""
    return f"{site}_bias"


class Scales(nn.ModuleDict):
    """The edits of a layer. In a model that is cast to 16 bits they stay in float32: an update would be lost in their rounding."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def wide(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            narrow = new.is_floating_point() and new.dtype.itemsize < torch.float32.itemsize
            return tensor.to(new.device, torch.float32) if narrow else new

        return super()._apply(wide, recurse)


def _add(block: nn.Module, site: str, module: Edit) -> None:
    """Let a layer own the scales, so that they are trained, moved and saved with it."""
    if not hasattr(block, ENTRY):
        block.add_module(ENTRY, Scales())
    held: Any = getattr(block, ENTRY)
    held[_key(site)] = module


def _along(located: Located, place: SitePlace, module: Edit) -> list[Any]:
    turning = Turning(module, place.name)
    return [
        turning.see(located, reference_of(located, place)),
        located.module(place.update).register_forward_hook(turning.turn_output),
    ]


def _by_hooks(located: Located, place: SitePlace, module: Edit) -> list[Any]:
    assert place.heads is not None  # the tap is taken otherwise
    turning = Turning(module, place.name, place.heads)
    output = located.module(place.heads.output)
    return [
        turning.see(located, Point(place.heads.value, "output")),
        output.register_forward_pre_hook(turning.turn_input, with_kwargs=True),
    ]


def _state(model: nn.Module, attached: list[Attached]) -> dict[str, Tensor]:
    """Learned scales and counts of updates of some edits by their names in the model; random directions are drawn anew."""
    kept = {id(module) for one in attached for module in one.modules}
    return {
        f"{name}.{part}": tensor
        for name, module in model.named_modules()
        if id(module) in kept
        for part, tensor in module.state_dict(keep_vars=True).items()
        if part != "direction"
    }
