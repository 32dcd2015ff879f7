"""Edit a model inside a block: scale the part of its updates along, or across, what they are added to."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.capture import Located, SitePlace, locate
from thalweg.capture.attention import WRAPPED, backend_of, refuse_compiled
from thalweg.capture.proof import called, dtype_name
from thalweg.editing.arithmetic import Change, Gathering, changes
from thalweg.editing.hooks import Heard
from thalweg.editing.options import EditOptions
from thalweg.editing.passes import Passes, read
from thalweg.editing.places import chosen
from thalweg.editing.residual import residual_edit
from thalweg.editing.value import value_edits
from thalweg.errors import InputError, UnknownNameError
from thalweg.ops.precision import wide

MOST_DRIFT = 1e-3  # of a no-op, relative to the largest output
OPTIONS = tuple(f.name for f in fields(EditOptions))
Batch = Mapping[str, Tensor] | Tensor


@dataclass(frozen=True)
class Edited:
    """What an edit did. sites: names of the places; layers; scales: parallel and perpendicular by layer; backend: of the attention;
    route: how values were reached, ``""`` elsewhere; active: False where both scales are 1, so that nothing was touched."""

    options: EditOptions
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    scales: Mapping[int, tuple[float, float]]
    backend: str
    route: str
    dtype: str
    active: bool
    notes: tuple[str, ...] = ()
    located: Located | None = field(default=None, repr=False, compare=False)

    def lines(self) -> list[str]:
        """For people: what, where, how."""
        return [
            f"edit: {self.options.describe()}" + ("" if self.active else " (nothing to do)"),
            f"layers: {', '.join(map(str, self.layers))} of {self.located.depth if self.located else '?'}",
            f"attention: {self.backend}{f', values by {self.route}' if self.route else ''}; {self.dtype}",
            *self.notes,
        ]

    def plain(self) -> dict[str, Any]:
        """For records."""
        return {
            "edit": self.options.plain(),
            "sites": list(self.sites),
            "scales": {str(layer): list(scale) for layer, scale in self.scales.items()},
            "backend": self.backend,
            "route": self.route,
            "dtype": self.dtype,
            "active": self.active,
            "notes": list(self.notes),
        }


class Edit(AbstractContextManager):
    """What :func:`edit` gives: to be entered, again and also inside itself, where it acts once more."""

    def __init__(self, enter: Callable[[], AbstractContextManager[Edited]]):
        self._enter = enter
        self._inside: list[AbstractContextManager[Edited]] = []

    def __enter__(self) -> Edited:
        block = self._enter()
        found = block.__enter__()
        self._inside.append(block)
        return found

    def __exit__(self, *error: Any) -> bool | None:
        return self._inside.pop().__exit__(*error)


def edit(
    model: nn.Module,
    options: EditOptions | None = None,
    *,
    map: Any = None,
    calibration: Batch | Iterable[Batch] | None = None,
    forced: bool = False,
    heard: Heard | None = None,
    **values: Any,
) -> Edit:
    """Scale one component of the updates of ``model`` inside the block; entered, it gives an :class:`Edited`.

        with edit(model, site="value", parallel=0.5):
            model.generate(...)

    An update y is split along its reference r, y = a r + rest with a = <y, r> / |r|^2, and becomes parallel * a r + perpendicular * rest.
    Sites: ``value`` (what a head reads of others, along the token's own value; ``exclude_self=False``: all that it reads), ``attention`` and
    ``mlp`` (what is added to the stream, sandwich norm and multiplier included, along the stream before the addition; of several streams,
    along what the site reads), ``block`` (the sum of both, along the input of the block; with both scales 0 the layer is dropped). Weights
    stay as they are; arithmetic in float32 or wider, the result in the dtype of the model; padding is untouched; at scales 1 and 1 nothing
    is attached, so the model is the unedited one bit by bit.
    options, or the fields of :class:`EditOptions` as keywords. map: how the layers are spelled (:func:`thalweg.capture.locate`).
    calibration: batches of model arguments that ``coefficient`` is measured on, once, before the block. forced: compute at scales of 1 too
    (the matched no-op). heard: told of every edited tensor before and after (:mod:`thalweg.editing.auditing`).
    With recomputation of layers in the backward pass, that pass belongs inside the block too.
    Edits nest, the outer one acts first; a watch entered inside sees the edited updates. An edit may be entered again.
    Raises: InputError, UnknownNameError for options that the model cannot have; what :func:`thalweg.capture.attention_tap` raises.
    Source: He et al. 2026 (arXiv 2609.15975); the closed form of the value edit is ours. Deviations: :mod:`thalweg.ops.value_edit`.
    """
    if isinstance(calibration, Iterator):
        calibration = list(calibration)
    return Edit(partial(_entered, model, options, map, calibration, forced, heard, values))


@contextmanager
def _entered(
    model: nn.Module,
    options: EditOptions | None,
    map: Any,
    calibration: Batch | Iterable[Batch] | None,
    forced: bool,
    heard: Heard | None,
    values: Mapping[str, Any],
) -> Iterator[Edited]:
    options = _options(options, values)
    refuse_compiled(model)
    located = locate(model, map)
    places = chosen(located, options)
    backend = backend_of_any(located)
    route = route_of(options, backend)
    layers = tuple(sorted({place.layer for place in places}))
    pools = None
    if options.coefficient is not None:
        pools = gathered(located, places, options, calibration, route)
    made = changes(options, layers, pools, forced=forced)
    active = forced or options.control == "diagonal" or not all(change.is_identity for change in made.values())
    facts = Edited(
        options,
        tuple(place.name for place in places) if options.site != "block" else tuple(f"layers.{i}" for i in layers),
        layers,
        {layer: (change.parallel, change.perpendicular) for layer, change in made.items()},
        backend,
        route,
        dtype_name(model),
        active,
        notes_of(located, options),
        located,
    )
    if not active:
        yield facts
        return
    with _installed(located, places, options, made, route, heard):
        yield facts


@contextmanager
def _installed(
    located: Located,
    places: tuple[SitePlace, ...],
    options: EditOptions,
    made: Mapping[int, Change],
    route: str,
    heard: Heard | None = None,
) -> Iterator[None]:
    passes = Passes()
    with ExitStack() as stack:
        stack.enter_context(passes.followed(located))
        if options.site == "value":
            stack.enter_context(value_edits(located, places, options, made, passes, route, heard))
        else:
            stack.enter_context(residual_edit(located, places, options, made, passes, heard))
        yield


def _options(options: EditOptions | None, values: Mapping[str, Any]) -> EditOptions:
    for name in values:
        if name not in OPTIONS:
            raise UnknownNameError("option of an edit", name, OPTIONS)
    if options is None:
        return EditOptions(**values)
    if values:
        raise InputError(f"give an EditOptions or its fields, not both; got both, with {', '.join(sorted(values))}")
    return options


def backend_of_any(located: Located) -> str:
    """The attention backend; empty for a model that is neither ours nor of transformers."""
    try:
        return backend_of(located.model)
    except InputError:
        return ""


def route_of(options: EditOptions, backend: str) -> str:
    """How values are reached: as asked, else by the attention function, where it can be had, else by hooks."""
    if options.site != "value":
        return ""
    if options.route is not None:
        return options.route
    if options.excludes_self or options.control == "diagonal" or backend in (*WRAPPED, "thalweg"):
        return "tap"
    return "hooks"


def notes_of(located: Located, options: EditOptions) -> tuple[str, ...]:
    """What a reader of the numbers should know."""
    notes = [*located.notes]
    if options.site == "value" and not options.excludes_self and options.control is None and located.causal:
        notes.append(
            "full aggregate: the first token reads itself alone, so all of what it reads is along its own value and is scaled"
        )
    return tuple(notes)


@torch.no_grad()
def gathered(
    located: Located,
    places: tuple[SitePlace, ...],
    options: EditOptions,
    calibration: Batch | Iterable[Batch] | None,
    route: str,
) -> dict[int, Tensor]:
    """Coefficients of the real tokens of the calibration batches by layer, [n] (of values [n h]). Raises: InputError without batches."""
    batches = [] if calibration is None else batches_of(located.model, calibration)
    if not batches:
        raise InputError(
            f"coefficient {options.coefficient!r} is measured on text first; give calibration=[{{'input_ids': ..., 'attention_mask': ...}}]"
        )
    made = {place.layer: Gathering(place.layer, group=options.group) for place in places}
    with _installed(located, places, options.gathering(), made, route):
        for batch in batches:
            located.model(**batch)
    return {layer: torch.cat(gathering.kept) for layer, gathering in made.items()}


def batches_of(model: nn.Module, given: Batch | Iterable[Batch]) -> list[dict[str, Any]]:
    """One batch or several, each arguments by name or token ids [b t], as arguments on the model's device. Raises: InputError."""
    alone = isinstance(given, Mapping | Tensor) or not isinstance(given, Iterable)
    return [called(model, batch) for batch in ([given] if alone else given)]  # type: ignore[list-item]  # one that is none is refused


@dataclass(frozen=True)
class Drift:
    """How far a no-op is from the model without hooks: ``worst`` difference over the largest output, of ``tokens`` real tokens."""

    worst: float
    tokens: int
    backend: str
    allowed: float = MOST_DRIFT


@torch.no_grad()
def matched_noop(
    model: nn.Module,
    batches: Batch | Sequence[Batch],
    options: EditOptions | None = None,
    *,
    map: Any = None,
    allowed: float = MOST_DRIFT,
    **values: Any,
) -> Drift:
    """Run an edit with scales of 1 through the same hooks and backend, computed and not skipped, and compare with the model alone.

    This no-op is the baseline of every comparison. Raises: InputError where it drifts by more than ``allowed`` of the largest output.
    """
    noop = _options(options, values).as_noop()
    worst, tokens, backend = 0.0, 0, ""
    for batch in batches_of(model, batches):
        real = read(batch).real
        plain = _first(model(**batch), real)
        with edit(model, noop, map=map, forced=True) as facts:
            edited = _first(model(**batch), real)
        backend, tokens = facts.backend, tokens + len(plain)
        worst = max(worst, float((edited - plain).abs().max() / plain.abs().max().clamp(min=1e-30)))
    if not worst <= allowed:
        raise InputError(
            f"the edit of {noop.site} with scales 1 moves the output by {worst:.1e} of its largest value (allowed {allowed:.0e}), so "
            f"nothing could be told from it; load the model in a wider dtype or with another attn_implementation"
        )
    return Drift(worst, tokens, backend, allowed)


def _first(output: Any, real: Tensor | None) -> Tensor:
    """Logits or hidden states [n ...] of the real tokens, wide."""
    found = getattr(output, "logits", None)
    found = wide(output[0] if found is None else found)
    return found.flatten(0, 1) if real is None else found[real.to(found.device)]
