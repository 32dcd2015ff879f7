"""Does it serve, refuse and describe itself as a mixer should, and are the shapes right?"""

from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.mixers.base import Claims, MixerFacts
from thalweg.testing.compare import BrokenError, require, require_close
from thalweg.testing.mixers.subjects import SIZES, MixerSubject, logits_for

WORDED = ("source", "equation", "words", "coverage", "cost", "start")
LISTED = ("chosen", "deviations", "verified")


def supports(subject: MixerSubject) -> str | None:
    """A number of streams is served, or refused by an InputError that says in numbers what it would cost or need."""
    why = subject.refusal()
    if why is None:
        subject.start()
        return None
    message = str(why).strip()
    require(bool(message), "supports() refuses and does not say why")
    require(any(c.isdigit() for c in message), f"the refusal names no number, neither cost nor need: {message!r}")
    try:
        subject.start()
    except InputError as error:
        require(message in str(error), f"the error {str(error)!r} does not give the reason of supports(): {message!r}")
    else:
        raise BrokenError(f"supports() refuses ({message}), but the module is made")
    require(
        any(subject.at(n).refusal() is None for n in SIZES),
        f"refuses every one of {', '.join(map(str, SIZES))} streams",
    )
    return f"refused: {message}"


def facts(subject: MixerSubject) -> None:
    """Source, equation, plain words, coverage, cost and start are there; the claims are values that exist and agree with each other."""
    mixer = subject.start()
    given = getattr(mixer, "facts", None)
    require(isinstance(given, MixerFacts), "the class has no facts")
    for field in WORDED:
        require(bool(str(getattr(given, field)).strip()), f"facts.{field} is empty")
    for field in LISTED:
        value: Any = getattr(given, field)
        listed = isinstance(value, tuple) and all(isinstance(line, str) and line.strip() for line in value)
        require(listed, f"facts.{field} must be a tuple of lines, got {value!r}")
    require(bool((subject.mixer.__doc__ or "").strip()), "the class has no docstring")
    claims = mixer.claims
    require(isinstance(claims, Claims), f"claims must be Claims, got {type(claims).__name__}")
    for name, hint in get_type_hints(Claims).items():
        value, allowed = getattr(claims, name), get_args(hint) or (True, False)
        require(value in allowed, f"claims.{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    require(claims.spectral or not claims.orthogonal, "claims orthogonal but not spectral, which follows")
    stochastic = claims.nonnegative and claims.rows == claims.columns == "exact"
    require(claims.spectral or not stochastic, "claims doubly stochastic but not spectral, which follows (Birkhoff)")


def shapes(subject: MixerSubject) -> None:
    """[... generators] -> [... n n] in the precision of wide logits; no tokens, one matrix, any strides; other shapes are ShapeErrors."""
    mixer, n = subject.random(), subject.streams
    count, groups = mixer.generators, mixer.scaled
    require(type(count) is int and count >= 0, f"generators must be a whole number, got {count!r}")
    require(
        isinstance(groups, tuple) and all(type(size) is int and size > 0 for size in groups) and sum(groups) == count,
        f"scaled is {groups!r}; it must be a tuple of sizes that add up to the {count} generators",
    )
    logits = logits_for(mixer)
    mix = _shaped(mixer(logits), (*logits.shape[:-1], n, n), "forward")
    for dtype in (torch.float32, torch.float64):
        got = mixer.to(dtype)(logits.to(dtype)).dtype
        require(got == dtype, f"logits in {dtype} give a matrix in {got}")
    mixer = subject.random()
    require_close("one matrix alone", _shaped(mixer(logits[1, 2]), (n, n), "forward of one matrix"), mix[1, 2])
    for shape in ((0,), (2, 0)):
        leaf = logits_for(mixer, *shape).requires_grad_()
        none = _shaped(mixer(leaf), (*shape, n, n), "forward of no tokens")
        if none.requires_grad:
            none.sum().backward()
    reference = mix.transpose(0, 1)
    require_close("matrices of transposed tokens", mixer(logits.transpose(0, 1)), reference)
    backing = logits.mT.contiguous()  # the generators are strided, and so is everything that is viewed from them
    require_close("matrices of non-contiguous logits", mixer(backing.mT), mix)
    require_close(
        "matrices of expanded logits", mixer(logits[:1].expand(3, *logits.shape[1:])), mix[:1].expand(3, -1, -1, -1)
    )
    for wrong in (torch.zeros(2, count + 1), torch.zeros(()), *([torch.zeros(2, count - 1)] if count else [])):
        _require_shape_error(mixer, wrong.double())


def _shaped(mix: Tensor, shape: tuple[int, ...], what: str) -> Tensor:
    require(tuple(mix.shape) == tuple(shape), f"{what} gives {list(mix.shape)}, not {list(shape)}")
    return mix


def _require_shape_error(mixer: Any, logits: Tensor) -> None:
    what = f"logits of shape {list(logits.shape)} for {mixer.generators} generators"
    try:
        mixer(logits)
    except ShapeError:
        return
    except Exception as error:
        raise BrokenError(f"{what} raise {type(error).__name__}, not ShapeError; call check(logits) first") from error
    raise BrokenError(f"{what} are taken without an error; call check(logits) first")
