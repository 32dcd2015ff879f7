"""The proof that what was located is the residual stream: every write replayed, then the end of the model.

At every site the next state, as the model had it, must be what the rule of the site makes of the state and the update, as the model had
them; the next site must begin with that next state; and what the model gives at the end must follow from the last state: the logits, with
their scale and soft cap, or the last hidden state of a model that has no unembedding over its stream.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from thalweg.capture.evaluating import evaluating
from thalweg.capture.layout import Located
from thalweg.capture.limits import vocabulary_of
from thalweg.capture.watching import Event, HookTap, Tap, item_of, watch
from thalweg.capture.weights import not_finite
from thalweg.errors import InputError, ProofError
from thalweg.ops.precision import wide

# Largest error of a token, relative to the norm of what it should be.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
OF_UPDATE = 30  # times the tolerance: largest error of a site relative to its step, so that a small update is seen too


@dataclass(frozen=True)
class Proof:
    """What a replay came to.

    worst, at: largest error and where. sites: the error of every site, that of its worst token relative to the norm of its next state.
    logits: the same of the ``end``: ``logits`` or ``last_hidden_state``. dtype: of the model. tolerance: what was allowed. tokens: how many
    were looked at, padding left out.
    """

    family: str
    found_by: str
    worst: float
    at: str
    dtype: str
    tolerance: float
    sites: dict[str, float]
    logits: float
    end: str
    tokens: int


def prove(located: Located, batch: Mapping[str, Any] | Tensor, tolerance: float | None = None) -> Proof:
    """Replay a forward pass at every site and at the end.

    batch: what the model is called with (``input_ids``, ``attention_mask`` ...), or token ids [b t]. tolerance: largest error of a token
    relative to the norm of its state (default: by dtype, ``TOLERANCE``). Runs in evaluation mode, without gradients.
    Raises: ProofError (exit code 5) that names the first site that fails; InputError for a dtype without a tolerance.
    """
    model, dtype = located.model, dtype_of(located.model)
    if tolerance is None and dtype not in TOLERANCE:
        raise InputError(f"a proof in {dtype} has no stated tolerance; give one")
    allowed = TOLERANCE[dtype] if tolerance is None else tolerance
    replay, ends = Replay(located, allowed), []
    with evaluating(model), watch(located, replay):
        handle = located.module(located.base).register_forward_hook(lambda *call: ends.append(call[-1]))
        try:
            output = run(model, batch)
        finally:
            handle.remove()
        end, last = replay.finish(output, ends[-1])
    errors = {**replay.errors, end: last}
    at = max(errors, key=errors.__getitem__)
    return Proof(
        family=located.family,
        found_by=located.found_by,
        worst=errors[at],
        at=at,
        dtype=dtype_name(model),
        tolerance=allowed,
        sites=replay.errors,
        logits=last,
        end=end,
        tokens=replay.tokens,
    )


class Replay:
    """Checks every event of one pass against the rule of its site, and keeps the errors only."""

    def __init__(self, located: Located, allowed: float):
        self.located, self.allowed = located, allowed
        self.tap: Tap = located.tap(located) if located.tap is not None else HookTap(located)
        self.source = f"the map of {located.family!r} (found by {located.found_by})"
        self.errors: dict[str, float] = {}
        self.tokens = 0
        self.side_by_side: list[Event] = []
        self.last: Event | None = None

    def __call__(self, event: Event) -> None:
        if not self.errors:
            self.tokens = int(event.real.sum())
        before, self.last = self.last, event
        self.begins(before, event)
        self.side_by_side.append(event)
        if event.place.parallel and self._more(event):
            return
        events, self.side_by_side = self.side_by_side, []
        written, observed, begun = self.tap.write(events), self.tap.observed(event), self.tap.begun(event)
        error, share = gap(written, observed, event.real), missed(written, observed, begun, event.real)
        for e in events:
            self.errors[e.place.name] = error
        if not error <= self.allowed or not share <= OF_UPDATE * self.allowed:
            self.refuse(event, events, error, share)

    def _more(self, event: Event) -> bool:
        """Whether another branch of the same sum follows."""
        behind = self.located.sites[event.place.index + 1 :]
        return bool(behind) and behind[0].parallel and behind[0].layer == event.place.layer

    def begins(self, before: Event | None, event: Event) -> None:
        """A site begins with the next state of the one before; a branch side by side with the state of the first. Raises: ProofError."""
        if before is None:
            return
        joined = bool(self.side_by_side)
        wanted = self.tap.begun(self.side_by_side[0]) if joined else self.tap.observed(before)
        error = gap(self.tap.begun(event), wanted, event.real)
        if not error <= self.allowed:
            how = "reads" if joined else "ended with"
            self.refuse_line(
                event, f"it begins with another state than {before.place.name} {how}, off by {error:.2g} of its norm"
            )

    def refuse(self, event: Event, events: list[Event], error: float, share: float) -> None:
        if not all(x[event.real].isfinite().all() for x in tensors(self.tap.observed(event))):
            self.refuse_values(event.place.name)
        names = " + ".join(e.place.update for e in events)
        self.refuse_line(
            event,
            f"state + update ({names}) is not the next state: off by {error:.2g} of its norm and {share:.2g} of the step",
        )

    def refuse_values(self, at: str) -> None:
        """Raises: ProofError of a model that gives values that are not finite ``at`` a place, naming the weight that holds such values."""
        model = self.located.model
        name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
        if found := not_finite(model):
            raise ProofError(
                f"{name}: {found}, so nothing can be proved or measured; take other weights or save them anew"
            )
        raise ProofError(
            f"{name} itself gives values that are not finite at {at}, so nothing can be proved; use another dtype, "
            f"attention backend or side of padding"
        )

    def refuse_line(self, event: Event, what: str) -> None:
        """Raises: ProofError in one line."""
        place = event.place
        raise ProofError(
            f"{self.source} fails at {place.name} ({place.block}): {what} "
            f"(allowed: {self.allowed:g}); give a map of the layers that fits"
        )

    def finish(self, output: Any, base: Any) -> tuple[str, float]:
        """What the model gave against what follows from the last state -> its name and its error. Raises: ProofError."""
        assert self.last is not None
        found, event = self.located, self.last
        replayed, name = self.tap.end(event), "last_hidden_state"
        if found.head is not None and found.causal:
            name, replayed = "logits", found.module(found.head)(replayed) * found.logit_scale
            if found.logit_softcap is not None:
                replayed = found.logit_softcap * torch.tanh(replayed / found.logit_softcap)
            got = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        else:
            got = item_of(base, 0)
        if not isinstance(got, Tensor):
            raise ProofError(
                f"{type(found.model).__name__} gave no logits, which its head ({found.head}) should make; give a map without a head"
            )
        kept = got.shape[1]
        error = gap(replayed[:, -kept:].to(got.device), got, event.real[:, -kept:].to(got.device))
        if error == math.inf and not got[event.real[:, -kept:].to(got.device)].isfinite().all():
            self.refuse_values(f"the {name}")
        if not error <= self.allowed:
            raise ProofError(
                f"{self.source} fails at the {name}: they do not follow from the last state "
                f"by {found.final_norm or 'no norm'} and {found.head or 'no head'}, off by {error:.2g} of their norm "
                f"(allowed: {self.allowed:g})"
            )
        return name, error


def gap(got: Any, wanted: Any, real: Bool[Tensor, "b t"]) -> float:
    """Largest error of a real token over all tensors: norm of the difference over that of what is wanted; inf where shapes differ."""
    worst = 0.0
    pairs = list(zip(tensors(got), tensors(wanted), strict=False))
    if len(tensors(got)) != len(tensors(wanted)) or any(
        a.shape != b.shape or a.shape[:2] != real.shape for a, b in pairs
    ):
        return math.inf
    for a, b in pairs:
        if a is b or a.data_ptr() == b.data_ptr():
            continue
        off, size = rows(wide(a) - wide(b), real), rows(wide(b), real)
        share = torch.where(off == 0, off, off / size)
        worst = max(worst, float(share.nan_to_num(math.inf).max()) if share.numel() else 0.0)
    return worst


def missed(written: Any, observed: Any, begun: Any, real: Tensor) -> float:
    """Norm of the error of a whole site over the norm of its step, next state minus state; 0 where there is no error."""
    off = step = 0.0
    for a, b, c in zip(tensors(written), tensors(observed), tensors(begun), strict=False):
        if a.shape != b.shape or b.shape != c.shape:
            return math.inf
        off += float(rows(wide(a) - wide(b), real).square().sum())
        step += float(rows(wide(b) - wide(c), real).square().sum())
    return 0.0 if off == 0 else math.sqrt(off / step) if step else math.inf


def rows(x: Tensor, real: Tensor) -> Tensor:
    """Norms of the real tokens of [b t ...]."""
    return x[real].flatten(1).norm(dim=1)


def tensors(state: Any) -> list[Tensor]:
    """Every tensor of a pytree, in order."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def run(model: nn.Module, batch: Mapping[str, Any] | Tensor, **more: Any) -> Any:
    """Call the model. batch: token ids [b t], which it takes first, or arguments by name. Raises: as :func:`called`."""
    call = called(model, batch)
    return model(call["input_ids"], **more) if isinstance(batch, Tensor) else model(**call, **more)


def called(model: nn.Module, batch: Mapping[str, Any] | Tensor) -> dict[str, Any]:
    """The arguments by name, tensors on the (first) device of the model.

    Raises: InputError for weights that are not there, and for what is no batch of this model: ids in another form than [b t], none, or unknown.
    """
    call = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch) if isinstance(batch, Mapping) else None
    if call is None:
        raise InputError(
            f"a batch is token ids [b t] or arguments by name ({{'input_ids': ...}}), got {type(batch).__name__}"
        )
    _check_tokens(model, call)
    get = getattr(model, "get_input_embeddings", None)
    table = get() if get is not None else None
    device = next((p.device for p in (model if table is None else table).parameters()), torch.device("cpu"))
    if device.type == "meta":
        if not hasattr(model, "hf_device_map"):
            raise InputError(f"the weights of {type(model).__name__} are on the meta device; load them first")
        return call  # offloaded: its own hooks move what it is given
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}


def _check_tokens(model: nn.Module, call: Mapping[str, Any]) -> None:
    name = next((n for n in ("input_ids", "inputs_embeds") if call.get(n) is not None), None)
    if name is None:
        return
    tokens, whole = call[name], name == "input_ids"
    if not isinstance(tokens, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(tokens).__name__}; write torch.tensor([...])")
    if tokens.ndim != (2 if whole else 3) or not tokens.numel():
        raise InputError(
            f"{name} must be [b t{'' if whole else ' d'}] with at least one token, got {list(tokens.shape)}"
        )
    if not whole or tokens.device.type == "meta":
        return
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise InputError(f"input_ids are whole numbers, got {str(tokens.dtype).removeprefix('torch.')}")
    size, low, high = vocabulary_of(model), int(tokens.min()), int(tokens.max())
    if low < 0 or (size is not None and high >= size):
        most = "" if size is None else f" to {size - 1}"
        raise InputError(f"token ids of this model are 0{most}, got {low if low < 0 else high}")


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def dtype_name(model: nn.Module) -> str:
    """:func:`dtype_of` as it stands in records."""
    return str(dtype_of(model)).removeprefix("torch.")
