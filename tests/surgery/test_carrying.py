"""Optimisers and schedulers go on through a change of shape: old state to the last bit, the next step the same, groups and rates kept."""

import copy

import pytest
import torch
from growing_reference import decoder, tokens

from thalweg.errors import InputError
from thalweg.surgery import carry_optimizer, carrying, grow_depth, grow_heads, grow_width, mask_heads, prune_heads
from thalweg.training.optim import Optimizers, make_groups

SHAPES = {
    "heads": lambda m: grow_heads(m, {1: 2}),
    "ffn": lambda m: grow_width(m, ffn_width=56),
    "layer": lambda m: grow_depth(m, 1),
}


def trained(optimizer, model, steps=3):
    for step in range(steps):
        update(optimizer, model, tokens(seed=step))
    return model


def update(optimizer, model, ids):
    optimizer.zero_grad()
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def two_groups(model):
    """Matrices that decay and vectors that do not, with names, as most loops have it."""
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


KINDS = {
    "adamw": lambda m: torch.optim.AdamW(two_groups(m), lr=1e-2, amsgrad=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
    "sgd": lambda m: torch.optim.SGD(two_groups(m), lr=1e-2, momentum=0.9),
}


def states(optimizer):
    return {id(p): {k: copy.deepcopy(v) for k, v in state.items()} for p, state in optimizer.state.items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_old_state_to_the_last_bit_and_zeros_for_the_new(kind, shape):
    model = decoder(bias=True)
    optimizer = KINDS[kind](model)
    trained(optimizer, model)
    before, groups = states(optimizer), [dict(g, params=None, param_names=None) for g in optimizer.param_groups]
    old = dict(model.named_parameters())
    grown, change = SHAPES[shape](model)
    assert carry_optimizer(optimizer, change) is optimizer
    assert [dict(g, params=None, param_names=None) for g in optimizer.param_groups] == groups
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in grown.parameters()} and len(held) == len({id(p) for p in held})
    added = 0
    for name, parameter in grown.named_parameters():
        map = change.maps[name]
        if map is None:
            assert parameter not in optimizer.state
            added += 1
            continue
        for key, value in before[id(old[map.old])].items():
            found = optimizer.state[parameter][key]
            if not value.ndim:
                assert torch.equal(found, value)
                continue
            assert found.shape == parameter.shape
            there = map.carry(torch.ones_like(value), torch.zeros_like(found)).bool()
            assert torch.equal(found[there].sort().values, value.flatten().sort().values), name
            assert torch.equal(found, map.carry(value, torch.zeros_like(found))) and not found[~there].any()
    assert (added > 0) == (shape == "layer")
    trained(optimizer, grown, 2)  # and it goes on


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_step_moves_old_entries_as_without_growth(kind, shape):
    model = decoder()
    optimizer = KINDS[kind](model)
    trained(optimizer, model)
    ungrown = copy.deepcopy(model)
    other = KINDS[kind](ungrown)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    grown, change = SHAPES[shape](model)
    carry_optimizer(optimizer, change)
    update(other, ungrown, tokens(seed=9))
    update(optimizer, grown, tokens(seed=9))
    theirs = dict(ungrown.named_parameters())
    for name, parameter in grown.named_parameters():
        map = change.maps[name]
        if map is not None:
            there = map.carry(torch.ones_like(theirs[map.old]), torch.zeros_like(parameter)).bool()
            expected = map.carry(theirs[map.old].detach(), torch.zeros_like(parameter))
            assert torch.allclose(parameter[there], expected[there], rtol=1e-9, atol=1e-11), name


def test_pruned_heads_take_their_state_along():
    model = decoder()
    mask_heads(model, {0: {0: 0.0, 1: 0.0}})
    optimizer = KINDS["adamw"](model)
    trained(optimizer, model)
    output = model.blocks[0].sublayers[0].output.weight
    kept = optimizer.state[output]["exp_avg"][:, 8:].clone()
    smaller, change = prune_heads(model, {0: [0, 1]})
    carry_optimizer(optimizer, change)
    assert torch.equal(optimizer.state[smaller.blocks[0].sublayers[0].output.weight]["exp_avg"], kept)
    assert output not in optimizer.state
    trained(optimizer, smaller)


def test_ours_stay_in_the_order_of_the_model_and_resume(tmp_path):
    """The groups of the package's own optimisers are those that a new model of the grown configuration would have."""
    model = decoder(connection="mgt")

    def ours(m):
        groups = make_groups(m.named_parameters(), m.stream.group_hints(), optimizer="muon")
        return Optimizers(m, groups, fused=False)

    optimizer = ours(model)
    for step in range(2):
        optimizer.zero_grad()
        model(tokens(seed=step), labels=tokens(seed=step)).loss.backward()
        optimizer.step(1e-3)
    for operation in (
        lambda m: grow_heads(m, {0: 2}),
        lambda m: grow_depth(m, [0, 2]),
        lambda m: grow_width(m, ffn_width=64),
    ):
        model, change = operation(model)
        carry_optimizer(optimizer, change)
    fresh = ours(model)
    for name, member in optimizer.members.items():
        names = [group["param_names"] for group in member.param_groups]
        assert names == [group["param_names"] for group in fresh.members[name].param_groups]
        assert [g["weight_decay"] for g in member.param_groups] == [
            g["weight_decay"] for g in fresh.members[name].param_groups
        ]
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()), tmp_path)
    optimizer.zero_grad()
    model(tokens(), labels=tokens()).loss.backward()
    optimizer.step(1e-3)


@pytest.mark.parametrize("in_place", [False, True])
def test_schedulers_go_on(in_place):
    """LambdaLR zips its rates with the groups strictly, so that one group more would stop it."""
    model = decoder()
    optimizer = KINDS["adamw"](model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 0.5**step])
    for operation in (lambda m: grow_heads(m, {0: 2}, in_place=in_place), lambda m: grow_depth(m, in_place=in_place)):
        update(optimizer, model, tokens())
        scheduler.step()
        model, change = operation(model)
        carry_optimizer(optimizer, change)
    update(optimizer, model, tokens())
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([1e-2 * 0.9**3, 1e-2 * 0.5**3]) and len(scheduler.base_lrs) == 2
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}


def test_scaled_parameters_scale_their_moments():
    """Norms of a wider model are smaller by c, their gradients larger by 1/c: first moments follow, second moments by the square."""
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = tokens()
    update(optimizer, model, ids)
    old = model.stream.final_norm.weight
    first, second = (optimizer.state[old][key].clone() for key in ("exp_avg", "exp_avg_sq"))
    grown, change = grow_width(model, width=64)
    carry_optimizer(optimizer, change)
    new = grown.stream.final_norm.weight
    assert torch.allclose(new[:16], old / 2) and change.maps["stream.final_norm.weight"].factor == 0.5
    assert torch.allclose(optimizer.state[new]["exp_avg"][:16], 2 * first)
    assert torch.allclose(optimizer.state[new]["exp_avg_sq"][:16], 4 * second)
    assert not optimizer.state[new]["exp_avg"][16:].any()
    model.zero_grad()
    for m in (model, grown):
        m(ids, labels=ids).loss.backward()
    assert torch.allclose(new.grad[:16], 2 * old.grad, rtol=1e-8)


def test_what_it_does_not_move_stays_alone():
    model = decoder()
    beside = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.blocks.parameters(), beside], lr=0.1, momentum=0.9)
    _, change = grow_heads(model, {0: 2})
    carry_optimizer(optimizer, change)
    held = optimizer.param_groups[0]["params"]
    assert any(p is beside for p in held) and not any(p is change.new["embedding.weight"] for p in held)
    with pytest.raises(InputError, match="moves no parameter of the model that was changed"):
        carry_optimizer(torch.optim.SGD([beside], lr=0.1), change)


def test_permuted_state_is_seen(monkeypatch):
    """A mutant: the state of old entries in another order. The bitwise test must fail on it."""
    right = carrying.carried_state

    def wrong(state, old, new, map):
        found = right(state, old, new, map)
        return {k: v.roll(1, 0) if v.ndim and v.shape == new.shape else v for k, v in found.items()}

    monkeypatch.setattr(carrying, "carried_state", wrong)
    for test in (
        test_old_state_to_the_last_bit_and_zeros_for_the_new,
        test_the_next_step_moves_old_entries_as_without_growth,
    ):
        with pytest.raises(AssertionError):
            test("adam", "heads")
