"""Loss-free balancing: it evens out a skewed load, once per update, exactly again after a resumption."""

import pytest
import torch

from thalweg import data
from thalweg.geometry.routing import max_over_mean
from thalweg.models import Decoder, DecoderConfig
from thalweg.models.balancing import Balancer
from thalweg.records import RunFolder
from thalweg.training import TrainConfig, checkpoint, train
from thalweg.training.engine import Engine
from thalweg.training.parallel import Ranks

TASK = data.load("copy:vocab=8,half=5")
BASE = {"depth": 2, "width": 16, "heads": 2, "layers": ("attention", "moe"), "model": {"experts": 4, "dense_layers": 1}}
BASE |= {"data": "copy:vocab=8,half=5", "sequence_length": 11, "batch_size": 8, "steps": 12, "lr": 1e-2, "threads": 1}
BASE |= {"eval_every": 4, "eval_batches": 1, "geometry": False}


def engine(**changes):
    return Engine(TrainConfig(**(BASE | changes)), TASK, torch.device("cpu"), Ranks())


def votes(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("votes")}


def last_weights(folder):
    return checkpoint.read(checkpoint.find(RunFolder.open(folder).checkpoints, "last")).weights()


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
def test_a_skewed_load_becomes_even_and_stays_so(router):
    """Weights stand still and all tokens prefer the same experts: only the bias can spread them."""

    def worst(rate, updates):
        config = DecoderConfig(
            vocab_size=256,
            width=16,
            depth=1,
            heads=1,
            layers=("moe",),
            experts=8,
            embedding_std=1.0,
            balancing_rate=rate,
            router=router,
        )
        decoder = Decoder(config, generator=torch.Generator().manual_seed(0))
        balancer, tokens = Balancer(decoder), torch.arange(256)[None]
        weight = decoder.sublayers[0].router.linear.weight
        with torch.no_grad():
            decoder.embedding.weight += (
                0.5  # a direction that all tokens share, and each expert likes more than the one before
            )
            weight.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
            weight += torch.linspace(-0.1, 0.1, 8)[:, None]
        found = []
        for _ in range(updates):
            decoder(tokens)
            balancer.step()
            found.append(max_over_mean(balancer.last).item())
        return found

    balanced, left = worst(2e-3, 200), worst(0.0, 3)
    assert balanced[0] == left[0] == left[-1] > 3
    assert max(balanced[-20:]) < 1.15


def test_one_step_is_the_sign_of_the_missing_load():
    decoder = Decoder(DecoderConfig(vocab_size=9, width=8, depth=1, heads=1, layers=("moe",), experts=4))
    router = decoder.sublayers[0].router
    router.balance(torch.tensor([10, 2, 4, 0]))  # mean 4
    router.balance(torch.tensor([0, 2, 4, 10]))
    router.balance(torch.tensor([3, 3, 3, 2]))
    assert router.votes.tolist() == [-1, 1, -1, 1]
    scores = torch.zeros(1, 4)
    assert router.choose(scores, 2)[1].sort().values.tolist() == [[1, 3]]
    router.rate = 0.0
    router.balance(torch.tensor([10, 0, 0, 0]))
    assert router.votes.tolist() == [-1, 1, -1, 1]


def test_one_update_moves_every_bias_once_however_the_batch_is_cut():
    found = []
    for changes in ({}, {"accumulation": 4}, {"gradient_checkpointing": True, "accumulation": 2}):
        made = engine(**changes)
        made.gradients()
        made.evaluate()  # counts nothing
        made.look(1, made.gradients())  # neither does a traced pass, nor the batch that no update followed
        made.update(1)
        assert made.balancer.last.sum(1).tolist() == [8 * 11 * 2]
        (value,) = votes(made.model).values()
        assert value.abs().max() == 1
        assert value.tolist() == torch.sign(44 - made.balancer.last[0]).tolist()
        found.append((made.balancer.last, value))
    for load, value in found[1:]:
        assert torch.equal(load, found[0][0]) and torch.equal(value, found[0][1])


def test_nothing_moves_in_evaluation_or_without_gradients():
    made = engine()
    made.model.eval()
    made.model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    made.model.train()
    with torch.no_grad():
        made.model(torch.zeros(1, 4, dtype=torch.long))
    made.balancer.step()
    assert made.balancer.last is None and not any(value.any() for value in votes(made.model).values())


def test_a_model_without_experts_has_nothing_to_balance():
    made = engine(layers=("attention", "feed_forward"), model={})
    made.gradients()
    made.update(1)
    assert made.balancer.load is made.balancer.last is None


@pytest.mark.parametrize(
    "changes", [{}, {"accumulation": 2, "gradient_checkpointing": True}, {"precision": "bfloat16"}], ids=str
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, changes):
    config, asked = TrainConfig(**(BASE | changes)), []
    train(config, tmp_path / "whole", task=TASK)
    train(config, tmp_path / "cut", task=TASK, stop=lambda: asked.append(1) or len(asked) == 7)
    assert RunFolder.open(tmp_path / "cut").status == "interrupted"
    train(config, tmp_path / "cut", task=TASK, resume=True)
    whole, cut = last_weights(tmp_path / "whole"), last_weights(tmp_path / "cut")
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    (name,) = (name for name in whole if name.endswith("votes"))
    assert whole[name].abs().max() > 2 and whole[name].dtype == torch.int64
    for series in ("train/loss", "experts/max_over_mean"):
        a, b = (RunFolder.open(tmp_path / run).metrics(series) for run in ("whole", "cut"))
        assert a == b and len(a) >= 3


def test_a_run_records_how_its_routers_spread_the_tokens(tmp_path):
    train(TrainConfig(**(BASE | {"geometry": True, "steps": 4})), tmp_path / "run", task=TASK)
    rows = RunFolder.open(tmp_path / "run").measures()
    for name in ("routing.max_over_mean", "routing.entropy", "routing.dropped"):
        found = list(rows.where(measure=name))
        assert [(row.step, row.site, row.split) for row in found] == [(s, "layers.1.moe", "valid") for s in (0, 4)]
    assert all(row.value == 0 for row in rows.where(measure="routing.dropped"))
    assert len(list(rows.where(measure="jacobian.block.largest", step=4))) == 2  # through the experts too
