"""The attention tap: see, and change, what every attention of a model computes, with the weight of each token on itself.

Models of transformers look their attention function up by a name. The tap registers a wrapper of the one in use under a new name, as
attention **and** as mask function: a name without a mask function gets no mask at all, silently, and the model looks into the future.
Modules of our own carry a slot (``value_edit``) that is called in the same way.
"""

import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.capture.attention_call import AttentionCall
from thalweg.capture.evaluating import evaluating
from thalweg.errors import CaptureError, InputError
from thalweg.ops.precision import wide

OnAttention = Callable[[AttentionCall], Tensor | None]

SLOT = "value_edit"  # of an attention module of ours
WRAPPED = ("eager", "sdpa")
PREFIX = "thalweg_tap_"  # must not contain the name of a backend: transformers looks for those inside
CHECKED = 8  # tokens of a row of the start-up check
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
}  # of the start-up check, relative to the largest output; else COARSE
COARSE = 2e-2

_numbers = itertools.count()
_wrapped: dict[str, str] = {}  # name of an active tap -> the name that it wraps
_proven: "weakref.WeakKeyDictionary[nn.Module, set[str]]" = weakref.WeakKeyDictionary()


@contextmanager
def attention_tap(model: nn.Module, on_attention: OnAttention, *, check: bool = True) -> Iterator[str]:
    """Call ``on_attention`` with every :class:`AttentionCall` of ``model`` inside the block; gives the name of the wrapped backend.

    on_attention may return another output [b q h dv], which takes the place of the first; None keeps it. Taps nest: the inner one sees
    what the outer one returned. Whatever happens inside, the model has its attention back afterwards, also where taps are left in another
    order than they were entered. A tap acts on every pass of the model, of other threads too.
    check: before the first tap of a model and backend, compare a left- and a right-padded batch with the unwrapped model.
    Raises: InputError for a compiled model, for a backend that is neither eager nor sdpa (the weights cannot be had), and for a model
    whose attention cannot be exchanged; CaptureError if the wrapped model differs from the unwrapped one.
    """
    refuse_compiled(model)
    slots = [module for module in model.modules() if SLOT in vars(module)]
    with ExitStack() as stack:
        if slots:
            for module in slots:
                stack.enter_context(_slotted(module, on_attention))
            yield "thalweg"
            return
        yield stack.enter_context(_wrapping(model, on_attention, check))


def refuse_compiled(model: nn.Module) -> None:
    """Raises: InputError for a model that was compiled: its graph does not call Python."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            where = f"its module {name!r}" if name else "it"
            raise InputError(
                f"the model is compiled ({where}), so nothing can look into it; give the model before torch.compile"
            )


def backend_of(model: nn.Module) -> str:
    """The attention backend at work under every tap: ``thalweg`` for our own, else what transformers calls it."""
    if any(SLOT in vars(module) for module in model.modules()):
        return "thalweg"
    name = str(getattr(_shell(model).config, "_attn_implementation", None))
    while name in _wrapped:
        name = _wrapped[name]
    return name


@contextmanager
def _slotted(module: nn.Module, on_attention: OnAttention) -> Iterator[None]:
    before: OnAttention | None = getattr(module, SLOT)

    def both(call: AttentionCall) -> Tensor | None:
        earlier = None if before is None else before(call)
        if earlier is not None:
            call.output = earlier
        later = on_attention(call)
        return earlier if later is None else later

    setattr(module, SLOT, both)
    try:
        yield
    finally:
        setattr(module, SLOT, before)


@contextmanager
def _wrapping(model: nn.Module, on_attention: OnAttention, check: bool) -> Iterator[str]:
    with _LOCK:
        shell, backend = _shell(model), backend_of(model)
        if backend not in WRAPPED:
            raise InputError(
                f"attention backend {backend!r} keeps its weights to itself, so a token's weight on itself cannot be had; "
                f"load the model with attn_implementation='sdpa' or 'eager'"
            )
        if not shell._can_set_attn_implementation():
            raise InputError(
                f"{type(shell).__name__} does not take its attention from transformers' AttentionInterface, so it cannot be tapped; "
                "edits of the residual stream work without"
            )
        current = shell.config._attn_implementation
        name = f"{PREFIX}{next(_numbers)}"
        tap = _Tap(name, [(config, config._attn_implementation_internal) for config in _configs(shell)])

        expected = _outputs(shell) if check and backend not in _proven.get(shell, ()) else None
        _stacks.setdefault(shell, []).append(tap)
        try:
            _register(tap, current, backend, on_attention)
            _set(shell, name, current)
            if expected is not None:
                _prove(shell, backend, expected, tap)
        except BaseException:
            _leave(shell, tap)
            raise
        tap.heard = True
    try:
        yield backend
    finally:
        with _LOCK:
            _leave(shell, tap)


@contextmanager
def standing_tap(backend: str, on_attention: OnAttention) -> Iterator[str]:
    """A tap of no model, for the configurations that take the name it gives: as :func:`attention_tap`, but nothing is checked.

    backend: ``eager`` or ``sdpa``, which it wraps.
    """
    tap = _Tap(f"{PREFIX}{next(_numbers)}", [], heard=True)
    with _LOCK:
        _register(tap, backend, backend, on_attention)
    try:
        yield tap.name
    finally:
        with _LOCK:
            _unregister(tap)


@dataclass
class _Tap:
    """A tap of a model: its name, what configurations said before it; whether the model called it, it is heard, its block has ended."""

    name: str
    before: list[tuple[Any, str]]
    called: bool = False
    heard: bool = False
    ended: bool = False


_stacks: "weakref.WeakKeyDictionary[nn.Module, list[_Tap]]" = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()  # entering and leaving, by any thread


def _register(tap: _Tap, current: str, backend: str, on_attention: OnAttention) -> None:
    """Make the name of a tap known to transformers, as attention and as mask. current: the name that it wraps."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    def tapped(module, query, key, value, attention_mask, *args, **kwargs):
        function = _function(current, module)
        output, weights = function(module, query, key, value, attention_mask, *args, **kwargs)
        tap.called = True
        if not tap.heard or getattr(module, "is_cross_attention", False):
            return output, weights
        if kwargs.get("position_bias") is not None:
            raise InputError(
                "this attention adds a position bias that the tap does not know; edit its residual stream instead"
            )
        causal = _causal(backend, module, query, attention_mask, kwargs)

        def again(mask: Tensor, key: Tensor = key, value: Tensor = value) -> Tensor:
            return function(module, query, key, value, mask, *args, **kwargs)[0]

        call = AttentionCall(
            module,
            query,
            key,
            value,
            attention_mask,
            kwargs.get("scaling"),
            kwargs.get("softcap"),
            _sinks(module, kwargs),
            output,
            again,
            causal,
            kwargs.get("dropout") or 0.0,
        )
        changed = on_attention(call)
        return output if changed is None else changed, weights

    _wrapped[tap.name] = current
    AttentionInterface.register(tap.name, tapped)
    AttentionMaskInterface.register(tap.name, ALL_MASK_ATTENTION_FUNCTIONS[current])


def _unregister(tap: _Tap) -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface._global_mapping.pop(tap.name, None)
    AttentionMaskInterface._global_mapping.pop(tap.name, None)
    _wrapped.pop(tap.name, None)


def _leave(shell: Any, tap: _Tap) -> None:
    """End a tap. One that others were put over since is passed through, and goes when they have gone."""
    tap.heard, tap.ended = False, True
    stack = _stacks.get(shell, [tap])  # of a model that is gone with its tap still on it, nothing is known any more
    while stack and stack[-1].ended:
        top = stack.pop()
        for config, name in top.before:
            config._attn_implementation_internal = name
        _unregister(top)


def _shell(model: nn.Module) -> Any:
    """The outermost model of transformers: ``model``, or what a wrapper holds."""
    from transformers.modeling_utils import PreTrainedModel

    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None:
        raise InputError(
            f"{type(model).__name__} is no model of transformers or thalweg, so its attention cannot be tapped; "
            "edits of the residual stream work without"
        )
    return found


def _configs(shell: Any) -> list[Any]:
    """Every configuration that says which attention is used."""
    from transformers.configuration_utils import PreTrainedConfig

    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            for key in config.sub_configs:
                add(getattr(config, key, None))

    for module in shell.modules():
        add(getattr(module, "config", None))
    return list(found.values())


def _set(shell: Any, name: str, current: str) -> None:
    """Give the new name to the configurations that had the current one, and leave the others (a vision tower) alone."""
    others = [c for c in _configs(shell) if c._attn_implementation_internal != current]
    before = [(config, config._attn_implementation_internal) for config in others]
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        shell.set_attn_implementation(name)
    finally:
        logger.setLevel(level)
    for config, theirs in before:
        config._attn_implementation_internal = theirs


def _function(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """The attention function that ``module`` would call under ``name``: eager ones stand beside the class."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for kind in type(module).__mro__:
        beside = sys.modules.get(kind.__module__)
        if name == "eager" and hasattr(beside, "eager_attention_forward"):
            return beside.eager_attention_forward  # type: ignore[union-attr]  # it has it
        own = getattr(beside, "ALL_ATTENTION_FUNCTIONS", None)
        if name != "eager" and own is not None:
            return own[name]
    if name != "eager":
        return ALL_ATTENTION_FUNCTIONS[name]
    raise InputError(
        f"the eager attention of {type(module).__name__} was not found; load the model with attn_implementation='sdpa'"
    )


def _causal(backend: str, module: nn.Module, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether a query sees the past only. Eager attention without a mask hides nobody, whatever the module says."""
    said = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if said is None else said)
    return causal and not (backend == "eager" and mask is None and query.shape[2] > 1)


def _sinks(module: nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
    found = kwargs.get("s_aux")
    return found if found is not None else getattr(module, "sinks", None)


def _prove(shell: Any, backend: str, expected: list[Tensor], tap: _Tap) -> None:
    """Raises: CaptureError if the wrapped model is another function on padded rows, or does not call the wrapper."""
    found = _outputs(shell)
    if not tap.called:
        raise InputError(
            f"{type(shell).__name__} does not call its attention by name, so it cannot be tapped; edits of the residual stream work without"
        )
    for side, theirs, ours in zip(("left", "right"), expected, found, strict=True):
        lost = (
            theirs.isnan() & ours.isnan()
        )  # some models cannot pad on this side in this dtype, with the tap or without
        theirs, ours = theirs.masked_fill(lost, 0.0), ours.masked_fill(lost, 0.0)
        error = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
        allowed = TOLERANCE.get(shell.dtype, COARSE)
        if not error <= allowed:
            raise CaptureError(
                f"wrapping the {backend} attention changed {type(shell).__name__} on a {side}-padded batch by {error:.1e} of its largest "
                f"output (allowed {allowed:.0e}), as when a mask is lost; nothing was measured: load it with another attn_implementation"
            )
    _proven.setdefault(shell, set()).add(backend)


def _outputs(shell: Any) -> list[Tensor]:
    """What the model says of a left- and of a right-padded batch, at the real tokens."""
    words = shell.get_input_embeddings()
    generator = torch.Generator().manual_seed(0)
    device = words.weight.device  # meta where the weights are fetched when they are needed
    ids = torch.randint(0, words.num_embeddings, (2, CHECKED), generator=generator)
    ids = ids if device.type == "meta" else ids.to(device)
    found = []
    with evaluating(shell):
        for side in ("left", "right"):
            mask = torch.ones_like(ids)
            mask[0, : CHECKED // 2 - 1] = 0
            mask = mask if side == "left" else mask.flip(1)
            output = shell(input_ids=ids, attention_mask=mask)
            tensor = getattr(output, "logits", None)
            tensor = output[0] if tensor is None else tensor
            found.append(wide(tensor)[mask.bool()] if tensor.shape[:2] == mask.shape else wide(tensor))
    return found
