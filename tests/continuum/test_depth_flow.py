"""The probe of trajectories through depth: against states taken by hand, against its nulls, on every connection."""

import copy
import math

import pytest
import torch
from tiny_families import VOCAB, tiny

from thalweg.continuum import findings
from thalweg.errors import InputError

TEXTS = [torch.randint(5, VOCAB, (20,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(9)]


def found(model, **options):
    return findings(model, TEXTS, ["depth_flow"], length=20, options={"depth_flow": options})[-1]


def rows_of(finding, measure, **where):
    return finding.rows.where(measure=measure, **where).to_rows()


def test_speed_turning_and_cosine_by_hand():
    """Catches a layer off by one, the first token kept, and angles between states in place of steps."""
    model = tiny("llama")
    ids = torch.tensor(TEXTS)
    states = []
    handles = [layer.register_forward_pre_hook(lambda m, args: states.append(args[0])) for layer in model.model.layers]
    handles.append(model.model.norm.register_forward_pre_hook(lambda m, args: states.append(args[0])))
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    finding = found(model)
    path = torch.stack(states)[:, :, 1:]
    steps = path.diff(dim=0)
    for layer in (0, 1):
        wanted = (steps[layer].norm(dim=-1) / path[layer].norm(dim=-1)).mean().item()
        assert rows_of(finding, "depth.speed", layer=layer)[0]["value"] == pytest.approx(wanted)
    wanted = torch.cosine_similarity(steps[0], steps[1], dim=-1).arccos().mean().item()
    assert rows_of(finding, "depth.turning", layer=1)[0]["value"] == pytest.approx(wanted)
    e = torch.nn.functional.normalize(path[2], dim=-1)
    within, across = [], []
    for i in range(9):
        for j in range(9):
            for a in range(19):
                for b in range(19):
                    if i == j and a != b:
                        within.append(e[i, a] @ e[j, b])
                    elif i < j and a < 3 and b < 3:
                        across.append(e[i, a] @ e[j, b])
    assert rows_of(finding, "depth.within_cosine", layer=2)[0]["value"] == pytest.approx(
        torch.stack(within).mean().item()
    )
    assert rows_of(finding, "depth.across_cosine", layer=2)[0]["null"] == 0


class Layer(torch.nn.Module):
    """x + F(x) with F of a fixed kind: towards the mean of the row, or a step that knows nothing of the tokens."""

    def __init__(self, kind, index):
        super().__init__()
        self.kind, self.index = kind, index
        self.sublayer = torch.nn.Identity()

    def forward(self, x):
        g = torch.Generator().manual_seed(self.index)
        if self.kind == "merge":
            return x + self.sublayer(0.5 * (x.mean(1, keepdim=True) - x))
        return x + self.sublayer(torch.randn(x.shape, dtype=x.dtype, generator=g))


class Toy(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, 64)
        self.embedding.weight.data.normal_(generator=torch.Generator().manual_seed(0))
        self.blocks = torch.nn.ModuleList(Layer(kind, i) for i in range(6))

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return (x,)


def toy(kind):
    map = {"blocks": "blocks", "causal": False, "width": 64, "sites": [{"kind": "mixing", "sublayer": "sublayer"}]}
    return findings(Toy(kind), TEXTS, ["depth_flow"], length=20, map=map)[-1]


def test_tokens_that_merge_are_found_and_a_walk_is_not():
    """A probe that finds merging in steps that know nothing of the tokens fails here."""
    merge, walk = toy("merge"), toy("walk")
    (row,) = rows_of(merge, "depth.merging")
    assert row["low"] > 0.5
    (row,) = rows_of(walk, "depth.merging")
    assert abs(row["value"]) < 0.06
    (turn,) = rows_of(walk, "depth.turning", layer=3)
    assert turn["value"] == pytest.approx(math.pi / 2, abs=0.05)
    (row,) = rows_of(walk, "depth.straightness")
    assert row["value"] == pytest.approx(row["null"], rel=0.05)
    (row,) = rows_of(walk, "depth.stable_rank")
    assert row["value"] == pytest.approx(row["null"], rel=0.1)
    assert rows_of(merge, "depth.clusters", layer=6)[0]["value"] < 0.1
    assert rows_of(walk, "depth.clusters", layer=6)[0]["value"] > 0.7


@pytest.mark.parametrize("kind", ["bert", "gpt_neox", "mixtral"])
def test_other_families(kind):
    model = tiny(kind)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert found(model).rows
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_sixteen_bits_are_near_and_say_what_rounding_is():
    narrow = copy.deepcopy(tiny("llama")).bfloat16()
    got, exact = found(narrow), found(copy.deepcopy(narrow).float())
    for measure in ("depth.speed", "depth.turning", "depth.straightness", "depth.stable_rank", "depth.within_cosine"):
        for a, b in zip(rows_of(got, measure), rows_of(exact, measure), strict=True):
            assert a["value"] == pytest.approx(b["value"], rel=5e-3)
    assert any("bfloat16: rounding moves a token by up to 3.9e-03" in line for line in got.caveats)
    assert not any("rounding" in line for line in exact.caveats)


def test_tokens_of_zero_are_left_out_of_the_speed():
    """As where the embedding of padding is zero: catches an infinite layer, and a token that counts as one that stands still."""
    model = copy.deepcopy(tiny("llama"))
    last = TEXTS[0][-1]
    times = sum(text[1:].count(last) for text in TEXTS)
    with torch.no_grad():
        model.model.embed_tokens.weight[last] = 0
    got, whole = found(model), found(tiny("llama"))
    speeds = rows_of(got, "depth.speed")
    assert len(speeds) == 2 and all(math.isfinite(row["value"]) for row in speeds)
    ids, steps = torch.tensor(TEXTS), []
    hook = model.model.layers[0].register_forward_hook(lambda m, args, out: steps.append((args[0], out)))
    with torch.no_grad():
        model(ids)
    hook.remove()
    ((before, after),) = steps
    moving = (ids != last)[:, 1:]
    wanted = ((after - before).norm(dim=-1)[:, 1:] / before.norm(dim=-1)[:, 1:])[moving].mean().item()
    assert speeds[0]["value"] == pytest.approx(wanted)
    (line,) = (line for line in got.caveats if "depth.speed" in line)
    assert f"up to {times} of 171 tokens is zero before 1 of 2 layers" in line
    assert not any("depth.speed" in line for line in whole.caveats)


def test_one_window_is_told_and_not_a_nan():
    one = findings(tiny("llama"), TEXTS[:1], ["depth_flow"], length=20)[-1]
    assert "beyond those of others needs two windows in a batch" in one.summary and "nan" not in one.summary
    assert "nan" not in found(tiny("llama")).summary


@pytest.mark.parametrize("beta", [0.0, 1e9, math.nan])
def test_a_beta_without_a_null_is_refused(beta):
    with pytest.raises(InputError, match="beta of depth_flow must be above 0 and at most 700") as error:
        found(tiny("gpt2"), beta=beta)
    assert "\n" not in str(error.value)
    steep = found(tiny("gpt2"), beta=700.0)
    assert all(math.isfinite(row["null"]) for row in rows_of(steep, "depth.energy"))


def test_bad_input_is_one_line():
    short = findings(tiny("gpt2"), [[5, 6], [7, 8]], ["depth_flow"])[-1]
    assert "longer texts" in short.failed
