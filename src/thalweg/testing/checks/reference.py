"""Is it the equation? The code against the loop-written reference, against itself, and against finite differences."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from thalweg.connections.base import State, Stream, tensors_of
from thalweg.ops.norms import Norm
from thalweg.testing.compare import BrokenError, differentiate, require, require_close, require_same
from thalweg.testing.subjects import LENGTH, Subject, embedding_for, random_state, sublayers_for, walk

EPS = 1e-6


def reference(subject: Subject) -> None:
    """Outputs, sublayer inputs and every gradient equal the loop-written reference, at random parameters in float64."""
    stream = subject.random()
    sublayers, embedding = sublayers_for(stream), embedding_for(stream, length=LENGTH - 1)
    got = differentiate(stream, stream, sublayers, embedding)
    _forbid_verbs(stream)  # a reference that borrows from the code under test proves nothing
    require_same(got, differentiate(stream.reference, stream, sublayers, embedding), "the reference")


def _forbid_verbs(stream: Stream) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise BrokenError(
            "the reference calls a verb or a norm of the code under test; it is written from the equation alone"
        )

    for verb in ("enter", "leave", "advance", "forward"):
        setattr(stream, verb, forbidden)
    for site in stream.sites:
        for verb in ("read", "write", "advance"):
            setattr(site, verb, forbidden)
    for module in stream.modules():
        if isinstance(module, Norm):
            module.forward = forbidden


def gradient(subject: Subject) -> None:
    """Every gradient equals finite differences in float64 (gradcheck), at random parameters."""
    stream = subject.random(depth=1)
    sublayers = sublayers_for(stream)
    embedding = embedding_for(stream, batch=1, length=3).requires_grad_()
    names, parameters = zip(*stream.named_parameters(), strict=True) if list(stream.parameters()) else ((), ())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(
            stream, dict(zip(names, values, strict=True)), (x, list(sublayers)), tie_weights=True
        )

    _require_slopes(run, {"embedding": embedding, **dict(zip(names, parameters, strict=True))})
    try:
        torch.autograd.gradcheck(run, (embedding, *parameters), eps=EPS, atol=1e-5, rtol=1e-4, fast_mode=True)
    except RuntimeError as error:  # gradcheck's own error class is private
        raise BrokenError(f"a gradient differs from finite differences: {str(error).splitlines()[0]}") from error


def _require_slopes(run: Callable[..., Tensor], leaves: dict[str, Tensor]) -> None:
    """One direction for each leaf, before gradcheck looks at all else: told that it is wrong, gradcheck computes whole Jacobians to say it."""
    generator = torch.Generator().manual_seed(6)
    values = list(leaves.values())
    output = run(*values)
    cotangent = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    found = torch.autograd.grad(output, values, cotangent, allow_unused=True)
    for index, (name, value) in enumerate(leaves.items()):
        direction = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        direction = direction / direction.norm().clamp(min=1e-12)
        with torch.no_grad():
            up, down = (run(*values[:index], value + e * direction, *values[index + 1 :]) for e in (EPS, -EPS))
            want = float(((up - down) * cotangent).sum()) / (2 * EPS)
        got = 0.0 if (gradient := found[index]) is None else float((gradient * direction).sum())
        require(
            abs(got - want) <= 1e-5 + 1e-4 * abs(want),
            f"a gradient differs from finite differences: {name} has slope {got:.3g}, not {want:.3g}, along a random direction",
        )


def advance(subject: Subject) -> None:
    """``advance`` is ``write``, then ``read`` at the next site, at every site, to the last, which reads nothing."""
    stream = subject.random()
    sublayers, embedding = sublayers_for(stream), embedding_for(stream)
    plain = walk(stream, embedding, sublayers)
    for index, visit in enumerate(plain):
        state, x, context = stream.advance(index, visit.state, visit.update, visit.context)
        _require_same_tree(f"state after advance at site {index}", state, visit.after)
        if index + 1 == len(plain):
            require(
                x is None and context is None,
                "advance at the last site returns a sublayer input or a context; both must be None",
            )
            continue
        require_close(f"sublayer input from advance at site {index}", x, plain[index + 1].x)
        _require_same_tree(f"context from advance at site {index}", context, plain[index + 1].context)
    require_close(
        "output of forward against write and read by hand", stream(embedding, sublayers), stream.leave(plain[-1].after)
    )


def purity(subject: Subject) -> None:
    """``read`` and ``write`` change none of their arguments and keep nothing in the module between them."""
    stream = subject.random()
    sublayers, embedding = sublayers_for(stream), embedding_for(stream)
    for index, (site, visit) in enumerate(zip(stream.sites, walk(stream, embedding, sublayers), strict=True)):
        with _Untouched(f"read at site {index}", visit.state):
            site.read(visit.state)
        with _Untouched(f"write at site {index}", visit.state, visit.update, visit.context):
            site.write(visit.state, visit.update, visit.context)
        site.read(
            random_state(visit.state)
        )  # another pass between read and write, as recomputation and pipelines have it
        after = site.write(visit.state, visit.update, visit.context)
        _require_same_tree(f"write at site {index} after a read of another state", after, visit.after)
    final = walk(stream, embedding, sublayers)[-1].after
    with _Untouched("leave", final):
        stream.leave(final)
    with _Untouched("enter", embedding):
        stream.enter(embedding)


class _Untouched:
    """Raises BrokenError when a tensor of ``trees`` was changed inside."""

    def __init__(self, where: str, *trees: State):
        self.where, self.tensors = where, tensors_of(trees)

    def __enter__(self) -> None:
        self.before = [(t._version, t.detach().clone()) for t in self.tensors]

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            for tensor, (version, value) in zip(self.tensors, self.before, strict=True):
                same = tensor._version == version and torch.equal(tensor.detach(), value)
                require(same, f"{self.where} changes an argument of shape {list(tensor.shape)} in place")


def _require_same_tree(what: str, got: State, want: State) -> None:
    tree_map(
        lambda a, b: require_close(what, a, b) if isinstance(b, Tensor) else require(a == b, f"{what} differs"),
        got,
        want,
    )
