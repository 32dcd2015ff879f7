"""A model that no table knows: what replay finds is what the table says, and what cannot be replayed is refused."""

import pytest
import torch
from tiny_families import FAMILIES, batch, tiny
from torch import nn
from transformers import FalconConfig, FalconForCausalLM

from thalweg import capture
from thalweg.capture import families
from thalweg.capture.structure import by_structure
from thalweg.errors import CaptureError, InputError

UNLIKE = {"deepseek_v4"}  # several streams: structure knows sums only


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - UNLIKE))
def test_structure_agrees_with_the_table(kind):
    model = tiny(kind)
    table, found = capture.locate(model), by_structure(model)
    assert found.found_by == "structure" and capture.prove(found, batch(kind)).worst <= 1e-10
    for name in ("width", "depth", "causal", "base", "blocks", "final_norm", "logit_scale", "logit_softcap"):
        assert getattr(found, name) == getattr(table, name), name
    for place, other in zip(table.sites, found.sites, strict=True):
        for name in ("kind", "sublayer", "update", "parallel", "multiplier", "norm_after", "following", "heads"):
            assert getattr(place, name) == getattr(other, name), (place.name, name)
    seen: list[list] = [[], []]
    for located, events in zip((table, found), seen, strict=True):
        with capture.watch(located, lambda e, events=events: events.append((e.state.clone(), e.branch.clone()))):
            model(**batch(kind))
    for (state, branch), (same_state, same_branch) in zip(*seen, strict=True):
        assert torch.equal(state, same_state) and torch.equal(branch, same_branch)


def test_an_unknown_family_is_located_by_structure(monkeypatch):
    model = tiny("qwen3")
    monkeypatch.setattr(type(families.registry), "__contains__", lambda self, name: False)
    assert capture.locate(model).found_by == "structure"


def test_what_is_added_in_place_later_does_not_change_what_was_seen():
    """Falcon's default: attention and feed-forward side by side, the one added to what the other gave, in place."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FalconForCausalLM(FalconConfig(**sizes, alibi=False)).eval()
    located = capture.locate(model)
    ids = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(1))
    assert {place.parallel for place in located.sites} == {True}
    assert capture.prove(located, {"input_ids": ids}).worst <= 1e-6


class Mix(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x):
        return self.map(x.cumsum(1))


class Plain(nn.Module):
    """A model of nobody: no config, a norm that is no module, a factor on the logits."""

    def __init__(self, parallel=False, mixed=False, shared=False, width=16):
        super().__init__()
        self.table = nn.Embedding(40, width)
        self.towers = nn.ModuleList(Layer(width, parallel, mixed) for _ in range(1 if shared else 2))
        self.turns = 3 if shared else 1
        self.out = nn.Linear(width, 40, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        for _ in range(self.turns):
            for tower in self.towers:
                x = tower(x)
        return self.out(x) * 0.5


class Layer(nn.Module):
    def __init__(self, width, parallel, mixed):
        super().__init__()
        self.norm, self.mix, self.up = nn.LayerNorm(width), Mix(width), nn.Linear(width, width)
        self.parallel, self.mixed = parallel, mixed

    def forward(self, x):
        a = self.mix(self.norm(x))
        if self.mixed:
            return x * torch.sigmoid(a) + a.tanh()
        if self.parallel:
            y = x + a
            return y + self.up(nn.functional.rms_norm(y, y.shape[-1:]))
        y = x + 0.25 * a
        return y + self.up(y)


def test_a_plain_module_with_a_multiplier_and_scaled_logits():
    model = Plain().double()
    located = capture.locate(model)
    assert [place.kind for place in located.sites] == ["mixer", "feed_forward"] * 2 and located.causal
    assert located.sites[0].multiplier == pytest.approx(0.25) and located.logit_scale == pytest.approx(0.5)
    assert capture.prove(located, torch.arange(12).view(2, 6)).worst <= 1e-10


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Plain(mixed=True), "no sum of what its modules give leads"),
        (
            Plain(parallel=True),
            "no sum of what its modules give leads",
        ),  # the second branch reads the sum, which no module shows
        (Plain(shared=True), "is called 3 times in one pass"),
        (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), "no list of blocks"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line(model, why):
    with pytest.raises(CaptureError, match=why) as error:
        capture.locate(model)
    assert "\n" not in str(error.value) and "give a map of its layers" in str(error.value)


def test_streams_side_by_side_are_refused_by_structure():
    with pytest.raises(CaptureError, match=r"is no stream \[b t d\]"):
        by_structure(tiny("deepseek_v4"))


def test_what_is_no_model_of_tokens_is_refused():
    with pytest.raises(InputError, match="a model is a torch module, got str"):
        capture.locate("gpt2")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has no embedding of tokens"):
        capture.locate(nn.Linear(3, 3))
