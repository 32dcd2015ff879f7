"""Streams side by side against public code: the same leaves through both, outputs and gradients compared, the worst of them kept.

The measured errors reach ``docs/parity.json``, and from there the table in ``docs/parity.md``, when THALWEG_PARITY=write
(``tools/parity_table.py`` sets it).
"""

import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from thalweg import connections
from thalweg.connections import Site
from thalweg.connections.layouts import LAYOUTS, from_layout

LEDGER = Path(__file__).parents[2] / "docs" / "parity.json"


@dataclass(frozen=True)
class Errors:
    """Largest difference of any output and of any gradient, relative to the largest entry of its tensor."""

    outputs: float
    gradients: float

    @property
    def worst(self) -> float:
        return max(self.outputs, self.gradients)


def gaussian(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Branch(nn.Module):
    """A sublayer with a weight of its own that remembers what it read."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        self.seen: Tensor | None = None

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        self.seen = x
        return torch.tanh(x @ self.weight)


class Ours(nn.Module):
    """All sites of one of our streams in turn; state [b t n d] -> what was read at each site, the last state, the contracted state."""

    def __init__(self, stream: connections.Stream):
        super().__init__()
        self.stream = stream
        self.branches = nn.ModuleList(Branch(stream.width) for _ in stream.sites)

    def forward(self, state: Tensor) -> list[Tensor]:
        reads = []
        for site, branch in zip(self.stream.sites, self.branches, strict=True):
            x, context = site.read(state)
            reads.append(x)
            state = site.write(state, branch(x), context)
        return [*reads, state, self.stream.contract(state)]


def our_stream(name: str, *, width: int, sites: int, **options: object) -> Ours:
    """Without norms, which are the sublayer's business in public code."""
    bare = {"input_norm": False, "final_norm": False, **options}
    return Ours(connections.create(name, width=width, sites=Site.decoder(sites // 2), **bare))


def randomise(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Leaves for every parameter, none at its default: biases of the size of one, scales away from zero, projections of order one."""
    leaves = {}
    for k, (name, parameter) in enumerate(module.named_parameters()):
        value = gaussian(*parameter.shape, seed=100 * seed + k)
        if parameter.numel() <= 3 and ("scale" in name or "alpha" in name):
            value = 0.6 + 0.3 * torch.tanh(value)
        elif parameter.ndim > 1 and "static" not in name:
            value = value * parameter.numel() ** -0.25
        leaves[name] = value.requires_grad_()
    return leaves


def transpose_mix(ours: Ours) -> None:
    """The mutant: every mixing matrix transposed."""
    for site in ours.stream.sites:
        site.mixer.forward = lambda logits, right=site.mixer.forward: right(logits).mT


def ours_from(ours: Ours, theirs: dict[str, Tensor], places: dict[str, str], layout: str, branches: list[str]) -> dict:
    """Our parameters made from their leaves. places: a site's index, or ``head`` -> prefix in theirs; branches: names of the weights."""
    found = {f"branches.{i}.weight": theirs[name] for i, name in enumerate(branches)}
    n, width = ours.stream.options.streams, ours.stream.width
    for place, prefix in places.items():
        head = place == "head"
        module, where = (ours.stream, "") if head else (ours.stream.sites[int(place)], f"sites.{place}.")
        shapes = LAYOUTS[layout].head_shapes if head else LAYOUTS[layout].shapes
        tensors = {name: theirs[prefix + name] for name in shapes(n, width)}
        found |= {f"stream.{where}{name}": value for name, value in from_layout(module, tensors, layout).items()}
    assert set(found) == {name for name, _ in ours.named_parameters()}
    return found


def compare(
    theirs: nn.Module,
    ours: Ours,
    convert,
    state: Tensor,
    leaves: dict[str, Tensor],
    fixed: dict[str, Tensor] | None = None,
) -> Errors:
    """Both from the same leaves: outputs, and gradients of a random sum of them with respect to every leaf and the state.

    convert: leaves -> our parameters. fixed: parameters of theirs that are no leaves.
    """
    state = state.detach().clone().requires_grad_()
    given = functional_call(theirs, {**leaves, **(fixed or {})}, (state,))
    found = functional_call(ours, convert(leaves), (state,))
    assert len(given) == len(found)
    cotangents = [gaussian(*out.shape, seed=900 + k, dtype=out.dtype) for k, out in enumerate(given)]
    wrt = [state, *leaves.values()]
    wanted = torch.autograd.grad(given, wrt, cotangents)
    got = torch.autograd.grad(found, wrt, cotangents)
    for name, gradient in zip(["state", *leaves], wanted, strict=True):
        assert gradient.abs().max() > 0, f"{name} has no gradient over there; the comparison would be blind to it"
    return Errors(worst(found, given), worst(got, wanted))


def worst(found, wanted) -> float:
    """Largest relative difference over pairs of tensors."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True))


_seen: dict[str, dict] = {}


def record(row: str, errors: Errors, distributions: list[str] | dict[str, str], dtype: str = "float64") -> None:
    """Keep the worst errors of a row of the table, on which versions; distributions: names, or names and versions."""
    if isinstance(distributions, list):
        distributions = {name: version(name) for name in distributions}
    kept = _seen.setdefault(row, {"outputs": 0.0, "gradients": 0.0})
    for part in ("outputs", "gradients"):
        kept[part] = max(kept[part], float(f"{getattr(errors, part):.1e}"))
    kept |= {"dtype": dtype, "versions": {**distributions, "torch": torch.__version__.split("+")[0]}}
    if os.environ.get("THALWEG_PARITY") == "write":
        ledger = json.loads(LEDGER.read_text(encoding="utf-8")) if LEDGER.exists() else {}
        ledger[row] = kept
        LEDGER.write_text(json.dumps(ledger, indent=1, sort_keys=True) + "\n", encoding="utf-8")
