"""The learning rate over a run, and the configuration's arithmetic."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg import config
from thalweg.errors import InputError, UnknownNameError
from thalweg.training.config import TrainConfig, changes, from_table
from thalweg.training.schedule import factor


def test_known_points():
    rate = [factor(s, steps=100, warmup=10, floor=0.1) for s in range(101)]
    assert rate[1] == pytest.approx(0.1) and rate[5] == pytest.approx(0.5) and rate[10] == 1.0
    assert rate[55] == pytest.approx(0.55)  # half way down the cosine: the mean of 1 and 0.1
    assert rate[100] == pytest.approx(0.1)
    assert factor(1, steps=100, warmup=0) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 100)))


def test_steps_fall_twice_by_the_same_factor():
    rate = [factor(s, steps=1000, warmup=100, kind="step", floor=0.1) for s in range(1, 1001)]
    assert rate[99:800] == [1.0] * 701
    assert rate[800:900] == pytest.approx([0.1**0.5] * 100) and rate[900:] == pytest.approx([0.1] * 100)


@given(
    steps=st.integers(1, 500),
    share=st.floats(0, 0.9),
    floor=st.floats(0, 1),
    kind=st.sampled_from(["cosine", "linear", "step", "constant"]),
)
def test_rises_to_one_then_never_rises_and_ends_at_the_floor(steps, share, floor, kind):
    warmup = int(share * steps)
    rates = [factor(s, steps=steps, warmup=warmup, kind=kind, floor=floor) for s in range(1, steps + 1)]
    assert all(0 <= rate <= 1 + 1e-12 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    after = rates[max(warmup - 1, 0) :]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))
    if kind != "constant" and steps > warmup:
        assert rates[-1] == pytest.approx(floor, abs=1e-12)


def test_the_dial_sets_width_and_heads():
    sizes = {
        depth: (c.resolved_width, c.resolved_heads) for depth in (1, 4, 6, 12, 24) for c in [TrainConfig(depth=depth)]
    }
    assert sizes == {1: (64, 2), 4: (128, 4), 6: (192, 6), 12: (384, 6), 24: (768, 12)}
    assert (TrainConfig(depth=9, width=100).resolved_width, TrainConfig(depth=9, width=100).resolved_heads) == (100, 25)


def test_every_field_of_the_decoder_can_be_set_and_none_twice():
    made = TrainConfig(depth=2, width=32, heads=2, kv_heads=1, model={"qk_norm": True, "max_length": 99}).decoder(50)
    assert (made.qk_norm, made.max_length, made.kv_heads, made.vocab_size) == (True, 99, 1, 50)
    assert TrainConfig(sequence_length=4096).decoder(50).max_length == 4096
    with pytest.raises(InputError, match="set twice"):
        TrainConfig(model={"width": 3}).decoder(50)
    with pytest.raises(UnknownNameError, match=r"model\.qk_norm"):
        TrainConfig(model={"qk_nrm": True}).decoder(50)


def test_length_in_steps_or_tokens():
    assert TrainConfig(tokens=10_001, batch_size=4, sequence_length=25).total_steps == 101
    assert TrainConfig().total_steps == 1000
    assert (TrainConfig(steps=200, warmup=0.1).warmup_steps, TrainConfig(steps=200, warmup=7).warmup_steps) == (20, 7)
    assert TrainConfig(steps=1).warmup_steps == 0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"steps": 10, "tokens": 100}, "not both"),
        ({"batch_size": 6, "accumulation": 4}, "multiple of accumulation"),
        ({"lr": -1.0}, "lr must be positive"),
        ({"lr": math.nan}, "lr must be positive"),
        ({"steps": 10, "warmup": 10.0}, "warmup"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio must lie between"),
        ({"clip": math.nan}, "clip must lie between"),
        ({"diverge_factor": 0.5}, "diverge_factor"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_values_are_refused_in_one_line(values, says):
    with pytest.raises(InputError, match=says) as caught:
        TrainConfig(**values)
    assert "\n" not in str(caught.value)


def test_toml_round_trip_and_unknown_keys():
    import tomllib

    wanted = TrainConfig(
        connection="mgt",
        connection_options={"preset": "residual"},
        layers=("attention",),
        betas=(0.8, 0.9),
        tokens=5000,
    )
    assert from_table(tomllib.loads(config.to_toml(wanted))) == wanted
    with pytest.raises(UnknownNameError, match="Did you mean 'depth'"):
        from_table({"dept": 3})
    with pytest.raises(InputError, match="depth must be int"):
        from_table({"depth": "3"})


def test_changes_name_what_may_not_change():
    saved = config.to_plain(TrainConfig(depth=3, threads=1))
    assert changes(saved, TrainConfig(depth=3, threads=2)) == []
    assert changes(saved, TrainConfig(depth=4, lr=0.5)) == ["depth 3 -> 4", "lr 0.002 -> 0.5"]
