"""Groups, hints, decay and learning rates of the optimisers."""

import math

import pytest
import torch
from torch import nn

from thalweg.connections.base import GroupHint
from thalweg.errors import CheckpointError, InputError
from thalweg.models.config import DecoderConfig
from thalweg.models.decoder import Decoder
from thalweg.training.optim import Optimizers, hint_of, layer_of, make_groups

CONFIG = DecoderConfig(vocab_size=17, width=16, depth=2, heads=2, connection="mgt")


@pytest.fixture
def model():
    return Decoder(CONFIG, generator=torch.Generator().manual_seed(0))


def place(groups):
    return {name: group for group in groups for name in group.names}


def fill_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def test_every_parameter_is_in_exactly_one_group(model):
    for optimizer in ("adamw", "muon"):
        groups = make_groups(model.named_parameters(), model.stream.group_hints(), optimizer=optimizer)
        names = [name for group in groups for name in group.names]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_matrices_decay_and_vectors_do_not(model):
    where = place(make_groups(model.named_parameters(), {}, weight_decay=0.3))
    for name, p in model.named_parameters():
        assert where[name].weight_decay == (0.3 if p.ndim >= 2 else 0.0), name


def test_hints_reach_the_stream_only_and_the_first_match_wins(model):
    hints = {"sites.0.*": GroupHint(0.5, 0.07), "*": GroupHint(2.0, None)}
    assert hint_of("stream.sites.0.input_norm.weight", hints) == GroupHint(0.5, 0.07)
    assert hint_of("stream.sites.1.input_norm.weight", hints) == GroupHint(2.0)
    assert hint_of("blocks.0.sublayers.0.query.weight", hints) == GroupHint()
    where = place(make_groups(model.named_parameters(), hints, weight_decay=0.3))
    for name, p in model.named_parameters():
        expected = (1.0, 0.3 if p.ndim >= 2 else 0.0)
        if name.startswith("stream."):
            expected = (0.5, 0.07) if name.startswith("stream.sites.0.") else (2.0, expected[1])
        assert (where[name].lr_mul, where[name].weight_decay) == expected, name


def test_the_hints_of_every_connection_name_parameters_that_exist():
    from fnmatch import fnmatchcase

    from thalweg import connections

    for name in connections.names():
        stream = connections.create(name, width=16, sites=connections.Site.decoder(2))
        own = [n for n, _ in stream.named_parameters()]
        for pattern in stream.group_hints():
            assert any(fnmatchcase(n, pattern) for n in own) or not own, (name, pattern)


def test_muon_moves_the_matrices_of_the_blocks_and_nothing_else(model):
    where = place(make_groups(model.named_parameters(), model.stream.group_hints(), optimizer="muon"))
    for name, p in model.named_parameters():
        assert (where[name].optimizer == "muon") == (name.startswith("blocks.") and p.ndim == 2), name
    assert {group.optimizer for group in where.values()} == {"adamw", "muon"}


def test_muon_updates_are_nearly_orthogonal_and_as_large_as_those_of_adamw(model):
    groups = make_groups(model.named_parameters(), {}, optimizer="muon", weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fill_gradients(model, 1)
    Optimizers(model, groups).step(0.01)
    for name, group in place(groups).items():
        update = (dict(model.named_parameters())[name] - before[name]).detach()
        if group.optimizer == "muon":
            singular = torch.linalg.svdvals(update / update.norm()) * math.sqrt(min(update.shape))
            assert singular.min() > 0.5 and singular.max() < 1.5, name
            assert update.square().mean().sqrt() == pytest.approx(0.2 * 0.01, rel=0.25), name
        else:
            assert update.abs().max() == pytest.approx(0.01, rel=1e-3), (
                name
            )  # the first step of AdamW has the size of lr


def test_the_learning_rate_of_a_group_is_the_run_s_times_its_factor(model):
    hints = {"*": GroupHint(0.25, 0.0)}
    groups = make_groups(model.named_parameters(), hints, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fill_gradients(model, 2)
    Optimizers(model, groups).step(0.01)
    for name, p in model.named_parameters():
        size = (p - before[name]).abs().max().item()
        assert size == pytest.approx(0.0025 if name.startswith("stream.") else 0.01, rel=1e-3), name


def test_decay_is_decoupled_from_the_gradient():
    model = nn.Linear(3, 3)
    groups = make_groups(model.named_parameters(), {}, weight_decay=0.5)
    optimizers = Optimizers(model, groups)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizers.step(0.1)
    torch.testing.assert_close(model.weight.detach(), weight * (1 - 0.1 * 0.5), rtol=1e-6, atol=0)
    torch.testing.assert_close(model.bias.detach(), bias, rtol=0, atol=0)


def test_fused_equals_the_textbook_adamw():
    torch.manual_seed(3)
    model = nn.Linear(5, 4).double()
    optimizers = Optimizers(model, make_groups(model.named_parameters(), {}, weight_decay=0.1), betas=(0.9, 0.95))
    state = {
        name: [p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()
    }
    for step in range(1, 6):
        fill_gradients(model, step)
        for name, p in model.named_parameters():
            theta, m, v = state[name]
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.95).addcmul_(p.grad, p.grad, value=0.05)
            decay = 0.1 if p.ndim == 2 else 0.0
            m_hat, v_hat = m / (1 - 0.9**step), v / (1 - 0.95**step)
            theta.sub_(0.02 * step * (m_hat / (v_hat.sqrt() + 1e-8) + decay * theta))
        optimizers.step(0.02 * step)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), state[name][0], rtol=1e-10, atol=1e-12)


def test_state_of_other_parameters_is_refused(model, tmp_path):
    groups = make_groups(model.named_parameters(), {})
    fill_gradients(model, 4)
    optimizers = Optimizers(model, groups)
    optimizers.step(0.01)
    other = Optimizers(model, make_groups(model.named_parameters(), {}, optimizer="muon"))
    with pytest.raises(CheckpointError, match="holds the state of adamw, this run moves by adamw and muon"):
        other.load_state_dict(optimizers.state_dict(), tmp_path)


def test_a_model_without_anything_to_train_is_refused():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(InputError, match="no parameter to train"):
        Optimizers(model, make_groups(model.named_parameters(), {}))


def test_layers_are_read_from_names():
    assert layer_of("blocks.12.sublayers.0.query.weight") == 12
    assert layer_of("stream.sites.3.beta") is None
