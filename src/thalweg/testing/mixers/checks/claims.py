"""Is what the mixer claims of its matrices true, at logits of every size, and no more than the truth?"""

from collections.abc import Callable

import torch
from torch import Tensor

from thalweg.mixers.base import Mixer
from thalweg.ops.doubly_stochastic import sinkhorn
from thalweg.testing.compare import DoesNotApplyError, require, require_close
from thalweg.testing.mixers.subjects import MixerSubject, logits_for, require_logits, start_of

SCALES = (0.1, 1.0, 5.0, 50.0, 1e30)  # standard deviations of the logits
MATRICES = 32
EXACT, EXACT_SINGLE, EXACT_HUGE = 1e-10, 2e-6, 1e-4  # float64; float32; float32 at the largest logits
CONVERGED = 1e-3  # at logits of 0.01
PROPORTION, SETTLED = 0.03, 1e-5  # of that error, left at logits of 0.001; nothing is asked below the second
NEAR = 1e-2
STEPS, ATTEMPTS, ATTEMPTS_OWN = 120, 3, 8  # of descent; bounded rotations have local minima


def marginals(subject: MixerSubject) -> str | None:
    """Rows and columns that are claimed exact sum to one to rounding; where they converge, the error is measured, and small at small logits."""
    mixer = subject.random()
    said = []
    for which, axis, claim in (("rows", -1, mixer.claims.rows), ("columns", -2, mixer.claims.columns)):
        if claim == "exact":
            for scale, mix in _matrices(mixer):
                require_sums(f"sums of the {which} at logits of {scale}", mix, axis, EXACT)
            single = subject.random(torch.float32)
            for scale, mix in _matrices(single, torch.float32):
                require_sums(
                    f"sums of the {which} in float32 at logits of {scale}",
                    mix,
                    axis,
                    EXACT_HUGE if scale in SCALES[2:] else EXACT_SINGLE,
                )
            continue
        errors = {scale: _error(mix, axis) for scale, mix in _matrices(mixer)}
        measured = ", ".join(f"{error:.0e} at {scale}" for scale, error in errors.items())
        said.append(f"{which} ({claim}) by size of the logits off by {measured}")
        if claim == "converging":
            finite = all(error < float("inf") for error in errors.values())
            require(finite, f"the {which} are said to converge, but a sum is not finite: {measured}")
            smaller, small = min(
                tuple(_error(mixer(near + logits_for(mixer, MATRICES, scale=scale)), axis) for scale in (0.001, 0.01))
                for near in (0.0, start_of(mixer))
            )
            require(
                small <= CONVERGED and small <= max(errors[1.0], 1e-5),
                f"the {which} are said to converge, but at logits of 0.01 they are off by {small:.1e} ({measured})",
            )
            # A normalisation leaves an error of second order or less; a marginal that nobody normalises, one in proportion to the logits.
            require(
                smaller <= max(small * PROPORTION, SETTLED),
                f"the {which} are said to converge, but are off by {small:.1e} at logits of 0.01 and {smaller:.1e} at 0.001: in proportion, "
                "as if they were never normalised",
            )
    return "; ".join(said) or None


def nonnegative(subject: MixerSubject) -> str | None:
    """No entry is below zero, but for rounding."""
    _require_claim(subject.random().claims.nonnegative)
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        for scale, mix in _matrices(subject.random(dtype), dtype):
            low = float(mix.min())
            require(low >= -allowed, f"an entry is {low:.1e} at logits of {scale} in {dtype}")


def spectral(subject: MixerSubject) -> str | None:
    """No singular value is above one."""
    mixer = subject.random()
    _require_claim(mixer.claims.spectral)
    largest = 0.0
    for scale, mix in _matrices(mixer):
        largest = max(largest, norm := float(torch.linalg.matrix_norm(mix, 2).max()))
        require(norm <= 1 + EXACT, f"a singular value is 1 + {norm - 1:.1e} at logits of {scale}")
    return f"largest singular value 1 {'-' if largest < 1 else '+'} {abs(largest - 1):.0e}"


def orthogonal(subject: MixerSubject) -> None:
    """mix^T mix is the identity."""
    mixer = subject.random()
    _require_claim(mixer.claims.orthogonal)
    eye = torch.eye(subject.streams, dtype=torch.float64)
    for scale, mix in _matrices(mixer):
        require_close(f"mix^T mix at logits of {scale}", mix.mT @ mix, eye.expand_as(mix), EXACT)


def equivariant(subject: MixerSubject) -> None:
    """Renaming the streams, by ``permute`` of the logits, renames rows and columns of the matrix."""
    mixer, n = subject.random(), subject.streams
    _require_claim(mixer.claims.equivariant)
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(4)).tolist()
    orders = ([*range(1, n), 0], [*reversed(range(n))], drawn)
    logits = torch.cat([logits_for(mixer, 2), start_of(mixer)[None]])
    before = logits.clone()
    renamed = torch.stack([torch.stack([mixer.permute(one, order) for one in logits]) for order in orders])
    require(torch.equal(logits, before), "permute changes its logits in place")
    mix = mixer(logits)
    for order, got in zip(orders, mixer(renamed), strict=True):
        require_close(f"matrix of the logits permuted by {order}", got, mix[:, order][:, :, order])


def reaches(subject: MixerSubject) -> str:
    """Descent on the logits, from the start or else from random ones, comes within 0.01 (Frobenius) of a matrix drawn from ``reaches``."""
    mixer = subject.start(torch.float64)
    require_logits(mixer)
    claim = mixer.claims.reaches
    target = _target(claim, mixer)
    tried: list[float] = []
    for attempt in range(ATTEMPTS_OWN if claim == "own" else ATTEMPTS):
        begin = start_of(mixer) if attempt == 0 else logits_for(mixer, 1, seed=40 + attempt)[0]
        distance, steps = _descend(mixer, begin, target)
        if distance < NEAR:
            stalled = f", at attempt {attempt + 1}; from the start it stays at {tried[0]:.1e}" if tried else ""
            return f"{claim}: within {distance:.0e} after {steps} evaluations{stalled}"
        tried.append(distance)
    found = ", ".join(f"{distance:.2f}" for distance in tried)
    require(False, f"claims to reach {claim!r}, but descent ends at a distance of {found} (allowed {NEAR})")
    return ""


def _target(claim: str, mixer: Mixer) -> Tensor:
    """A random matrix [n n] of the claimed set."""
    n = mixer.streams
    noise = torch.randn(n, n, generator=torch.Generator().manual_seed(12), dtype=torch.float64)

    def rotation() -> Tensor:
        q = torch.linalg.qr(noise)[0]
        return q * torch.cat([torch.linalg.det(q).reshape(1), torch.ones(n - 1).double()])  # a determinant of one

    draws: dict[str, Callable[[], Tensor]] = {
        "birkhoff": lambda: sinkhorn(noise, 200),
        "row_stochastic": lambda: noise.softmax(-1),
        "column_stochastic": lambda: noise.softmax(-2),
        "positive": lambda: 2 * noise.sigmoid(),  # entries between 0 and 2
        "orthogonal": rotation,
        "any": lambda: noise,
        "own": lambda: mixer(logits_for(mixer, 1, seed=13)[0]),
    }
    return draws[claim]().detach()


def _descend(mixer: Mixer, begin: Tensor, target: Tensor) -> tuple[float, int]:
    """(distance, evaluations) of LBFGS on the squared distance."""
    logits = begin.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [logits],
        max_iter=STEPS,
        history_size=30,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
    )
    evaluations = 0

    def loss() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        optimiser.zero_grad()
        value = (mixer(logits) - target).square().sum()
        value.backward()
        return value

    optimiser.step(loss)  # type: ignore[arg-type] - the stub wants a float
    with torch.no_grad():
        return float((mixer(logits) - target).norm()), evaluations


def _matrices(mixer: Mixer, dtype: torch.dtype = torch.float64) -> list[tuple[float | str, Tensor]]:
    """(scale of the logits, matrices [m n n]) of random logits of every size, and of the start."""
    drawn = [logits_for(mixer, MATRICES, scale=scale, dtype=dtype) for scale in SCALES]
    with torch.no_grad():
        *found, start = mixer(torch.cat([*drawn, start_of(mixer, dtype)[None]])).split([*[MATRICES] * len(SCALES), 1])
    return [*zip(SCALES, found, strict=True), ("the start", start)]


def _error(mix: Tensor, axis: int) -> float:
    """The largest distance of a sum from one; infinite where a sum is not finite."""
    error = (mix.detach().double().sum(axis) - 1).abs().max()
    return float(error) if bool(error.isfinite()) else float("inf")


def require_sums(what: str, mix: Tensor, axis: int, allowed: float) -> None:
    error = _error(mix, axis)
    require(error <= allowed, f"{what} are off by {error:.1e}, claimed to be exact (allowed {allowed:.0e})")


def _require_claim(claimed: bool) -> None:
    if not claimed:
        raise DoesNotApplyError("not claimed")
