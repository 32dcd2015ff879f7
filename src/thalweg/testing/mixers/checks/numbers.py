"""Does it stand large logits, large gradients and narrow inputs?"""

import warnings

import torch
from torch import Tensor

from thalweg.mixers.base import Mixer
from thalweg.testing.compare import Outcome, finite, require, require_close
from thalweg.testing.mixers.subjects import MixerSubject, differentiate, logits_for

LARGE = (50.0, 1e4, 1e30)
UPSTREAM = 1e4  # size of the gradients that come from above
SINGLE = 1e-5  # relative, float32 against float64 at the same logits


def extremes(subject: MixerSubject) -> None:
    """Logits of 50, 10 000 and 1e30 and gradients of 10 000 from above: the matrix and every gradient stay finite, in float32 and bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        mixer = subject.random(torch.float32)
        require_finite(
            differentiate(mixer, mixer, large_logits(mixer, dtype), scale=UPSTREAM), f"at large logits in {dtype}"
        )


def large_logits(mixer: Mixer, dtype: torch.dtype) -> Tensor:
    """[patterns generators]: random signs and sizes, all alike of either sign, one alone, of each large size; and zeros."""
    signs, sizes = logits_for(mixer, 2).sign(), logits_for(mixer, 2, seed=8)
    alike, alone = torch.ones_like(signs[:1]), torch.zeros_like(signs[:1])
    alone[:, :1] = 1
    patterns = torch.cat([signs, sizes, alike, -alike, alone, -alone])
    return torch.cat([*(size * patterns for size in LARGE), 0 * alone]).to(dtype)


def require_finite(outcome: Outcome, where: str) -> None:
    """Raises: BrokenError unless the matrices and every gradient are finite."""
    require(finite(outcome.output), f"the matrix is not finite {where}")
    broken = [name for name, value in outcome.gradients.items() if not finite(value)]
    require(not broken, f"the gradient of {', '.join(broken)} is not finite {where}")


def precision(subject: MixerSubject) -> None:
    """Narrow logits give a float32 matrix as exact as their values allow; under autocast it is the same, and nothing warns."""
    exact, single = subject.random(), subject.random(torch.float32)
    with torch.no_grad():  # the same values in both
        for high, low in zip(exact.parameters(), single.parameters(), strict=True):
            high.copy_(low)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = logits_for(single, dtype=dtype)
        leaf = logits.clone().requires_grad_()
        got, want = single(leaf), exact(logits.double())
        require(got.dtype == torch.float32, f"logits in {dtype} give a matrix in {got.dtype}, not float32")
        require_close(f"matrix of logits in {dtype} against float64", got, want, SINGLE)
        twin = logits.clone().requires_grad_()
        with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
            warnings.simplefilter("error")
            cast = single(twin)
        require(
            cast.dtype == torch.float32, f"under autocast logits in {dtype} give a matrix in {cast.dtype}, not float32"
        )
        require_close(f"matrix of logits in {dtype} under autocast", cast, got, 1e-6)
        if got.requires_grad and got.numel() and leaf.numel():
            cotangent = torch.randn(got.shape, generator=torch.Generator().manual_seed(5))
            (plain,), (under,) = torch.autograd.grad(got, leaf, cotangent), torch.autograd.grad(cast, twin, cotangent)
            require_close(f"gradient of logits in {dtype} under autocast", under, plain, SINGLE)
