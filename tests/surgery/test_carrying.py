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


# Every optimiser of torch with a number for each entry, and how far it moves a weight that was multiplied by f, in powers of f.
ENTRYWISE = {
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, amsgrad=True), 0),
    "nadam": (lambda p: torch.optim.NAdam(p, lr=1e-2), 0),
    "radam": (lambda p: torch.optim.RAdam(p, lr=1e-2), -1),  # before its sixth step, as SGD
    "adamax": (lambda p: torch.optim.Adamax(p, lr=1e-2), 0),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1), 0),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True), 0),
    "rprop": (lambda p: torch.optim.Rprop(p, lr=1e-2), 1),
    "asgd": (lambda p: torch.optim.ASGD(p, lr=1e-2, lambd=0.0), -1),
    "sgd": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), -1),
    "adadelta": (lambda p: torch.optim.Adadelta(p, lr=1.0, eps=1e-16), 1),  # but for its eps, which is a length too
}


@pytest.mark.parametrize("kind", ENTRYWISE)
@pytest.mark.parametrize(
    "shape", [lambda m: grow_heads(m, {1: 2}), lambda m: grow_width(m, width=24)], ids=["heads", "width"]
)
def test_every_optimiser_moves_what_was_there_as_before(kind, shape):
    """Entry by entry to rounding, and a norm that was multiplied by f by f to the power that the optimiser has."""
    make, power = ENTRYWISE[kind]
    model = decoder()
    optimizer = make(model.parameters())
    trained(optimizer, model)
    for state in optimizer.state.values():
        if "acc_delta" in state:
            state["acc_delta"].fill_(1e-4)  # far above eps, where it comes to after long
    ungrown = copy.deepcopy(model)
    other = make(ungrown.parameters())
    for old, new in zip(model.parameters(), ungrown.parameters(), strict=True):
        other.state[new] = copy.deepcopy(optimizer.state[old])
    grown, change = shape(model)
    carry_optimizer(optimizer, change)
    before = {name: p.detach().clone() for name, p in (*ungrown.named_parameters(), *grown.named_parameters("grown"))}
    update(other, ungrown, tokens(seed=9))
    update(optimizer, grown, tokens(seed=9))
    theirs, scaled = dict(ungrown.named_parameters()), 0
    for name, parameter in grown.named_parameters():
        map = change.maps[name]
        moved = parameter.detach() - before[f"grown.{name}"]
        there = map.carry(torch.ones_like(theirs[map.old]), torch.zeros_like(parameter)).bool()
        expected = map.carry(theirs[map.old].detach() - before[map.old], torch.zeros_like(parameter), map.factor**power)
        assert (moved - expected)[there].norm() <= 1e-6 * expected.norm(), name
        scaled += map.factor != 1
    assert (scaled > 0) == (grown.config.width > 16)
    trained(optimizer, grown, 1)


def test_new_entries_begin_as_in_a_fresh_optimiser():
    """Zero is a step size that no gradient wakes, and a mean that the weight never had."""
    starts = {"adagrad": ("sum", 0.1), "rprop": ("step_size", 1e-2), "asgd": ("ax", None)}
    for kind, (key, value) in starts.items():
        model = decoder()
        optimizer = ENTRYWISE[kind][0](model.parameters())
        trained(optimizer, model)
        grown, change = grow_heads(model, {1: 2})
        carry_optimizer(optimizer, change)
        query = grown.blocks[1].sublayers[0].query.weight
        added = optimizer.state[query][key][16:]
        assert torch.equal(added, query[16:] if value is None else torch.full_like(added, value)), kind


class Peculiar(torch.optim.SGD):
    """Keeps what nobody knows, and what is not there entry by entry."""

    def __init__(self, parameters, kept):
        super().__init__(parameters, lr=0.1)
        self.kept = kept

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.kept(parameter)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.Adafactor(p, lr=1e-2), r"Adafactor keeps row_var of blocks\.1\..* as \[16, 1\]"),
        (lambda p: torch.optim.LBFGS(list(p)), "LBFGS keeps all parameters in one vector"),
        (lambda p: Peculiar(p, lambda w: {"z": w.detach().clone()}), "Peculiar keeps z of .* is not known"),
        (
            lambda p: Peculiar(p, lambda w: {"exp_avg": w.detach().to(torch.uint8)}),
            "keeps exp_avg of .* make a new optimiser",
        ),
        (lambda p: Peculiar(p, lambda w: {"rows": [w.detach()]}), "keeps rows of .* as list"),
    ],
    ids=["adafactor", "lbfgs", "unknown", "quantised", "list"],
)
def test_state_that_cannot_follow_is_refused_before_anything_changes(make, words):
    model = decoder()
    optimizer = make(model.parameters())
    if not isinstance(optimizer, torch.optim.LBFGS):
        trained(optimizer, model, 1)
    held, kept = [p for group in optimizer.param_groups for p in group["params"]], dict(optimizer.state)
    _, change = grow_heads(model, {1: 2})
    with pytest.raises(InputError, match=words) as caught:
        carry_optimizer(optimizer, change)
    assert "\n" not in str(caught.value)
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, after, strict=True)) and dict(optimizer.state) == kept


def test_state_of_another_kind_goes_along_where_nothing_is_new():
    """A layer more changes no parameter, so that factored state stays; of heads that go, any number for each entry does."""
    model = decoder()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    trained(optimizer, model, 1)
    grown, change = grow_depth(model, 1)
    carry_optimizer(optimizer, change)
    trained(optimizer, grown, 1)
    mask_heads(grown, {0: {0: 0.0, 1: 0.0}})
    optimizer = Peculiar(grown.parameters(), lambda w: {"z": w.detach().clone(), "count": 3})
    optimizer.step()
    smaller, change = prune_heads(grown, {0: [0, 1]})
    carry_optimizer(optimizer, change)
    for parameter in smaller.parameters():
        assert torch.equal(optimizer.state[parameter]["z"], parameter) and optimizer.state[parameter]["count"] == 3


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

    def wrong(state, old, new, map, settings):
        found = right(state, old, new, map, settings)
        return {k: v.roll(1, 0) if v.ndim and v.shape == new.shape else v for k, v in found.items()}

    monkeypatch.setattr(carrying, "carried_state", wrong)
    for test in (
        test_old_state_to_the_last_bit_and_zeros_for_the_new,
        test_the_next_step_moves_old_entries_as_without_growth,
    ):
        with pytest.raises(AssertionError):
            test("adam", "heads")
