"""Does it survive the compiler, being saved, and being cast?"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensorMode

from thalweg.mixers.base import Mixer
from thalweg.testing.compare import EXACT, BrokenError, require, require_close, require_same, rows
from thalweg.testing.mixers.checks.numbers import UPSTREAM, large_logits, require_finite
from thalweg.testing.mixers.subjects import MixerSubject, differentiate, logits_for

LENGTHS = (5, 7)  # share one graph


def dataless(subject: MixerSubject) -> None:
    """The module can be made and run on tensors without data, from which costs are measured."""
    n = subject.streams
    try:
        with FakeTensorMode():
            mixer = subject.start()
            mix = mixer(torch.empty(2, 3, mixer.generators, requires_grad=True))
    except Exception as error:
        line = next((line for line in str(error).splitlines() if line.strip()), "no message")
        raise BrokenError(f"does not run on tensors without data: {type(error).__name__}: {line}") from error
    require(tuple(mix.shape) == (2, 3, n, n), f"on tensors without data the matrix has shape {list(mix.shape)}")


def compiled(subject: MixerSubject) -> None:
    """``torch.compile(fullgraph=True)`` gives the same matrices and gradients, and finite ones at large logits.

    One token, which the compiler specialises, is tried in float32 and bfloat16, forwards and backwards (``aot_eager``). The other graph is
    traced forwards (``eager``), in float64 with a symbolic token axis, so that both lengths share it. Options other than the defaults are
    compiled once, for one token in float32, which is quicker.
    """
    mixer = subject.random()
    torch._dynamo.reset()  # the number of graphs is limited per process
    try:
        single = subject.random(torch.float32)
        graph = _compile(single, "aot_eager")
        for dtype in (torch.float32,) if subject.options else (torch.float32, torch.bfloat16):
            large = large_logits(single, dtype)[:, None]  # [patterns 1 generators]
            require_finite(differentiate(graph, single, large, scale=UPSTREAM), f"at large logits in {dtype}, compiled")
        _require_parity(single, graph, logits_for(single, len(large), 1, dtype=torch.float32), 1e-4)
        if subject.options:
            return
        graph = _compile(mixer)

        def symbolic(leaf: Tensor) -> Tensor:
            torch._dynamo.mark_dynamic(leaf, 1)
            return graph(leaf)

        for length in LENGTHS:
            _require_parity(mixer, symbolic, logits_for(mixer, 2, length))
    except TorchDynamoException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise BrokenError(f"does not compile as one graph: {' '.join(lines[:3])}") from error
    finally:
        torch._dynamo.reset()


def _compile(mixer: Mixer, backend: str = "eager") -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda logits: mixer(logits), backend=backend, fullgraph=True)


def _require_parity(mixer: Mixer, graph: Callable[[Tensor], Tensor], logits: Tensor, tolerance: float = EXACT) -> None:
    got, want = differentiate(graph, mixer, logits), differentiate(mixer, mixer, logits)
    require_same(got, want, f"eager at {logits.shape[1]} tokens in {logits.dtype}", tolerance, least=1e-3)


def storage(subject: MixerSubject) -> None:
    """The state holds the parameters and nothing else, and restores a new module bit for bit; casts of the module cost no exactness."""
    mixer = subject.random(torch.float32)
    logits = logits_for(mixer, dtype=torch.float32)
    state, named = mixer.state_dict(), dict(mixer.named_parameters())
    require(
        set(state) == set(named),
        f"the state_dict differs from the parameters by {rows(sorted(set(state) ^ set(named)))}; buffers are not persistent",
    )
    with torch.no_grad():
        want = mixer(logits)
        fresh = subject.start()
        fresh.load_state_dict(state)
        require(torch.equal(fresh(logits), want), "a module restored from the state_dict gives other matrices")
        for dtype in (
            torch.bfloat16,
            torch.float16,
        ):  # twins: one was cast down and up again, the other holds the same parameters
            cast, twin = subject.random(torch.float32).to(dtype), subject.random(torch.float32)
            for ours, theirs in zip(twin.parameters(), cast.parameters(), strict=True):
                ours.copy_(theirs)
            got = cast(logits)
            require(
                got.dtype == torch.float32, f"a module in {dtype} turns float32 logits into a matrix in {got.dtype}"
            )
            require_close(f"matrix of a module in {dtype}", got, twin(logits), 1e-6)
            deep = logits.double()
            require_close(f"matrix of a module cast to {dtype} and float64", cast.double()(deep), twin.double()(deep))
