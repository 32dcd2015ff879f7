"""Measures of routing, and their rows."""

import math

import pytest
import torch

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.routing import dropped, max_over_mean, router_entropy
from thalweg.models import Decoder, DecoderConfig, StreamTrace
from thalweg.training.routing import routing_measurements


def test_known_values():
    load = torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0], [8, 4, 2, 2]])
    assert max_over_mean(load).tolist() == [1.0, 4.0, 2.0]
    assert router_entropy(load.double()).tolist() == pytest.approx([1.0, 0.0, 1.75 / 2])
    assert router_entropy(torch.tensor([[0.3]])).tolist() == [1.0]
    assert dropped(load, 20).tolist() == pytest.approx([0.2, 0.2, 0.2]) and dropped(load[0], 16) == 0
    scores = torch.rand(7, 5)
    shares = scores.double() / scores.double().sum(-1, keepdim=True)
    torch.testing.assert_close(router_entropy(scores), -(shares * shares.log()).sum(-1) / math.log(5))


def test_what_is_refused():
    with pytest.raises(InputError, match="not all zero"):
        max_over_mean(torch.zeros(3))
    with pytest.raises(InputError, match="must not be negative"):
        router_entropy(torch.tensor([0.5, -0.1]))
    with pytest.raises(InputError, match="NaN"):
        router_entropy(torch.tensor([0.5, math.nan]))
    with pytest.raises(InputError, match="cannot exceed"):
        dropped(torch.tensor([3, 3]), 5)
    with pytest.raises(ShapeError, match="experts"):
        max_over_mean(torch.tensor(3.0))


def test_rows_of_a_traced_pass():
    config = DecoderConfig(
        vocab_size=9,
        width=8,
        depth=3,
        heads=1,
        layers=("attention", "moe"),
        experts=4,
        active_experts=2,
        dense_layers=1,
    )
    decoder, trace = Decoder(config).eval(), StreamTrace()
    with torch.no_grad():
        decoder.sublayers[3].router.linear.weight.zero_()
        decoder.sublayers[3].router.votes.copy_(torch.tensor([9, 9, 0, 0]))
        decoder(torch.randint(9, (2, 5)), trace=trace)
    rows = routing_measurements(decoder, trace)
    assert {(row.site, row.layer, row.branch, row.n) for row in rows} == {
        ("layers.1.moe", 1, "moe", 10),
        ("layers.2.moe", 2, "moe", 10),
    }
    first = {row.measure: row.value for row in rows.where(layer=1)}
    assert first == {"routing.max_over_mean": 2.0, "routing.entropy": 1.0, "routing.dropped": 0.0}
    second = {row.measure: row.value for row in rows.where(layer=2)}
    load = decoder.sublayers[5].load
    assert second["routing.max_over_mean"] == (load.max() / load.double().mean()).item()
    assert 0 < second["routing.entropy"] < 1
