"""Rotary positions as a clock of k planes: how alike two distances look, where it comes round again, what a context window sees of it.

``frequencies`` [k]: the angle of every plane for one token, in radians; the effective ones, after any scaling of a model.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real

_PAPER = "Su et al. 2021 (arXiv 2104.09864); Liang 2026 (arXiv 2607.17146); "
CHUNK = 2**22  # cosines that are held at once


@measure(
    "rotary.overlap",
    summary="mean cosine over the planes at a distance: 1 where two distances cannot be told apart",
    source=_PAPER + "the sum is derived by us",
    takes="frequencies [k], distances [m]",
    range=(-1.0, 1.0),
    null="0, with a standard deviation of 1 / sqrt(2k): planes at random angles",
)
def rotary_overlap(frequencies: Float[Tensor, " k"], distances: Tensor) -> Float[Tensor, " m"]:
    """rho(m) = (1/k) sum_i cos(theta_i m) -> [m], in float64. Raises: ShapeError, InputError."""
    theta, found = _planes(frequencies), []
    for part in distances.double().split(max(1, CHUNK // len(theta))):
        found.append((part[:, None] * theta).cos().mean(1))
    return torch.cat(found) if found else distances.double()


@measure(
    "rotary.long_time_rms",
    summary="rms of the overlap over distances without bound, times sqrt(2k): 1 for independent planes",
    source=_PAPER + "the constant is derived by us",
    takes="frequencies [k]",
    range=(0.0, None),
    null="1: rationally independent planes",
)
def long_time_rms(frequencies: Float[Tensor, " k"], samples: int = 200_000, seed: int = 0) -> tuple[float, float]:
    """rms of rho over random distances times sqrt(2k), and its standard error.

    The distances are uniform over 10^4 turns of the slowest plane that turns; planes that do not turn (frequency 0) take no part. Two planes
    of one frequency, or frequencies in a ratio of small numbers, are not independent: then it is above 1.
    Raises: ShapeError; InputError where no plane turns.
    """
    theta = turning(frequencies)
    span = 1e4 * 2 * math.pi / float(theta.min())
    generator = torch.Generator().manual_seed(seed)
    m = (torch.rand(samples, generator=generator, dtype=torch.float64) * min(span, 2.0**52)).floor()
    square = rotary_overlap(theta, m).square() * 2 * len(theta)
    value = float(square.mean().sqrt())
    return value, float(square.std()) / math.sqrt(samples) / (2 * value)


@measure(
    "rotary.window_rms",
    summary="rms of the overlap over the distances of a context window, times sqrt(2k): far above 1 where planes never turn",
    source=_PAPER + "derived by us",
    takes="frequencies [k], tokens",
    range=(0.0, None),
    null="1: the law of long times",
)
def window_rms(frequencies: Float[Tensor, " k"], length: int) -> float:
    """rms of rho(1 .. length), times sqrt(2k). The law of long times (1) does not hold inside real windows. Raises: ShapeError, InputError."""
    theta = turning(frequencies)
    return float((_overlap_of(theta, length)).square().mean().sqrt()) * math.sqrt(2 * len(theta))


@measure(
    "rotary.unturned_share",
    summary="share of the planes that do not complete one turn within a context window",
    source=_PAPER + "derived by us",
    takes="frequencies [k], tokens",
    range=(0.0, 1.0),
    null="1 - ln(L / 2 pi) / ln(base): plain rotary positions with many planes",
)
def unturned_share(frequencies: Float[Tensor, " k"], length: int) -> float:
    """Share of planes with theta L < 2 pi. Raises: ShapeError, InputError."""
    return float((_planes(frequencies) * _length(length) < 2 * math.pi).double().mean())


def unturned_law(base: float, length: int) -> float:
    """1 - ln(L / 2 pi) / ln(base), held within [0, 1]: the share for plain rotary positions with many planes."""
    return min(1.0, max(0.0, 1 - math.log(_length(length) / (2 * math.pi)) / math.log(base)))


def plain_frequencies(width: int, base: float) -> Float[Tensor, " k"]:
    """base^(-2i/width) for i < width / 2, in float64 (Su et al. 2021)."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def plane_slope(base: float, length: int | None, planes: tuple[int, ...] = (16, 32, 64, 128, 256)) -> float:
    """Slope of log rms of rho on log k for plain rotary positions of one base: over a window of ``length``, or at long times (None).

    At long times -1/2; inside windows far from it: planes that never turn are a fixed share of all. Derived by us.
    """
    from thalweg.geometry.normalisation import power_law

    rms = []
    for k in planes:
        theta = plain_frequencies(2 * k, base)
        scaled = long_time_rms(theta, 40_000)[0] if length is None else window_rms(theta, length)
        rms.append(scaled / math.sqrt(2 * k))
    return power_law(torch.tensor(planes, dtype=torch.float64), torch.tensor(rms, dtype=torch.float64))[0]


@measure(
    "rotary.recurrence",
    summary="how near the clock comes to where it began: the highest peaks of the overlap after its first dip",
    source=_PAPER + "derived by us",
    takes="frequencies [k], tokens",
    range=(-1.0, 1.0),
    null="the highest peak of as many planes with random frequencies over as many distances",
)
def recurrence(frequencies: Float[Tensor, " k"], length: int, peaks: int = 1) -> list[tuple[int, float]]:
    """The ``peaks`` highest local maxima (m, rho(m)) of rho over m <= length behind its first local minimum, highest first; maybe none.

    Raises: ShapeError, InputError.
    """
    rho = torch.cat([torch.ones(1, dtype=torch.float64), _overlap_of(_planes(frequencies), length)])
    rises = (rho[1:] > rho[:-1]).nonzero()
    if not len(rises):
        return []
    dip = int(rises[0])
    inner = torch.zeros_like(rho, dtype=torch.bool)
    inner[1:-1] = (rho[1:-1] >= rho[:-2]) & (rho[1:-1] > rho[2:])
    inner[: dip + 1] = False
    at = inner.nonzero()[:, 0]
    best = at[rho[at].argsort(descending=True)[:peaks]]
    return [(int(m), float(rho[m])) for m in best]


def recurrence_null(planes: int, length: int, draws: int = 8, seed: int = 0) -> float:
    """Mean over draws of the highest peak for frequencies uniform in (0, pi)."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(draws):
        theta = torch.rand(planes, generator=generator, dtype=torch.float64) * math.pi
        found.append(max([rho for _, rho in recurrence(theta, length)], default=0.0))
    return sum(found) / draws


def advised_base(base: float, length: int, target: int, width: int) -> tuple[float, float]:
    """Two bases for a window of ``target`` tokens instead of ``length``.

    same share: as many planes stay unturned as before, ln b' = ln b ln(T / 2 pi) / ln(L / 2 pi), derived by us; ntk: b (T / L)^(d / (d - 2)),
    at which the slowest plane turns over T as far as it did over L (the "NTK-aware" rule). Raises: InputError for windows below 7 tokens.
    """
    if min(length, target) <= 2 * math.pi or width <= 2:
        raise InputError(
            f"a base is advised for windows of at least 7 tokens and heads wider than 2, got {length}, {target} and {width}"
        )
    same = math.exp(math.log(base) * math.log(target / (2 * math.pi)) / math.log(length / (2 * math.pi)))
    return same, base * (target / length) ** (width / (width - 2))


def turning(frequencies: Float[Tensor, " k"]) -> Float[Tensor, " turning"]:
    """The frequencies that are not zero, in float64. Raises: ShapeError; InputError where there is none."""
    theta = _planes(frequencies)
    theta = theta[theta != 0]
    if not len(theta):
        raise InputError("no plane turns: every frequency is zero")
    return theta.abs()


def _planes(frequencies: Tensor) -> Tensor:
    if frequencies.ndim != 1 or not len(frequencies):
        raise ShapeError(f"frequencies are a vector, one for each plane, got shape {list(frequencies.shape)}")
    return real(frequencies, "frequencies").double()


def _overlap_of(theta: Tensor, length: int) -> Tensor:
    return rotary_overlap(theta, torch.arange(1, _length(length) + 1))


def _length(length: int) -> int:
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise InputError(f"a window has a whole number of tokens, at least 1, got {length!r}")
    return length
