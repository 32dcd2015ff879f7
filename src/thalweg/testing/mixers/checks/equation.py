"""Is it the equation? The code against the loop-written reference, against finite differences, against itself."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thalweg.ops.forward_mode import jvp, load_rules
from thalweg.testing.compare import BrokenError, DoesNotApplyError, require, require_close, require_same
from thalweg.testing.mixers.subjects import MixerSubject, differentiate, logits_for, require_logits

# What a loop over scalars does not need.
VECTORISED = {
    "mm",
    "bmm",
    "mv",
    "addmm",
    "baddbmm",
    "addbmm",
    "dot",
    "_softmax",
    "_log_softmax",
    "logsumexp",
    "matrix_exp",
}


def reference(subject: MixerSubject) -> None:
    """Outputs and every gradient, of logits and own parameters, equal the loop-written reference at random values in float64."""
    mixer = subject.random()
    logits = logits_for(mixer, 1) if subject.streams > 4 else logits_for(mixer)
    got = differentiate(mixer, mixer, logits)

    def forbidden(*_: Any, **__: Any) -> Any:
        raise BrokenError("the reference calls forward; it is written from the equation alone")

    mixer.forward = forbidden  # a reference that borrows from the code under test proves nothing
    if subject.streams <= 4:
        with torch.no_grad(), _Scalars():
            mixer.reference(logits[0, 0])

    def looped(leaf: Tensor) -> Tensor:
        matrices = [mixer.reference(row) for row in leaf.flatten(0, -2)]
        return torch.stack(matrices).unflatten(0, leaf.shape[:-1])

    require_same(got, differentiate(looped, mixer, logits), "the reference", least=1e-3)


class _Scalars(TorchDispatchMode):
    """Raises BrokenError at a matrix product, a solve or a softmax."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func._schema.name.split("::")
        if space != "aten" or name in VECTORISED or name.lstrip("_").startswith("linalg"):
            raise BrokenError(f"the reference calls {space}.{name}; it is written in loops over scalars")
        return func(*args, **(kwargs or {}))


def gradient(subject: MixerSubject) -> None:
    """Every gradient equals finite differences in float64 (gradcheck), at random logits and parameters."""
    mixer = subject.random()
    names = [name for name, _ in mixer.named_parameters()]
    logits = logits_for(mixer, 2).requires_grad_()
    leaves = [leaf for leaf in (logits, *mixer.parameters()) if leaf.numel()]
    if not leaves:
        raise DoesNotApplyError("no logits and no parameters: the matrix is constant")

    shape = mixer(logits).shape
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def run(*given: Tensor) -> Tensor:
        first, values = (given[0], given[1:]) if logits.numel() else (logits, given)
        matrix = torch.func.functional_call(mixer, dict(zip(names, values, strict=True)), (first,))
        return weights * matrix  # gradcheck's own cotangents are positive, and blind to a lost sign

    try:
        torch.autograd.gradcheck(run, tuple(leaves), eps=1e-6, atol=1e-7, rtol=1e-4, fast_mode=True)
    except (RuntimeError, ValueError) as error:  # gradcheck's own error class is private
        raise BrokenError(f"a gradient differs from finite differences: {str(error).splitlines()[0]}") from error


def transforms(subject: MixerSubject) -> None:
    """Under torch.func: the forward-mode derivative is the transpose of the reverse-mode one, and vmap is the batch; nothing warns."""
    mixer = subject.random()
    require_logits(mixer)
    logits = logits_for(mixer)
    direction = logits_for(mixer, seed=6)
    load_rules()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            mix, pushed = jvp(mixer, logits, direction)
            primal, pull = torch.func.vjp(mixer, logits)[:2]
            cotangent = torch.randn(mix.shape, generator=torch.Generator().manual_seed(7), dtype=mix.dtype)
            (pulled,) = pull(cotangent)
            mapped = torch.func.vmap(mixer)(logits)
            flat, along = logits.flatten(0, 1), direction.flatten(0, 1)
            both = torch.func.vmap(lambda z, d: jvp(mixer, z, d)[1])(flat, along)
            back = torch.func.vmap(lambda z, c: torch.func.vjp(mixer, z)[1](c)[0])(flat, cotangent.flatten(0, 1))
        except BrokenError:
            raise
        except Exception as error:
            line = next((line for line in str(error).splitlines() if line.strip()), "no message")
            raise BrokenError(f"does not run under torch.func: {type(error).__name__}: {line}") from error
    want = mixer(logits)
    for what, got in (("jvp", mix), ("vjp", primal), ("vmap", mapped)):
        require_close(f"matrix under {what}", got, want)
    forwards, backwards = (cotangent * pushed).flatten(2).sum(-1), (pulled * direction).sum(-1)
    require_close("forward-mode derivative against the transposed reverse-mode one", forwards, backwards)
    require_close("vmap of jvp against jvp of the batch", both.unflatten(0, logits.shape[:-1]), pushed)
    require_close("vmap of vjp against vjp of the batch", back.unflatten(0, logits.shape[:-1]), pulled)


def purity(subject: MixerSubject) -> None:
    """The logits are not changed, nothing random is drawn, nothing is remembered, and tokens do not see each other."""
    mixer = subject.random()
    logits = logits_for(mixer)
    before, version, state = logits.clone(), logits._version, torch.get_rng_state()
    mix = mixer(logits)
    kept = mix.detach().clone()
    require(logits._version == version and torch.equal(logits, before), "forward changes its logits in place")
    require(torch.equal(torch.get_rng_state(), state), "forward draws random numbers")
    mixer(logits_for(mixer, seed=9))
    require(torch.equal(mix, kept), "a later call changes a matrix that was returned")
    require(torch.equal(mixer(logits), kept), "a second call with the same logits gives other matrices")
    order = [2, 0, 1]
    require_close("matrices of permuted tokens", mixer(logits[:, order]), mix[:, order])
    require_close("matrices of one batch entry alone", mixer(logits[1:]), mix[1:])
