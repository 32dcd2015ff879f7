"""Trajectories of weights on the disk, and the sketches that they are made of."""

import math

import pytest
import torch
from safetensors.torch import save_file

from thalweg.continuum.trajectory import NAME, Recorder, Sketch, Trajectory, block_of
from thalweg.errors import CheckpointError, InputError


def weights(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "embedding.weight": torch.randn(40, 8, generator=g),
        "blocks.0.up.weight": torch.randn(30, 8, generator=g),
        "blocks.0.down.weight": torch.randn(8, 30, generator=g),
        "blocks.11.up.weight": torch.randn(30, 8, generator=g),
    }


def recorded(count=5, stride=2, **facts):
    recorder = Recorder(Sketch(6, seed=1), facts)
    for i in range(count):
        recorder.see(stride * i, weights(i).items())
    return recorder


def test_a_sketch_in_loops():
    """One direction and one sign for every weight; catches signs or places drawn anew at every record."""
    sketch = Sketch(6, seed=1)
    got, norms = sketch(weights().items())
    assert set(got) == {"rest", "blocks.0", "blocks.11"}
    wanted, square = [0.0] * 6, 0.0
    for name in ("blocks.0.up.weight", "blocks.0.down.weight"):
        for x, place in zip(weights()[name].flatten().tolist(), sketch._place(name, 240).tolist(), strict=True):
            wanted[abs(place) - 1] += x * (1 if place > 0 else -1)
            square += x * x
    assert got["blocks.0"].tolist() == pytest.approx(wanted, abs=1e-4)
    assert norms["blocks.0"] == pytest.approx(math.sqrt(square))


def test_a_sketch_is_linear_keeps_products_and_does_not_depend_on_the_order_of_names():
    sketch = Sketch(6, seed=1)
    a, b = weights(0), weights(1)
    both = {n: a[n] + 2 * b[n] for n in a}
    one, two, sum_of = (sketch(w.items())[0]["blocks.0"] for w in (a, b, both))
    assert torch.allclose(sum_of, one + 2 * two, atol=1e-4)
    backwards = Sketch(6, seed=1)(reversed(list(a.items())))[0]["blocks.0"]
    assert torch.allclose(backwards, one, atol=1e-4)
    x, y = torch.randn(2, 300, generator=torch.Generator().manual_seed(3), dtype=torch.float64).unbind()
    y = y + x
    products = []
    for seed in range(300):
        s = Sketch(16, seed)
        products.append(float(s([("w", x)])[0]["rest"].double() @ s([("w", y)])[0]["rest"].double()))
    assert sum(products) / 300 == pytest.approx(float(x @ y), rel=0.05)


def test_written_and_read_back(tmp_path):
    path = recorded(lr=0.1, optimizer="sgd").trajectory()
    for place in (tmp_path / "t.safetensors", tmp_path / "run" / NAME):
        path.write(place)
        for at in {place, place.parent if place.name == NAME else place}:
            back = Trajectory.read(at)
            assert torch.equal(back.steps, path.steps)
            assert all(torch.equal(back.blocks[b], x) for b, x in path.blocks.items())
            assert all(torch.equal(back.norms[b], x) for b, x in path.norms.items())
            assert dict(back.facts) == dict(path.facts)
    assert back.stride == 2
    assert back.after(4).steps.tolist() == [4, 6, 8]


def test_snapshots_of_a_folder_in_the_order_of_their_steps(tmp_path):
    for i in (0, 2, 10):
        save_file(weights(i), tmp_path / f"step-{i}.safetensors")
    with pytest.raises(InputError, match="evenly spaced"):  # 0, 2, 10: read as numbers, not as text
        Trajectory.read(tmp_path)
    (tmp_path / "step-10.safetensors").unlink()
    save_file(weights(4), tmp_path / "step-4.safetensors")
    path = Trajectory.of_snapshots(tmp_path, Sketch(6, seed=1))
    wanted = torch.stack([Sketch(6, seed=1)(weights(i).items())[0]["blocks.0"] for i in (0, 2, 4)])
    assert torch.equal(path.blocks["blocks.0"], wanted)


def test_a_run_that_is_taken_up_goes_on_as_if_it_had_not_stopped():
    whole, again = recorded(7).trajectory(), recorded(5)
    again.forget_after(6)
    later = Recorder(Sketch(6, seed=1))
    later.take_up(again.trajectory())
    for i in (4, 5, 6):
        later.see(2 * i, weights(i).items())
    for block, x in whole.blocks.items():
        assert torch.equal(later.trajectory().blocks[block], x)


def test_blocks_by_name():
    assert block_of("model.layers.3.mlp.up.weight") == "layers.3"
    assert block_of("transformer.h.12.attn.weight") == "h.12"
    assert block_of("embedding.weight") == "rest"


@pytest.mark.parametrize(
    ("facts", "norm", "error", "words"),
    [
        ("{bad", 4, CheckpointError, "facts are no JSON"),
        ('["a"]', 4, InputError, "facts of a trajectory must be a table, got list"),
        (
            '{"lr": "x", "weight_decay": 3}',
            4,
            InputError,
            "lr among the facts .* must be a number of at least 0, got 'x'",
        ),
        ('{"weight_decay": NaN}', 4, InputError, "weight_decay among the facts"),
        ("{}", 3, InputError, r"norm of block rest must be one number a record, \[4\], got shape \[3\]"),
    ],
)
def test_a_broken_file_is_one_line_with_its_name(tmp_path, facts, norm, error, words):
    tensors = {"steps": torch.arange(4), "sketch.rest": torch.zeros(4, 2), "norm.rest": torch.ones(norm)}
    save_file(tensors, tmp_path / "t.safetensors", {"schema": "1", "kind": "thalweg.trajectory", "facts": facts})
    with pytest.raises(error, match=words) as raised:
        Trajectory.read(tmp_path / "t.safetensors")
    assert "\n" not in str(raised.value) and "t.safetensors" in str(raised.value)


def test_bad_input_is_one_line(tmp_path):
    save_file(weights(), tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    for call, error, words in (
        (lambda: Trajectory.read(tmp_path / "missing"), InputError, "missing"),
        (lambda: Trajectory.read(tmp_path / "other.safetensors"), InputError, "no trajectory"),
        (lambda: Trajectory.read(tmp_path / "broken.safetensors"), CheckpointError, "cannot be read"),
        (lambda: Trajectory.read(tmp_path), InputError, "0 numbered snapshots"),
        (lambda: recorded(2).trajectory(), InputError, "at least 3"),
        (lambda: Sketch(1), InputError, "directions"),
        (lambda: Trajectory(torch.tensor([0, 1, 3]), {"a": torch.zeros(3, 2)}), InputError, "evenly spaced"),
        (lambda: Trajectory(torch.arange(3), {"a": torch.zeros(4, 2)}), InputError, "must be"),
        (lambda: Trajectory(torch.tensor(3), {"a": torch.zeros(4, 2)}), InputError, "one a record"),
    ):
        with pytest.raises(error, match=words) as raised:
            call()
        assert "\n" not in str(raised.value)


def run(tmp_path, name, **more):
    from thalweg.training import TrainConfig, train

    config = TrainConfig(
        data="austen",
        tokenizer="byte",
        depth=1,
        width=32,
        sequence_length=16,
        batch_size=4,
        steps=12,
        eval_every=6,
        eval_batches=1,
        **{
            "geometry": False,
            "trajectory": 2,
            "schedule": "constant",
            "warmup": 0,
            "device": "cpu",
            "threads": 1,
            **more,
        },
    )
    return config, train(config, tmp_path / name)


@pytest.mark.parametrize(
    "more",
    [{"optimizer": "sgd", "lr": 0.05}, {"optimizer": "sgd", "momentum": 0.9, "lr": 0.05}, {"optimizer": "adamw"}],
)
def test_a_run_keeps_its_trajectory_and_taken_up_it_is_the_same(tmp_path, more):
    """Also that SGD moves every weight, and resumes: bitwise the run that was not stopped."""
    from thalweg.training import train

    config, result = run(tmp_path, "whole", **more)
    assert result.status == "done"
    path = Trajectory.read(tmp_path / "whole")
    assert path.steps.tolist() == [2, 4, 6, 8, 10, 12]
    assert set(path.blocks) == {"blocks.0", "rest"}
    assert all(bool((x.diff(dim=0).abs().sum(1) > 0).all()) for x in path.blocks.values())
    assert (path.facts["optimizer"], path.facts["lr"]) == (more["optimizer"], config.lr)
    calls = []
    stopped = train(config, tmp_path / "parts", stop=lambda: len(calls) == 6 or calls.append(1))
    assert (stopped.status, stopped.step) == ("interrupted", 7)
    assert train(config, tmp_path / "parts", resume=True).status == "done"
    again = Trajectory.read(tmp_path / "parts")
    assert torch.equal(again.steps, path.steps)
    assert all(torch.equal(again.blocks[b], x) for b, x in path.blocks.items())


def test_momentum_is_for_sgd():
    from thalweg.training import TrainConfig

    for more, words in (
        ({"momentum": 0.9}, "belongs to sgd"),
        ({"momentum": 1.0, "optimizer": "sgd"}, "momentum must lie"),
    ):
        with pytest.raises(InputError, match=words):
            TrainConfig(**more)
