"""mHC and attention residuals against Liger's Triton kernels, run by Triton's interpreter on a CPU, in float32."""

import os

import pytest
import torch
from agreement import Branch, Errors, compare, gaussian, our_stream, ours_from, randomise, record, transpose_mix, worst
from torch import nn

# The interpreter also divides in the lanes that the kernels mask off, 0 by 0.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
WIDTH, SITES = 8, 2
# How it differs from the paper, said in our options: columns of res[to, from] are normalised last and the second index is contracted, so
# that what a stream gives away sums to one and what it receives only nearly does; eps as in DeepSeek's code.
ITS_MHC = {"mixer_options": {"eps": 1e-6, "exact": "columns"}, "contraction": "sum"}


@pytest.fixture(scope="module")
def liger():
    assert os.environ.get("TRITON_INTERPRET") == "1", "these kernels run in the interpreter; run: make test-parity"
    from liger_kernel.transformers import functional, mhc

    return functional, mhc


class Stack(nn.Module):
    def __init__(self, mhc, n, **options):
        super().__init__()
        self.sites = nn.ModuleList(
            mhc.LigerMHC(Branch(WIDTH), hc=n, c=WIDTH, phi_dtype=torch.float32, allow_fp32=True, **options)
            for _ in range(SITES)
        )

    def forward(self, state):
        reads = []
        for site in self.sites:
            state = site(state)
            reads.append(site.layer.seen)
        return [*reads, state, state.sum(2)]


def agreement(mhc, n, *, theirs=None, mine=None, spoil=None) -> Errors:
    stack = Stack(mhc, n, **(theirs or {}))
    ours = our_stream("mhc", width=WIDTH, sites=SITES, streams=n, **{**ITS_MHC, **(mine or {})})
    if spoil is not None:
        spoil(ours)
    leaves = {name: leaf.detach().float().requires_grad_() for name, leaf in randomise(stack).items()}
    places = {str(i): f"sites.{i}." for i in range(SITES)}
    branches = [f"sites.{i}.layer.weight" for i in range(SITES)]
    return compare(
        stack,
        ours,
        lambda given: ours_from(ours, given, places, "paper", branches),
        gaussian(1, 3, n, WIDTH, seed=1, dtype=torch.float32),
        leaves,
    )


@pytest.mark.parity
@pytest.mark.parametrize(("n", "tmax"), [(4, 20), (2, 3)])
def test_mhc(liger, n, tmax):
    mine = {"mixer_options": {**ITS_MHC["mixer_options"], "iterations": tmax}}
    errors = agreement(liger[1], n, theirs={"tmax": tmax}, mine=mine)
    assert errors.worst < 5e-5
    record("liger_mhc", errors, ["liger-kernel", "triton"], dtype="float32")


@pytest.mark.parity
def test_mhc_with_the_eps_of_deepseek_on_reads(liger):
    errors = agreement(liger[1], 4, theirs={"pre_eps": 1e-2}, mine={"read_eps": 1e-2})
    assert errors.worst < 5e-5


@pytest.mark.parity
def test_a_transposed_mix_is_noticed(liger):
    assert agreement(liger[1], 4, spoil=transpose_mix).outputs > 0.05


@pytest.mark.parity
def test_the_marginal_of_the_paper_is_not_that_of_liger(liger):
    """With one iteration the two are far apart; our default (rows exact) is not Liger's matrix."""
    rows = {"mixer_options": {"eps": 1e-6, "exact": "rows", "iterations": 1}}
    assert agreement(liger[1], 4, theirs={"tmax": 1}, mine=rows).outputs > 0.01


@pytest.mark.parity
def test_its_start_is_the_uniform_matrix(liger):
    """Biases of zero: reads 0.5, writes 1, mix 1/n; the paper's appendix starts near the identity. Values, not code."""
    its = liger[1].LigerMHC(Branch(WIDTH), hc=4, c=WIDTH, phi_dtype=torch.float32, allow_fp32=True)
    assert not its.b.any() and {its.alpha_pre.item(), its.alpha_post.item(), its.alpha_res.item()} == {1.0}


@pytest.mark.parity
@pytest.mark.parametrize("sources", [2, 5])
def test_attention_residuals(liger, sources):
    from thalweg.connections.attention_residuals import AttentionResidualsOptions, DepthAttention

    ours = DepthAttention(WIDTH, AttentionResidualsOptions(norm_eps=1e-6))
    leaves = [
        gaussian(sources, 2, 3, WIDTH, seed=1, dtype=torch.float32),
        gaussian(WIDTH, seed=2, dtype=torch.float32),
        1 + 0.3 * gaussian(WIDTH, seed=3, dtype=torch.float32),
    ]
    stacked, query, weight = (leaf.requires_grad_() for leaf in leaves)

    def mine(values):
        given = {"query": query, "key_norm.weight": weight}
        return torch.func.functional_call(ours, given, (list(values.unbind(0)),))[0]

    found, wanted = mine(stacked), liger[0].liger_attn_res(stacked, query, weight, 1e-6)
    cotangent = gaussian(*found.shape, seed=4, dtype=torch.float32)
    got = torch.autograd.grad(found, [stacked, query, weight], cotangent)
    expected = torch.autograd.grad(wanted, [stacked, query, weight], cotangent)
    errors = Errors(worst([found], [wanted]), worst(got, expected))
    assert errors.worst < 5e-5
    assert worst([stacked.mean(0)], [wanted]) > 0.05  # the weights are not those of the start
    record("liger_attn_res", errors, ["liger-kernel", "triton"], dtype="float32")
