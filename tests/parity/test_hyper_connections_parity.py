"""Hyper-connections and mHC against the PyPI package hyper-connections: its classes, its parameters, our options for its deviations."""

import pytest
import torch
from agreement import Branch, Errors, compare, gaussian, our_stream, ours_from, randomise, record, transpose_mix
from hyper_connections import HyperConnections, ManifoldConstrainedHyperConnections
from hyper_connections import mHCv2 as v2
from hyper_connections.residuals import OrthogonalResidualUpdate
from torch import nn

WIDTH, SITES = 7, 4
# How its mHC differs from the paper, said in our options: coefficients from each stream by itself, under a norm without eps; the rows of
# alpha[from, to] are normalised last, so that what a stream gives away sums to one and what it receives only nearly does.
ITS_MHC = {
    "coefficients": "per_stream",
    "coefficient_eps": 0.0,
    "contraction": "sum",
    "mixer_options": {"exact": "columns"},
}
ITS_HC = {"coefficient_eps": 0.0}


class Stack(nn.Module):
    """Sites of the package around plain branches. ``folded``: it keeps the streams in the batch axis [(b n) t d], else [b t n d]."""

    def __init__(self, make, n, folded):
        super().__init__()
        self.sites = nn.ModuleList(make(n, dim=WIDTH, layer_index=i) for i in range(SITES))
        self.branches = nn.ModuleList(Branch(WIDTH) for _ in range(SITES))
        self.folded = folded

    def forward(self, state):
        b, t, n, d = state.shape
        x, reads = state.permute(0, 2, 1, 3).reshape(b * n, t, d) if self.folded else state, []
        for site, branch in zip(self.sites, self.branches, strict=True):
            read, add = site(x)
            reads.append(read)
            x = add(branch(read))
        if self.folded:
            x = x.unflatten(0, (b, n)).permute(0, 2, 1, 3)
        return [*reads, x, x.sum(2)]


CLASSES = {
    "hyper_connections": (HyperConnections, True, "hyper_connections", ITS_HC),
    "hyper_connections_mhc": (ManifoldConstrainedHyperConnections, True, "mhc", ITS_MHC),
    "hyper_connections_mhc_v2": (v2.ManifoldConstrainedHyperConnections, False, "mhc", ITS_MHC),
}


def agreement(layout, n, *, theirs=None, mine=None, spoil=None, static=False) -> Errors:
    make, folded, name, options = CLASSES[layout]
    stack = Stack(lambda *a, **k: make(*a, **{**k, **(theirs or {})}), n, folded).double()
    ours = our_stream(name, width=WIDTH, sites=SITES, streams=n, **{**options, **(mine or {})}, dynamic=not static)
    if spoil is not None:
        spoil(ours)
    leaves = randomise(stack)
    fixed = (
        {k: torch.zeros_like(v) if "_fn" in k else v.detach() for k, v in leaves.items() if moving(k)} if static else {}
    )
    branches = [f"branches.{i}.weight" for i in range(SITES)]
    places = {str(i): f"sites.{i}." for i in range(SITES)}

    return compare(
        stack,
        ours,
        lambda given: ours_from(ours, {**given, **fixed}, places, layout, branches),
        gaussian(2, 3, n, WIDTH, seed=1),
        {k: v for k, v in leaves.items() if k not in fixed},
        fixed,
    )


def moving(name):
    return "dynamic" in name or "scale" in name or "gamma" in name


@pytest.mark.parametrize("n", [4, 3, 1])
@pytest.mark.parametrize("tanh", [True, False])
def test_dynamic_hyper_connections(n, tanh):
    errors = agreement("hyper_connections", n, theirs={"tanh": tanh}, mine={"tanh": tanh})
    assert errors.worst < 1e-12
    record("hyper_connections_dynamic", errors, ["hyper-connections"])


@pytest.mark.parametrize("n", [4, 2])
def test_static_hyper_connections(n):
    """Theirs with projections of zero; ours without any."""
    errors = agreement("hyper_connections", n, static=True)
    assert errors.worst < 1e-12
    record("hyper_connections_static", errors, ["hyper-connections"])


@pytest.mark.parametrize("layout", ["hyper_connections_mhc", "hyper_connections_mhc_v2"])
@pytest.mark.parametrize(("n", "log_domain"), [(4, False), (4, True), (3, False)])
def test_its_mhc(layout, n, log_domain, float64_throughout):
    errors = agreement(layout, n, theirs={"log_domain_sinkhorn": log_domain})
    assert errors.worst < 1e-12
    record(layout, errors, ["hyper-connections"])


@pytest.mark.parametrize("layout", CLASSES)
def test_a_transposed_mix_is_noticed(layout, float64_throughout):
    assert agreement(layout, 4, spoil=transpose_mix).outputs > 0.05


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [
        ("mixer_options", {}, 1e-9),
        ("mixer_options", {"exact": "columns", "iterations": 19}, 1e-9),
        ("coefficient_eps", 1e-3, 1e-5),
    ],
)
def test_each_deviation_of_its_mhc_is_needed(option, value, least, float64_throughout):
    """The paper's marginal, another count of iterations, another eps: each of them is seen."""
    assert agreement("hyper_connections_mhc", 4, mine={option: value}).outputs > least


def test_its_mhc_gives_away_one_and_receives_nearly_one():
    """The mixed convention: rows of alpha[from, to] are normalised last and the first index is contracted (research: exact marginal lost)."""
    site = ManifoldConstrainedHyperConnections(4, dim=WIDTH, layer_index=0, sinkhorn_iters=1)
    alpha = site.residual_mix_constraint_fn(gaussian(4, 4, seed=2))
    torch.testing.assert_close(alpha.sum(1), torch.ones(4, dtype=torch.float64))
    assert (alpha.sum(0) - 1).abs().max() > 0.01


def test_its_mhc_starts_elsewhere():
    """One-hot and identity as logits: sigmoid(1) and sigmoid(0), a mix far from the identity, a write of 2 sigmoid(1). Values, not code."""
    from thalweg.connections.layouts import from_layout

    its = ManifoldConstrainedHyperConnections(4, dim=WIDTH, layer_index=1)
    ours = our_stream("mhc", width=WIDTH, sites=2, **ITS_MHC).stream.sites[0]
    start = from_layout(ours, dict(its.named_parameters()), "hyper_connections_mhc")
    read, write = torch.sigmoid(start["logits.read.bias"]), 2 * torch.sigmoid(start["logits.write.bias"])
    mix = ours.mixer(start["logits.mix.bias"])
    assert read.tolist() == pytest.approx([0.5, 0.731059, 0.5, 0.5], abs=1e-6)
    assert write.tolist() == pytest.approx([1.462117] * 4, abs=1e-6)
    assert mix[0].tolist() == pytest.approx([0.475366886] + 3 * [0.174877705], abs=1e-6)


class Orthogonal(nn.Module):
    """Sites of the package's orthogonal update around plain branches; its argument is the update, then the stream."""

    def __init__(self):
        super().__init__()
        self.sites = nn.ModuleList(OrthogonalResidualUpdate() for _ in range(SITES))
        self.branches = nn.ModuleList(Branch(WIDTH) for _ in range(SITES))

    def forward(self, state):
        x, reads = state.squeeze(2), []
        for site, branch in zip(self.sites, self.branches, strict=True):
            reads.append(x)
            x = site(branch(x), x)
        return [*reads, x.unsqueeze(2), x]


def orthogonal_agreement(**options):
    stack = Orthogonal().double()
    ours = our_stream("orthogonal", width=WIDTH, sites=SITES, streams=1, **options)
    leaves = randomise(stack)
    return compare(
        stack,
        ours,
        lambda given: ours_from(ours, given, {}, None, [f"branches.{i}.weight" for i in range(SITES)]),
        gaussian(2, 3, 1, WIDTH, seed=1),
        leaves,
        {},
    )


def test_orthogonal_updates():
    errors = orthogonal_agreement(eps=0.0)
    assert errors.worst < 1e-12
    record("hyper_connections_orthogonal", errors, ["hyper-connections"])


@pytest.mark.parametrize("options", [{"eps": 0.1}, {"eps": 0.0, "retained": 0.01}])
def test_each_option_of_orthogonal_updates_is_seen(options):
    assert orthogonal_agreement(**options).outputs > 1e-5
