"""The battery's own test: the bugs of the field, each as a small change to a stream, and the checks that must reject it.

A battery that lets one of these through is itself broken. Most are known from public code: streams mixed and then thrown away, a mixing
matrix applied transposed, a gate's bias overwritten by a later initialisation, a pooling that sees the future.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from thalweg.connections.base import Context, State, Stream, StreamSite, Tokens, tensors_of
from thalweg.ops.norms import Norm
from thalweg.testing.compare import differentiate
from thalweg.testing.subjects import Subject, embedding_for, random_state, scramble, sublayers_for

Mutate = Callable[[Stream], Stream]
Applies = Callable[[Subject, Mutate], bool]


@dataclass(frozen=True)
class Mutant:
    """One bug. ``caught_by``: every check that must reject it (where the check applies). ``mutate`` changes a fresh stream and returns it."""

    name: str
    words: str
    caught_by: tuple[str, ...]
    mutate: Mutate
    condition: Applies

    def applies(self, subject: Subject) -> bool:
        """Whether the bug is possible here and changes anything (``x' = F(x)`` has no skip to drop)."""
        return self.condition(subject, self.mutate)


MUTANTS: dict[str, Mutant] = {}


def changes_output(subject: Subject, mutate: Mutate) -> bool:
    """The output or a gradient of a stream at random parameters is another one."""
    plain, broken = _outcome(subject), _outcome(subject.broken_by(mutate))
    if _distance(plain.output, broken.output) > 1e-6:
        return True
    return any(_distance(value, broken.gradients[name]) > 1e-6 for name, value in plain.gradients.items())


def looks_along_tokens(subject: Subject, mutate: Mutate) -> bool:
    return subject.start().looks_along_tokens


def has_parameters(subject: Subject, mutate: Mutate) -> bool:
    return any(True for _ in subject.start().parameters())


def has_coefficients(subject: Subject, mutate: Mutate) -> bool:
    """Whether a write depends on floating-point numbers that the read computed from the state."""
    stream = subject.random()
    site, state = stream.sites[0], random_state(stream.enter(embedding_for(stream)))
    x, context = site.read(state)
    _, other = site.read(random_state(state, seed=8))
    if not any(leaf.is_floating_point() for leaf in tensors_of(context)):
        return False
    pairs = zip(tensors_of(site.write(state, x, context)), tensors_of(site.write(state, x, other)), strict=True)
    return any(_distance(a, b) > 1e-6 for a, b in pairs)


def always(subject: Subject, mutate: Mutate) -> bool:
    return True


def mutant(*caught_by: str, applies: Applies = changes_output) -> Callable[[Mutate], Mutate]:
    """Decorator: the function's name and docstring become the mutant's."""

    def add(mutate: Mutate) -> Mutate:
        MUTANTS[mutate.__name__] = Mutant(mutate.__name__, (mutate.__doc__ or "").strip(), caught_by, mutate, applies)
        return mutate

    return add


# What is written.


@mutant("reference")
def update_dropped(stream: Stream) -> Stream:
    """What the sublayer computed is not written."""
    return _rewrite(stream, lambda write, site, state, update, context: write(state, 0 * update, context))


@mutant("reference")
def skip_dropped(stream: Stream) -> Stream:
    """The old state is not carried over."""
    return _rewrite(stream, lambda write, site, state, update, context: write(tree_map(_zero, state), update, context))


@mutant("reference")
def sign_flipped(stream: Stream) -> Stream:
    """The update is subtracted."""
    return _rewrite(stream, lambda write, site, state, update, context: write(state, -update, context))


@mutant("reference")
def read_write_swapped(stream: Stream) -> Stream:
    """The sublayer reads the raw state, and its update goes onto what it should have read."""
    _unfuse(stream)
    for site in stream.sites:

        def read(state: State, tokens: Tokens | None = None, *, inner=site.read):
            x, context = inner(state, tokens)
            return (state if isinstance(state, Tensor) and state.shape == x.shape else x), context

        def write(state: State, update: Tensor, context: Context, *, reads=site.read, inner=site.write):
            x, _ = reads(state)
            return inner(x if isinstance(state, Tensor) and state.shape == x.shape else state, update, context)

        site.read, site.write = read, write
    return stream


@mutant("reference")
def site_off_by_one(stream: Stream) -> Stream:
    """Every sublayer is served by the site that follows."""
    _unfuse(stream)
    verbs = [(site.read, site.write) for site in stream.sites]
    for site, (read, write) in zip(stream.sites, verbs[1:] + verbs[:1], strict=True):
        site.read, site.write = read, write
    return stream


@mutant("purity", applies=always)
def in_place_write(stream: Stream) -> Stream:
    """The old state is overwritten by the write."""

    def write(inner, site, state, update, context):
        after = inner(state, update, context)
        with torch.no_grad():
            for leaf in tensors_of(state):
                leaf.detach().add_(1)
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, after)

    return _rewrite(stream, write)


@mutant("purity", applies=has_coefficients)
def context_hidden(stream: Stream) -> Stream:
    """The context is kept in the module by the last read, whichever pass that was."""
    last: dict[StreamSite, Context] = {}

    def read(inner, site, state, tokens):
        x, context = inner(state, tokens)
        last[site] = context
        return x, context

    _reread(stream, read)
    return _rewrite(stream, lambda write, site, state, update, context: write(state, update, last[site]))


@mutant("advance")
def fused_form_differs(stream: Stream) -> Stream:
    """The fused write-and-read is not the write and the read."""
    inner = stream.advance

    def advance(index: int, state: State, update: Tensor, context: Context, tokens: Tokens | None = None):
        state, x, context = inner(index, state, update, context, tokens)
        return state, None if x is None else 1.01 * x, context

    stream.advance = advance
    return stream


# Norms, gates and mixing.


@mutant("reference")
def norm_skipped(stream: Stream) -> Stream:
    """The norms at the sites are not applied."""
    for norm in _norms(stream.sites):
        norm.forward = lambda x: x
    return stream


@mutant("reference")
def final_norm_skipped(stream: Stream) -> Stream:
    """The unembedding sees the raw stream."""
    stream.final_norm.forward = lambda x: x
    return stream


@mutant("reference")
def wrong_last_axis(stream: Stream) -> Stream:
    """The norms take their statistics over the tokens."""
    for norm in _norms(stream):

        def forward(x: Tensor, norm: Norm = norm) -> Tensor:
            weight = 1.0 if norm.weight is None else norm.weight
            shift = 0.0 if norm.bias is None else norm.bias
            centre = x.mean(1, keepdim=True) if norm.kind == "layernorm" else 0.0
            return (x - centre) * torch.rsqrt((x - centre).square().mean(1, keepdim=True) + norm.eps) * weight + shift

        norm.forward = forward
    return stream


@mutant("reference")
def gate_detached(stream: Stream) -> Stream:
    """No gradient flows through the coefficients of the write."""

    def write(inner, site, state, update, context):
        held = {name: parameter.detach() for name, parameter in site.named_parameters()}
        site.forward = inner
        return torch.func.functional_call(site, held, (state, update, tree_map(_detach, context)))

    return _rewrite(stream, write)


@mutant("reference")
def gate_of_another_token(stream: Stream) -> Stream:
    """The coefficients of the write come from the neighbouring token."""

    def shifted(leaf: Any, tokens: int) -> Any:
        along = isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == tokens
        return leaf.roll(1, 1) if along else leaf

    return _rewrite(
        stream,
        lambda write, site, state, update, context: write(
            state, update, tree_map(lambda leaf: shifted(leaf, update.shape[1]), context)
        ),
    )


@mutant("reference", "routing")
def mix_discarded(stream: Stream) -> Stream:
    """The streams are mixed, and the result is thrown away."""
    return _remix(stream, lambda mix: torch.eye(mix.shape[-1], dtype=mix.dtype, device=mix.device).expand_as(mix))


@mutant("reference", "routing")
def mix_transposed(stream: Stream) -> Stream:
    """``mix[to, from]`` is applied as ``mix[from, to]``."""
    return _remix(stream, lambda mix: mix.mT)


@mutant("reference")
def mixing_detached(stream: Stream) -> Stream:
    """No gradient flows into the mixing matrix."""
    return _remix(stream, torch.Tensor.detach)


# What flows where it must not.


@mutant("causality")
def future_leak(stream: Stream) -> Stream:
    """The sublayer input holds the mean over all tokens."""
    return _rein(stream, lambda x: x + 0.1 * x.mean(1, keepdim=True))


@mutant("batch")
def batch_leak(stream: Stream) -> Stream:
    """The sublayer input holds the mean over the batch."""
    return _rein(stream, lambda x: x + 0.1 * x.mean(0, keepdim=True))


@mutant("token_order", "decoding", "padding", "packing")
def past_leak(stream: Stream) -> Stream:
    """The sublayer input holds the mean of past tokens of the call: causal, but lost in decoding and soiled by padding."""
    return _rein(stream, lambda x: x + 0.1 * x.cumsum(1) / torch.arange(1, x.shape[1] + 1).to(x)[:, None])


@mutant("decoding", applies=looks_along_tokens)
def memory_dropped(stream: Stream) -> Stream:
    """Cached decoding forgets the tokens of earlier calls."""
    return _retoken(stream, memory=None)


@mutant("padding", applies=looks_along_tokens)
def mask_ignored(stream: Stream) -> Stream:
    """Padding is taken for tokens."""
    return _retoken(stream, mask=None)


@mutant("packing", applies=looks_along_tokens)
def segments_ignored(stream: Stream) -> Stream:
    """A packed document sees the one before it."""
    return _retoken(stream, segments=None)


# Starts and declarations.


@mutant("dead_parameters", applies=always)
def unused_parameter(stream: Stream) -> Stream:
    """A parameter that nothing uses: distributed training stops on it."""
    stream.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    return stream


@mutant("dead_parameters", "moves", applies=always)
def stuck_parameter(stream: Stream) -> Stream:
    """A parameter that is multiplied by zero."""
    stream.register_parameter("stuck", nn.Parameter(torch.zeros(1)))
    return _rein(stream, lambda x: x + 0 * stream.stuck.to(x.dtype))


@mutant("reset", applies=lambda subject, _: any(p.dim() < 2 for p in subject.start().parameters()))
def bias_overwritten(stream: Stream) -> Stream:
    """Biases and scalars keep what a later generic initialisation gave them."""
    inner = stream.reset_parameters

    def reset_parameters() -> None:
        kept = {name: p.detach().clone() for name, p in stream.named_parameters() if p.dim() < 2}
        inner()
        with torch.no_grad():
            for name, value in kept.items():
                stream.get_parameter(name).copy_(value)

    stream.reset_parameters = reset_parameters
    return stream


@mutant("declared_start", applies=lambda subject, mutate: _claims(subject) and changes_output(subject, mutate))
def start_missed(stream: Stream) -> Stream:
    """The stream does not start where it says."""
    inner = stream.reset_parameters

    def reset_parameters() -> None:
        inner()
        scramble(stream, seed=6)

    stream.reset_parameters = reset_parameters
    return stream


@mutant("moves", applies=lambda subject, _: "*" not in subject.start().frozen() and any(_moving(subject)))
def falsely_frozen(stream: Stream) -> Stream:
    """Moving parameters are declared frozen."""
    stream.frozen = lambda: {"*": "so it is said"}
    return stream


@mutant("moves", applies=lambda subject, _: bool(subject.start().frozen()))
def silently_frozen(stream: Stream) -> Stream:
    """Parameters that do not move are not declared."""
    stream.frozen = dict
    return stream


@mutant("hints", applies=always)
def stale_hint(stream: Stream) -> Stream:
    """An optimiser hint names a parameter that was renamed."""
    inner = stream.group_hints()
    stream.group_hints = lambda: {**inner, "sites.*.renamed": None}
    return stream


@mutant("shapes", applies=always)
def observe_folded(stream: Stream) -> Stream:
    """The streams are folded into the tokens."""
    inner = stream.observe
    stream.observe = lambda state: inner(state).flatten(1, 2)
    return stream


@mutant("reference", applies=always)
def reference_borrowed(stream: Stream) -> Stream:
    """The reference is the code that it should check."""
    stream.reference = stream.forward
    return stream


@mutant("facts", applies=always)
def facts_empty(stream: Stream) -> Stream:
    """The equation is not written down."""
    stream.facts = dataclasses.replace(stream.facts, equation=" ")  # type: ignore[misc] - shadows the class variable
    return stream


# Numerics and machinery.


class _ScaledGradient(torch.autograd.Function):
    """Identity, with a wrong backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.factor * gradient, None


@mutant("reference", "gradient")
def wrong_backward(stream: Stream) -> Stream:
    """A hand-written backward pass loses a tenth."""
    return _rein(stream, lambda x: _ScaledGradient.apply(x, 0.9))


@mutant("depth", applies=always)
def gradient_grows(stream: Stream) -> Stream:
    """The gradient grows ten times at every site."""

    def write(inner, site, state, update, context):
        return tree_map(lambda leaf: _ScaledGradient.apply(leaf, 10.0), inner(state, update, context))

    return _rewrite(stream, write)


@mutant("bfloat16", applies=always)
def overflow_between(stream: Stream) -> Stream:
    """An intermediate value leaves the range of single precision."""
    return _rein(stream, lambda x: x * 1e30 * 1e30 * 1e-60)


@mutant("bfloat16", applies=always)
def cancellation(stream: Stream) -> Stream:
    """A large number is added and taken away again."""
    return _rein(stream, lambda x: (x + 256) - 256)


@mutant("autocast", applies=has_coefficients)
def coefficients_narrowed(stream: Stream) -> Stream:
    """Coefficients are in bfloat16 under autocast."""

    def read(inner, site, state, tokens):
        x, context = inner(state, tokens)
        return x, tree_map(_narrow, context) if torch.is_autocast_enabled("cpu") else context

    return _reread(stream, read)


@mutant("autocast", applies=always)
def stream_narrowed(stream: Stream) -> Stream:
    """The stream turns to bfloat16 under autocast."""
    return _rewrite_under_autocast(stream, _narrow)


@mutant("autocast", applies=always)
def product_narrowed(stream: Stream) -> Stream:
    """The write is computed in bfloat16 under autocast and returned in the dtype of the stream."""
    return _rewrite_under_autocast(
        stream, lambda leaf: _narrow(leaf).to(leaf.dtype) if isinstance(leaf, Tensor) else leaf
    )


@mutant("storage", applies=has_parameters)
def state_lost(stream: Stream) -> Stream:
    """A parameter is not saved."""
    lost = next(name for name, _ in stream.named_parameters())

    def drop(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        del state[prefix + lost]

    stream._register_state_dict_hook(drop)
    return stream


@mutant("compiled", "cost", applies=always)
def branch_on_values(stream: Stream) -> Stream:
    """Python looks at a value of the state: the graph breaks there."""
    return _rein(stream, lambda x: x if float(x.detach().sum()) > 0 else 1 * x)


def _rewrite(stream: Stream, write: Callable[..., State]) -> Stream:
    """Replace every site's ``write`` by ``write(inner, site, state, update, context)``; a fused form cannot go round it."""
    _unfuse(stream)
    for site in stream.sites:

        def patched(state: State, update: Tensor, context: Context, *, inner=site.write, site=site) -> State:
            return write(inner, site, state, update, context)

        site.write = patched
    return stream


def _reread(stream: Stream, read: Callable[..., Any]) -> Stream:
    _unfuse(stream)
    for site in stream.sites:

        def patched(state: State, tokens: Tokens | None = None, *, inner=site.read, site=site) -> Any:
            return read(inner, site, state, tokens)

        site.read = patched
    return stream


def _rein(stream: Stream, change: Callable[[Tensor], Tensor]) -> Stream:
    """Change what every sublayer is given."""

    def read(inner, site, state, tokens):
        x, context = inner(state, tokens)
        return change(x), context

    return _reread(stream, read)


def _retoken(stream: Stream, **fields: None) -> Stream:
    """Lose a field of the tokens on the way into every verb."""

    def lose(tokens: Tokens | None) -> Tokens | None:
        return tokens and dataclasses.replace(tokens, **fields)

    enter, leave = stream.enter, stream.leave
    stream.enter = lambda embedding, tokens=None: enter(embedding, lose(tokens))
    stream.leave = lambda state, tokens=None: leave(state, lose(tokens))
    return _reread(stream, lambda inner, site, state, tokens: inner(state, lose(tokens)))


def _remix(stream: Stream, change: Callable[[Tensor], Tensor]) -> Stream:
    """Change every mixing matrix [... n n] that a context holds (none in a stream of one)."""

    def write(inner, site, state, update, context):
        n = stream.observe(state).shape[2]

        def mix(leaf: Any) -> Any:
            square = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape[-2:] == (n, n)
            return change(leaf) if square and n > 1 else leaf

        return inner(state, update, tree_map(mix, context))

    return _rewrite(stream, write)


def _rewrite_under_autocast(stream: Stream, change: Callable[[Any], Any]) -> Stream:
    def write(inner, site, state, update, context):
        after = inner(state, update, context)
        return tree_map(change, after) if torch.is_autocast_enabled("cpu") else after

    return _rewrite(stream, write)


def _unfuse(stream: Stream) -> None:
    for site in stream.sites:
        site.advance = MethodType(StreamSite.advance, site)
    stream.advance = MethodType(Stream.advance, stream)


def _norms(module: nn.Module) -> list[Norm]:
    return [norm for norm in module.modules() if isinstance(norm, Norm) and norm.kind != "none"]


def _zero(leaf: Any) -> Any:
    return 0 * leaf if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _narrow(leaf: Any) -> Any:
    return leaf.bfloat16() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _claims(subject: Subject) -> bool:
    return subject.start().equals_at_start() is not None


def _moving(subject: Subject) -> list[str]:
    return [name for name, _ in subject.start().named_parameters()]


def _outcome(subject: Subject):
    stream = subject.random()
    return differentiate(stream, stream, sublayers_for(stream), embedding_for(stream))


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return float((a - b).detach().abs().max()) if a.numel() else 0.0
