"""Locate the stream of a model that no table knows: run a few tokens, and decide by replay which sums the stream is made of.

The list of blocks is the largest list of modules that hand [b t d] on. In every block a path is sought from what it gets to what it gives:
``next = state + m update`` with an update that some module gave and a next state that some module got (or the block gives), ``norm(state +
update)`` in post-norm blocks, or ``state + update + update`` where both branches read the state. What cannot be replayed is refused.
"""

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.capture.evaluating import evaluating
from thalweg.capture.layout import Located, Part
from thalweg.capture.maps import Map, SiteMap, place_blocks
from thalweg.capture.proof import OF_UPDATE, TOLERANCE, gap, missed
from thalweg.errors import CaptureError, InputError

ROWS, LENGTH = 2, 7  # the tokens that decide
PARTS: tuple[Part, ...] = ("whole", "last", "tail")


@dataclass(frozen=True)
class Call:
    """One tensor that a module of a block got (``side`` in) or gave (out), in the order of time."""

    name: str
    side: str
    value: Tensor
    given: Tensor | None = None  # of an output: what the module had got
    light: bool = False  # a norm, a dropout: vectors are all its weights


@dataclass(frozen=True)
class Step:
    """One write: the next state is ``state + multiplier (sum of updates)``, or a norm of that."""

    updates: tuple[Call, ...]
    reads: str
    multiplier: float = 1.0
    norm: str = ""


class Watched:
    """One pass over a few tokens, with every [b t d] that the modules inside the blocks got and gave."""

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module], ids: Tensor):
        self.calls: dict[str, list[Call]] = {name: [] for name in blocks}
        self.outside: list[Call] = []
        self.rerun: dict[str, Any] = {}
        inside = {id(m): (block, name) for block, b in blocks.items() for name, m in b.named_modules()}
        names = {id(m): name for name, m in model.named_modules()}
        handles = []

        def note(module: nn.Module, side: str, found: Any, got: Any = None) -> None:
            tensor = first_tensor(found)
            if tensor is None:
                return
            where = inside.get(id(module))
            call = Call(where[1] if where else names[id(module)], side, tensor.detach().clone(), got, is_light(module))
            (self.calls[where[0]] if where else self.outside).append(call)

        for module in model.modules():
            got: list[Tensor | None] = []

            def before(m: nn.Module, args: Any, kwargs: Any, got: list[Tensor | None] = got) -> None:
                found = first_tensor((*args, kwargs.get("hidden_states"), *kwargs.values()))
                got.append(None if found is None else found.detach().clone())
                note(m, "in", found)
                self.rerun[names[id(m)]] = (args, kwargs)

            def after(m: nn.Module, args: Any, output: Any, got: list[Tensor | None] = got) -> None:
                note(m, "out", output, got[-1] if got else None)

            handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ]
        more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        try:
            with evaluating(model), torch.compiler.set_stance("force_eager"):
                self.output = model(ids, **more)
        finally:
            for handle in handles:
                handle.remove()


def by_structure(model: nn.Module) -> Located:
    """The description that a replay over a few tokens supports. Raises: CaptureError where none does, InputError for a model without tokens."""
    ids = some_tokens(model)
    refusals = []
    for name, blocks in block_lists(model):
        seen = Watched(model, {f"{name}.{k}": b for k, b in blocks.named_children()}, ids)
        try:
            return _described(model, name, seen, ids)
        except CaptureError as error:
            refusals.append(str(error))
    kind = type(model).__name__
    if not refusals:
        raise CaptureError(
            f"{kind} is of no known family and has no list of blocks; give a map of its layers (docs/capture.md)"
        )
    raise CaptureError(
        f"{kind} is of no known family, and its structure could not be replayed: {refusals[0]}; give a map of its layers (docs/capture.md)"
    )


def block_lists(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Lists of modules that may be the layers, the largest first."""
    found: list[tuple[int, str, nn.Module]] = []
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{outer}.") for _, outer, _ in found)
        if name and isinstance(module, nn.ModuleList | nn.Sequential) and len(module) and not inner:
            found.append((sum(p.numel() for p in module.parameters()), name, module))
    return [(name, module) for _, name, module in sorted(found, key=lambda f: -f[0])]


def some_tokens(model: nn.Module) -> Tensor:
    """A few token ids, without those at the start of the vocabulary, which may mean padding. Raises: InputError."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if not embeddings:
        raise InputError(f"{type(model).__name__} has no embedding of tokens; give a map of its layers")
    get = getattr(model, "get_input_embeddings", None)
    own = get() if get is not None else None
    table = own if isinstance(own, nn.Embedding) else max(embeddings, key=lambda e: e.num_embeddings)
    low = min(5, table.num_embeddings - 1)
    ids = torch.randint(low, table.num_embeddings, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return ids.to(table.weight.device)


def _described(model: nn.Module, list_name: str, seen: Watched, ids: Tensor) -> Located:
    maps: list[tuple[str, tuple[SiteMap, ...], bool]] = []
    for block, calls in seen.calls.items():
        steps = _solve(block, calls)
        sites = [_site(model, seen, block, step, update) for step in steps for update in step.updates]
        maps.append((block, tuple(sites), any(len(step.updates) > 1 for step in steps)))
    width = next(c.value.shape[-1] for calls in seen.calls.values() for c in calls if c.name == "")
    last = list(seen.calls.values())[-1][-1].value
    ends = _end(model, list_name, seen, last)
    spelled = Map(blocks=list_name, sites=maps[0][1], width=width, causal=_causal(model, ids, seen.output), **ends)
    located = place_blocks(model, spelled, maps, found_by="structure")
    from thalweg.capture.structure_heads import with_heads
    from thalweg.capture.structure_inner import with_inner

    return with_inner(with_heads(located, ids), ids)


def _solve(block: str, calls: list[Call]) -> list[Step]:
    """The writes of one block, in order. Raises: CaptureError."""
    if not calls or calls[0].name != "" or calls[-1].name != "":
        raise CaptureError(f"{block} is not called with a tensor of the stream")
    start, end = calls[0].value, calls[-1].value
    if start.ndim != 3 or end.shape != start.shape:
        raise CaptureError(f"{block} maps {list(start.shape)} to {list(end.shape)}, which is no stream [b t d]")
    often = Counter(c.name for c in calls if c.side == "out")
    if often[""] > 1:
        raise CaptureError(f"{block} is called {often['']} times in one pass")
    # a module that is called twice has no output of its own to point at
    same = [c if c.value.shape == start.shape and often[c.name] == 1 else None for c in calls]
    found = _search(same, 0, start)
    if found is None:
        raise CaptureError(f"no sum of what its modules give leads from what {block} gets to what it gives")
    return found


def _search(calls: list[Call | None], at: int, state: Tensor) -> list[Step] | None:
    """Steps from ``state``, held since call ``at``, to the output of the block, which is the last call."""
    finish = len(calls) - 1
    reads = next(
        (c.name for c in calls[at:finish] if c is not None and c.side == "in" and c.name and _equal(c.value, state)), ""
    )
    updates: list[tuple[int, Call]] = [
        (i, c) for i, c in enumerate(calls) if i > at and i < finish and c is not None and c.side == "out"
    ]
    for i in range(at + 1, len(calls)):
        nxt = calls[i]
        if nxt is None or (nxt.side == "out" and i < finish) or _equal(nxt.value, state):
            continue
        for j, update in reversed(updates):  # the last module that gave it wraps the others
            if j >= i:
                continue
            factor = _factor(state, update.value, nxt.value)
            if factor is None:
                continue
            for norm, value, k in _states(calls, i, nxt, finish):
                rest = [] if k == finish or (k == i == finish) else _search(calls, k, value)
                if rest is not None:
                    return [Step((update,), reads, factor, norm), *rest]
    return _side_by_side(calls, state, reads, updates)


def _states(calls: list[Call | None], i: int, nxt: Call, finish: int) -> list[tuple[str, Tensor, int]]:
    """What the state may be after a sum was seen: the sum, or what the module that got it made of it. With the call that shows it."""
    found = [("", nxt.value, i)]
    if i == finish:
        return found
    after = next(
        (k for k, c in enumerate(calls) if k > i and c is not None and c.side == "out" and c.name == nxt.name), None
    )
    if after is not None:
        made = calls[after]
        assert made is not None
        ends = _equal(made.value, calls[finish].value)  # type: ignore[union-attr]  # the last call is the block's
        found.append((nxt.name, made.value, finish if ends else after))
    return found


def _side_by_side(
    calls: list[Call | None], state: Tensor, reads: str, updates: list[tuple[int, Call]]
) -> list[Step] | None:
    """Two branches that both read the state and are added at once, at the end of the block."""
    end = calls[-1]
    assert end is not None
    read_by = [
        c.value for c in calls if c is not None and c.side == "out" and c.given is not None and _equal(c.given, state)
    ]
    tops = _apart(updates)
    for i, (_, first) in enumerate(tops):
        for _, second in tops[i + 1 :]:
            total = state + first.value + second.value
            if not _near(total, end.value, state):
                continue
            inputs = [_got(calls, _sublayer(calls, update)) for update in (first, second)]
            if all(x is not None and any(_equal(x, y) for y in (state, *read_by)) for x in inputs):
                return [Step((first, second), reads)]
    return None


def _apart(updates: list[tuple[int, Call]]) -> list[tuple[int, Call]]:
    """One call for every value: the last that gave it."""
    found: list[tuple[int, Call]] = []
    for i, call in updates:
        found = [(j, c) for j, c in found if not _equal(c.value, call.value)]
        found.append((i, call))
    return found


def _site(model: nn.Module, seen: Watched, block: str, step: Step, update: Call) -> SiteMap:
    name = _sublayer(seen.calls[block], update)
    whole = f"{block}.{name}"
    kind = "feed_forward"
    if _mixes_tokens(model.get_submodule(whole), seen.rerun.get(whole)):
        names = [name, *(type(m).__name__ for m in model.get_submodule(whole).modules())]
        kind = "attention" if any("att" in n.lower() for n in names) else "mixer"
    return SiteMap(
        kind,
        name,
        reads=step.reads,
        update=update.name,
        norm_after=step.norm,
        multiplier=step.multiplier,
        no_heads="heads could not be proved" if kind == "attention" else "",
    )


def _end(model: nn.Module, list_name: str, seen: Watched, last: Tensor) -> dict[str, Any]:
    """Final norm, head, scale, soft cap and base, by replay of what came after the last block. Raises: CaptureError."""
    after = [c for c in seen.outside if c.side == "out"]
    norm = next(
        (c for c in after if c.given is not None and _equal(c.given, last) and c.value.shape == last.shape and c.light),
        None,
    )
    hidden = last if norm is None else norm.value
    found: dict[str, Any] = {"final_norm": norm.name if norm else ""}
    logits = seen.output if isinstance(seen.output, Tensor) else getattr(seen.output, "logits", None)
    base = next((c.name for c in after if list_name.startswith(f"{c.name}.") and _equal(c.value, hidden)), None)
    if isinstance(logits, Tensor) and logits.ndim == 3:
        cap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
        for call in after:
            if call.given is None or not _equal(call.given, hidden) or call.value.shape != logits.shape:
                continue
            if isinstance(cap, int | float) and _equal(cap * torch.tanh(call.value / cap), logits):
                return found | {"head": call.name, "logit_softcap": float(cap), "base": base or ""}
            scale = _factor(torch.zeros_like(logits), call.value, logits)
            if scale is not None:
                return found | {"head": call.name, "logit_scale": scale, "base": base or ""}
    if base is None:
        raise CaptureError("what the model gives does not follow from what its last block gives")
    return found | {"base": base}


def _causal(model: nn.Module, ids: Tensor, output: Any) -> bool:
    """Whether the last token changes nothing at those before."""
    other = ids.clone()
    other[:, -1] = torch.where(ids[:, -1] == ids[:, 0], ids[:, 1], ids[:, 0])
    more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        before, after = (first_tensor(x)[:, :-1] for x in (output, model(other, **more)))  # type: ignore[index]  # gave a tensor before
    return gap(after, before, torch.ones(before.shape[:2], dtype=torch.bool)) < 1e-3


def _mixes_tokens(module: nn.Module, call: Any) -> bool:
    """Whether what a sublayer gives at later tokens depends on the first."""
    if call is None:
        return False
    args, kwargs = call
    held: list[Tensor] = []

    def nudge(x: Any) -> Any:
        if held or not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        held.append(x)
        x = x.clone()
        x[:, 0] = x[:, 0].flip(-1) + 1
        return x

    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        moved_args = tuple(nudge(x) for x in args)
        moved = {k: nudge(v) if k in ("hidden_states", "x") or not held else v for k, v in kwargs.items()}
        before, after = first_tensor(module(*args, **kwargs)), first_tensor(module(*moved_args, **moved))
    if before is None or after is None or before.shape != after.shape:
        return False
    later = torch.ones(before[:, 1:].shape[:2], dtype=torch.bool, device=before.device)
    return gap(before[:, 1:], after[:, 1:], later) > TOLERANCE.get(before.dtype, 1e-2)


def first_tensor(found: Any) -> Tensor | None:
    """A tensor, or the first of several."""
    if isinstance(found, Tensor):
        return found
    values = found.values() if hasattr(found, "values") else found if isinstance(found, tuple | list) else ()
    return next((x for x in values if isinstance(x, Tensor)), None)


def _sublayer(calls: "list[Call | None] | list[Call]", update: Call) -> str:
    """The outermost module that made an update: of a norm after a sublayer, the sublayer."""
    outs = [c for c in calls if c is not None and c.side == "out" and c.name]
    origin = next(c for c in outs if _equal(c.value, update.value))
    if origin.light and origin.given is not None:
        origin = next((c for c in outs if _equal(c.value, origin.given)), origin)  # type: ignore[arg-type]  # not None
    return _top(origin.name)


def _got(calls: list[Call | None], name: str) -> Tensor | None:
    return next((c.value for c in calls if c is not None and c.side == "in" and c.name == name), None)


def _top(name: str) -> str:
    """The outermost module of a dotted name, with its number where it stands in a list."""
    first, _, rest = name.partition(".")
    second = rest.partition(".")[0]
    return f"{first}.{second}" if second.isdigit() else first


def is_light(module: nn.Module) -> bool:
    """Whether a module is no more than a norm, a scale or a dropout."""
    return not list(module.children()) and all(p.ndim <= 1 for p in module.parameters())


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a is b or torch.equal(a, b))


def _factor(state: Tensor, update: Tensor, following: Tensor) -> float | None:
    """m where ``state + m update`` is the next state, else None."""
    if _near(state + update, following, state):
        return 1.0
    if update.dtype not in (torch.float32, torch.float64):
        return None
    step, u = (following - state).double(), update.double()
    power = float(u.square().sum())
    factor = float((step * u).sum()) / power if power else 0.0
    rounded = float(f"{factor:.6g}")
    for m in (rounded, factor):
        if m and _near(state + m * update, following, state):
            return m
    return None


def _near(got: Tensor, wanted: Tensor, state: Tensor) -> bool:
    real = torch.ones(got.shape[:2], dtype=torch.bool, device=got.device)
    allowed = TOLERANCE.get(got.dtype, 1e-2)
    return gap(got, wanted, real) <= allowed and missed(got, wanted, state, real) <= OF_UPDATE * allowed
