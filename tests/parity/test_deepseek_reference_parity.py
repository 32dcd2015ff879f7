"""mHC against DeepSeek's own torch reference: the functions of tile_kernels/torch/mhc.py, read from the package without importing it.

The package itself imports a compiler for Hopper GPUs; ``make test`` puts its files beside the environment's packages, without dependencies.
"""

import importlib.util
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch
from agreement import Branch, Errors, compare, gaussian, our_stream, ours_from, randomise, record, transpose_mix
from torch import nn

WIDTH, SITES, EPS = 6, 4, 1e-6
OPTIONS = {"contraction": "head", "read_eps": EPS}


@pytest.fixture(scope="module")
def reference():
    """(module, version)"""
    places = [str(Path(sys.prefix) / "references"), *sys.path]
    found = next(iter(distributions(name="tile-kernels", path=places)), None)
    assert found is not None, "tile-kernels is not here; run: make test, or pip install --no-deps tile-kernels==1.0.0"
    spec = importlib.util.spec_from_file_location(
        "tile_kernels_torch_mhc", str(found.locate_file("tile_kernels/torch/mhc.py"))
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, found.version


class HyperConnection(nn.Module):
    """The reference has functions and no module: its parameters, as DeepSeek-V4 names them."""

    def __init__(self, n):
        super().__init__()
        self.fn = nn.Parameter(torch.zeros(n * (n + 2), n * WIDTH))
        self.base = nn.Parameter(torch.zeros(n * (n + 2)))
        self.scale = nn.Parameter(torch.zeros(3))


class Head(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.hc_fn = nn.Parameter(torch.zeros(n, n * WIDTH))
        self.hc_base = nn.Parameter(torch.zeros(n))
        self.hc_scale = nn.Parameter(torch.zeros(1))


class Stack(nn.Module):
    """The chain of reference functions, as its authors' pre and post compose them."""

    def __init__(self, reference, n, repeat):
        super().__init__()
        self.reference, self.repeat = reference, repeat
        self.sites = nn.ModuleList(HyperConnection(n) for _ in range(SITES))
        self.branches = nn.ModuleList(Branch(WIDTH) for _ in range(SITES))
        self.head = Head(n)

    def forward(self, state):
        theirs, reads = self.reference, []
        for site, branch in zip(self.sites, self.branches, strict=True):
            mixes = theirs.mhc_pre_norm_fn_ref(state, site.fn, None, EPS)
            pre, post, comb = theirs.mhc_pre_split_mixes_ref(mixes, site.scale, site.base, state.shape[2], 2.0, EPS)
            comb = theirs.sinkhorn_normalize_ref(comb, self.repeat, EPS)
            read = theirs.mhc_pre_apply_mix_ref(state, pre)
            state = theirs.mhc_post_ref(branch(read), state, post, comb)
            reads.append(read)
        mixes = theirs.mhc_pre_norm_fn_ref(state, self.head.hc_fn, None, EPS)
        weights = theirs.mhc_head_compute_mix_ref(mixes, self.head.hc_scale, self.head.hc_base, EPS)
        return [*reads, state, theirs.mhc_pre_apply_mix_ref(state, weights.unsqueeze(-1))]


def agreement(reference, n, repeat, spoil=None) -> Errors:
    theirs = Stack(reference, n, repeat).double()
    ours = our_stream(
        "mhc", width=WIDTH, sites=SITES, streams=n, mixer_options={"eps": EPS, "iterations": repeat}, **OPTIONS
    )
    if spoil is not None:
        spoil(ours)
    places = {str(i): f"sites.{i}." for i in range(SITES)} | {"head": "head."}
    branches = [f"branches.{i}.weight" for i in range(SITES)]
    return compare(
        theirs,
        ours,
        lambda leaves: ours_from(ours, leaves, places, "deepseek_v4", branches),
        gaussian(2, 3, n, WIDTH, seed=1),
        randomise(theirs),
    )


@pytest.mark.parametrize(("n", "repeat"), [(4, 20), (4, 10), (2, 1)])
def test_reference_functions(reference, n, repeat, float64_throughout):
    errors = agreement(reference[0], n, repeat)
    assert errors.worst < 1e-12
    record("tile_kernels", errors, {"tile-kernels": reference[1]})


def test_a_transposed_mix_is_noticed(reference, float64_throughout):
    assert agreement(reference[0], 4, 20, transpose_mix).outputs > 0.05


def test_another_count_of_iterations_is_noticed(reference, float64_throughout):
    def fewer(ours):
        for site in ours.stream.sites:
            site.mixer.options = type(site.mixer.options)(iterations=19, eps=EPS)

    assert agreement(reference[0], 4, 20, fewer).outputs > 1e-9
