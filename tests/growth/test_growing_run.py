"""A growing run: it grows, records at once, can be stopped and killed and resumed bitwise, and ends in a normal run folder."""

import dataclasses
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from thalweg import growth
from thalweg.errors import CheckpointError, InputError
from thalweg.growth import GrowthRecord
from thalweg.growth.planning import plan_growth
from thalweg.growth.run import Grower, grow
from thalweg.records import RunFolder
from thalweg.training import Interrupted, TrainConfig, train
from thalweg.training import checkpoint as checkpoints
from thalweg.training.engine import load_decoder
from thalweg.training.initial import table_of

BASE = {
    "depth": 2,
    "width": 16,
    "heads": 1,
    "model": {"head_size": 4},
    "data": "copy:vocab=8,half=4",
    "sequence_length": 9,
}
BASE |= {"batch_size": 16, "steps": 24, "lr": 1e-2, "eval_every": 8, "eval_batches": 1, "threads": 1, "geometry": False}
GROWTH = {"check_every": 2, "dwell": 4, "threshold": 0.3, "most_heads": 4}


def config(grows=None, **changes):
    return TrainConfig(**{**BASE, "growth": {**GROWTH, **(grows or {})}, **changes})


def events_of(folder):
    return GrowthRecord.load(folder / "growth.jsonl").events


def weights_of(folder, which="last"):
    return checkpoints.read(checkpoints.find(folder / "checkpoints", which)).weights()


def same_run(one, other):
    """Weights, growth events, logged series and measures, to the last bit."""
    a, b = weights_of(one), weights_of(other)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert events_of(one) == events_of(other)
    clocks = ("train/tokens_per_second", "train/step_time", "train/peak_memory")
    series = [
        {name: points for name, points in RunFolder.open(folder).series().items() if name not in clocks}
        for folder in (one, other)
    ]
    assert series[0] == series[1]
    rows = [RunFolder.open(folder).measures() for folder in (one, other)]
    assert rows[0] == rows[1]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    heard = []
    found = grow(config(), folder, on_event=heard.append)
    return folder, found, heard


def test_it_grows_and_says_so(straight):
    folder, found, heard = straight
    about = found.growth
    assert found.result.status == "done" and about["status"] in ("converged", "capped", "growing")
    events = events_of(folder)
    births = [event for event in events if event.kind == "birth"]
    assert births and {event.layer for event in births} == {0, 1} and max(event.step for event in births) > 0
    assert about["heads_start"] == [1, 1] and sum(about["heads"]) == 2 + sum(len(event.heads) for event in births)
    assert all(event.drift <= 1e-12 for event in births)  # outputs are compared in float64
    assert all(event.energy_after < event.energy_before for event in births if event.must_fall)
    assert about["parameters"] == found.result.cost["parameters"] == births[-1].parameters_after
    assert about["flops"] == found.result.cost["flops_per_token"] > about["flops_start"]
    tokens = found.result.cost["tokens"]
    assert tokens * about["flops_start"] < about["flops_spent"] < tokens * about["flops"]
    said = [event.text for event in heard if event.kind == "change"]
    assert [text for text in said if "birth" in text] == [event.line() for event in births]


def test_rows_are_in_the_record(straight):
    folder, found, _ = straight
    run = RunFolder.open(folder)
    rows = run.measures()
    assert {row.step for row in rows.where(measure="growth.top")} >= {0, 2, 24}
    assert len(rows.where(measure="growth.event.eigenvalue")) == sum(
        len(e.heads) for e in events_of(folder) if e.kind == "birth"
    )
    assert len(rows.where(measure="growth.forecast.eigenvalue", layer=0)) >= 4
    assert rows.where(measure="growth.threshold").to_rows()[0]["value"] == found.growth["threshold"]
    heads = run.series()["growth/heads"]
    assert heads[-1][1] == sum(found.growth["heads"]) and [n for _, n in heads] == sorted(n for _, n in heads)


def test_what_is_left_after_the_end_is_looked_at_too(tmp_path):
    """A threshold that nothing reaches ends growth at once; the last step is looked at nevertheless."""
    found = grow(config({"threshold": 0.99, "patience": 1}), tmp_path / "run")
    assert found.growth["status"] == "converged" and found.growth["ended"] == 0 and not events_of(tmp_path / "run")
    steps = {row.step for row in RunFolder.open(tmp_path / "run").measures().where(measure="growth.top")}
    assert steps == {0, 8, 16, 24}


def test_the_finished_run_is_a_normal_one(straight, tmp_path):
    import transformers

    import thalweg  # noqa: F401  # registers the model
    from thalweg.training.measuring import measure_run

    folder, found, _ = straight
    model, manifest = load_decoder(folder, "last")
    assert manifest["model"]["layer_heads"] == found.growth["heads"] or len(set(found.growth["heads"])) == 1
    assert [model.config.heads_of(layer) for layer in range(2)] == found.growth["heads"]
    ids = torch.randint(model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    shell = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    with torch.no_grad():
        assert torch.equal(shell(ids).logits, model(ids).logits)
    more = {"attention_mask": torch.ones(1, 9, dtype=torch.long), "do_sample": False, "pad_token_id": 0}
    assert shell.generate(ids[:1], max_new_tokens=3, **more).shape == (1, 12)
    assert len(measure_run(folder, tokens=64).rows) > 10
    further = TrainConfig(
        **{**BASE, **table_of(folder / "model"), "init_from": str(folder / "model"), "steps": 2, "eval_every": 2}
    )
    result = train(further, tmp_path / "further")
    assert result.cost["parameters"] == found.growth["parameters"]
    again = dataclasses.replace(further, growth={**GROWTH, "threshold": 0.01})
    assert grow(again, tmp_path / "again").growth["heads_start"] == found.growth["heads"]


@pytest.mark.parametrize("at", [3, 17])
def test_a_run_that_was_stopped_goes_on_bitwise(straight, tmp_path, at):
    folder, _, _ = straight
    asked = iter(range(100))
    grow(config(), tmp_path / "run", stop=lambda: next(asked) == at)
    assert RunFolder.open(tmp_path / "run").status == "interrupted"
    grow(config(), tmp_path / "run", resume=True)
    same_run(tmp_path / "run", folder)


@pytest.mark.parametrize("which", [0, -1])
def test_a_run_that_was_killed_at_an_event_goes_on_bitwise(straight, tmp_path, which):
    """The event is in the record before anybody hears of it; the checkpoint before it stands."""
    folder, _, heard = straight
    target = [event for event in heard if event.kind == "change" and "birth" in event.text][which]

    class Killed(BaseException):
        pass

    def kill(event):
        if event == target:
            raise Killed

    with pytest.raises(Killed):
        grow(config(), tmp_path / "run", on_event=kill)
    assert any(event.step == target.step for event in events_of(tmp_path / "run"))
    grow(config(), tmp_path / "run", resume=True)
    same_run(tmp_path / "run", folder)


def test_ctrl_c_says_how_to_go_on(tmp_path):
    import os
    import signal

    sent = []

    def interrupt(event):
        if event.kind == "change" and event.step and not sent:
            sent.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="thalweg grow --resume"):
        grow(config(), tmp_path / "run", on_event=interrupt)


def test_a_finished_run_gives_its_result_again(straight):
    folder, found, _ = straight
    assert grow(config(), folder, resume=True).growth == found.growth


def test_a_finished_run_writes_its_model_again_where_it_is_gone(straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight[0], folder)
    before = load_file(folder / "model" / "model.safetensors")
    (folder / "model" / "model.safetensors").unlink()
    grow(config(), folder, resume=True)
    after = load_file(folder / "model" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises((CheckpointError, InputError), match="checkpoint"):
        grow(config(), folder, resume=True)


def test_layers_masks_and_dictionaries_go_on_bitwise_too(tmp_path):
    """Everything at once: depth by rule, pruning by median with masks, a dictionary in every head, two time scales."""
    rules = {"most_layers": 3, "layer_dwell": 2, "asymmetry_level": 0.05, "threshold": 0.6, "patience": 1, "dwell": 2}
    rules |= {
        "prune_level": 0.9,
        "prune_relative_to": "median",
        "prune_patience": 2,
        "mask_checks": 3,
        "allowed_rise": 0.5,
    }
    model = {"head_size": 4, "head_prototypes": True, "prototypes": 3}
    both = config(rules, model=model, heads=3, dictionary_weight=0.1, connection="rezero")
    grow(both, tmp_path / "straight")
    kinds = {event.kind for event in events_of(tmp_path / "straight")}
    assert {"mask", "layer"} <= kinds or {"mask", "birth"} <= kinds, kinds
    for at in (5, 12):
        asked = iter(range(100))
        grow(both, tmp_path / f"run{at}", stop=lambda asked=asked, at=at: next(asked) == at)
        grow(both, tmp_path / f"run{at}", resume=True)
        same_run(tmp_path / f"run{at}", tmp_path / "straight")
    rows = RunFolder.open(tmp_path / "straight").measures()
    last = rows.where(measure="prototypes.effective", step=24)
    about = growth.run.about_of(RunFolder.open(tmp_path / "straight"))
    assert len(last) == sum(about["heads"]) and all(1 <= row.value <= 3 + 1e-9 for row in last)


def test_a_mask_that_had_not_fallen_at_the_end_is_lifted(tmp_path):
    rules = {
        "prune_level": 0.9,
        "prune_relative_to": "median",
        "prune_patience": 1,
        "mask_checks": 50,
        "threshold": 0.9,
    }
    heard = []
    grow(config({**rules, "dwell": 0}, heads=3), tmp_path / "run", on_event=heard.append)
    assert any("the head stays" in event.text for event in heard)
    model, _ = load_decoder(tmp_path / "run", "last")
    assert growth.run.about_of(RunFolder.open(tmp_path / "run"))["heads"] == [
        model.config.heads_of(0),
        model.config.heads_of(1),
    ]


def test_the_plan_says_what_thresholds_would_give():
    planned = plan_growth(config(), probe=False)
    counts = [sum(p.heads) for p in planned.predicted]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
    assert [p.threshold for p in planned.predicted] == [0.02, 0.05, 0.1, 0.2, 0.3, 0.4]
    assert any(p.limited == "capped" and max(p.heads) == 4 for p in planned.predicted)
    assert planned.predicted[0].parameters > planned.training.parameters
    text = "\n".join(planned.lines)
    assert (
        "chance 0.707" in text
        and "0.3 *" in text
        and "at most 13 looks" in text
        and "the threshold sets the count" in text
    )


def begun(folder):
    return TrainConfig(**{**BASE, **table_of(folder), "init_from": str(folder), "growth": GROWTH})


def test_the_plan_counts_no_more_births_than_the_dwell_leaves_time_for(straight, tmp_path):
    planned = plan_growth(config({"dwell": 11, "most_heads": 32}, model={"head_size": 2}), probe=False)
    first = planned.predicted[
        0
    ]  # a birth at step 0 and at step 12, by a dwell of 11 and a look every 2 steps, and at step 24
    assert first.limited == "dwell" and set(first.heads) == {1 + 3}
    assert planned.look_seconds > sum(layer.seconds for layer in planned.forecast.layers)
    assert "shares of what this model has left now" not in "\n".join(planned.lines)
    again = begun(straight[0] / "model")
    assert "shares of what this model has left now" in "\n".join(plan_growth(again, probe=False).lines)


def test_weights_that_are_not_finite_are_refused_by_name(straight, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(straight[0] / "model", folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "output" in name)
    weights[name].view(-1)[0] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    bad = begun(folder)
    with pytest.raises(InputError, match=f"{name}.* holds 1 values? that (is|are) NaN"):
        plan_growth(bad, probe=False)


def refusals():
    base = {"model": {"head_size": 4}}
    return [
        (config(), {"parallel": "x"}, "sharded"),
        (config(trajectory=2), {}, "leave trajectory out"),
        (config({"head_width": 8}), {}, "growth.head_width must be the width"),
        (config({"threshhold": 0.1}), {}, "threshold"),
        (config({"threshold": 2.0}), {}, "threshold must be above 0 and below 1"),
        (config(model={**base["model"], "embedding_std": 0.0}), {}, "one and the same vector"),
        (config(connection="sub_ln"), {}, "norms all heads"),
        (config(dictionary_weight=0.1), {}, "this model has no prototypes; set model.head_prototypes"),
        (config(heads=5), {}, "growth.most_heads is 4, but the run starts with 5 heads"),
        (config({"most_layers": 1}), {}, "growth.most_layers is 1, but the run starts with 2 layers"),
        (config({"most_layers": 3}, connection="deepnorm"), {}, "cannot get a layer that changes nothing: 'deepnorm'"),
        (config({"dwell": "foo"}), {}, "growth.dwell must be a whole number of steps, or gap, got 'foo'"),
        (
            config(model={"head_size": 4, "head_prototypes": True, "prototypes": 5000}, dictionary_weight=0.1),
            {},
            "5000 prototypes need at least as many tokens",
        ),
    ]


@pytest.mark.parametrize(("wanted", "changes", "words"), refusals())
def test_what_cannot_grow_is_one_line_and_leaves_no_events(tmp_path, monkeypatch, wanted, changes, words):
    if changes:
        from thalweg.training.parallel import Wrapped

        was = Wrapped.__init__

        def sharded(self, *args, **kwargs):
            was(self, *args, **kwargs)
            self.kind = "fsdp"

        monkeypatch.setattr(Wrapped, "__init__", sharded)
    with pytest.raises(InputError, match=words) as caught:
        grow(wanted, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "growth.jsonl").exists()


def test_what_the_configuration_rules_out_makes_no_folder_and_is_said_of_a_plan_too(tmp_path):
    wanted = (
        config(dictionary_weight=0.1),
        config(heads=5),
        config({"most_layers": 1}),
        config(heads=6, kv_heads=2, model={"head_size": 4}, grows={"most_heads": 1}),
    )
    for bad in wanted:
        with pytest.raises(InputError):
            grow(bad, tmp_path / "run")
        assert not (tmp_path / "run").exists()
        with pytest.raises(InputError, match=r"growth\.most|no prototypes"):
            plan_growth(bad)
    with pytest.raises(InputError, match="leave most_layers out"):
        plan_growth(config({"most_layers": 3}, connection="deepnorm"), probe=False)
    with pytest.raises(InputError, match="no prototypes"):
        train(dataclasses.replace(config(dictionary_weight=0.1), growth=None), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_queries_that_share_keys_count_once_under_a_cap():
    from thalweg.growth.run import options_of

    shared = config(heads=6, kv_heads=2, grows={"most_heads": 2})
    assert options_of(shared, shared.decoder(16)).most_heads == 2


def test_train_refuses_a_growing_configuration_and_grow_a_fixed_run(tmp_path):
    with pytest.raises(InputError, match="thalweg grow"):
        train(config(), tmp_path / "a")
    fixed = dataclasses.replace(config(), growth=None)
    train(dataclasses.replace(fixed, steps=2, eval_every=2), tmp_path / "b", stop=lambda: True)
    with pytest.raises(CheckpointError, match="growth unset"):
        grow(config(steps=2, eval_every=2), tmp_path / "b", resume=True)


def test_ranks_that_grew_apart_are_said():
    grower = Grower(config())

    class Apart:
        def collect(self, value):
            return [value, [*value, 1]]

    class Engine:
        ranks = Apart()

    class Network:
        ids = ([0], [0])

    grower.engine, grower.network = Engine(), Network()
    with pytest.raises(InputError, match="ranks grew apart"):
        grower._agree()


def test_a_diverged_network_ends_growth_and_the_run(tmp_path):
    said = []
    diverging = config({"check_every": 20}, lr=1e6, warmup=0.0, diverge_patience=2)  # it is over before a look sees it
    found = grow(diverging, tmp_path / "run", on_event=said.append)
    step = found.result.step
    assert found.result.status == "diverged" and step < 20 and found.growth["status"] == "unstable"
    assert found.growth["reason"] == f"training diverged at step {step}: {found.result.reason}"
    assert found.growth["flops_spent"] >= found.growth["flops_start"] * found.result.cost["tokens"]
    assert found.growth["ended"] == found.growth["step"] == step and math.isfinite(found.growth["parameters"])
    told = [event.text for event in said if event.kind == "change"][-1]
    assert told == f"step {step}: growth ended, unstable: {found.growth['reason']}"
    assert grow(diverging, tmp_path / "run", resume=True).growth == found.growth


def test_growth_that_had_ended_keeps_its_status_when_training_diverges_later(tmp_path):
    ends = {"threshold": 0.99, "patience": 1}
    found = grow(config(ends, lr=1e6, warmup=0.0, diverge_patience=2), tmp_path / "run")
    assert found.result.status == "diverged" and found.growth["status"] == "converged" and found.growth["ended"] == 0
    assert found.growth["reason"].endswith(f"; training diverged later, at step {found.result.step}")


def test_optimisers_go_on_through_an_event():
    """What AdamW knew of the old entries is there after a birth, bit by bit, and steps are counted on; an optimiser made anew knows nothing."""
    from thalweg.training.engine import Engine
    from thalweg.training.parallel import Ranks
    from thalweg.training.tasks import load_task

    engine = Engine(config(), load_task(config()), torch.device("cpu"), Ranks())
    grower = Grower(config())
    grower.attach(engine)
    engine.gradients()
    engine.update(1)

    def known():
        adam = engine.optimizers.members["adamw"]
        return adam.state[engine.model.blocks[0].sublayers[0].query.weight]

    before = {name: value.clone() for name, value in known().items()}
    assert grower.controller.check(0)[0].kind == "birth"
    after, rows = known(), len(before["exp_avg"])
    assert len(after["exp_avg"]) > rows and float(after["step"]) == float(before["step"]) == 1
    for name in ("exp_avg", "exp_avg_sq"):
        assert before[name].any() and torch.equal(after[name][:rows], before[name]) and not after[name][rows:].any()
    engine.gradients()
    engine.update(2)
    assert float(known()["step"]) == 2
