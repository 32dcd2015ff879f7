"""The loop: it learns, records, and every way in which a run may end."""

import json
import math
import os
import signal

import numpy as np
import pytest
import torch
from torch import nn

from thalweg.data.task import Task, as_batch
from thalweg.errors import CheckpointError, ExitCode, InputError
from thalweg.models.decoder import Decoder
from thalweg.records import Measurement, RunFolder
from thalweg.training import Interrupted, TrainConfig, load_decoder, train
from thalweg.training import checkpoint as checkpoints


class Counting(Task):
    """Each sequence counts upwards modulo the vocabulary from a start drawn by the sample number: easy to learn, no files."""

    name, kind, vocab_size, fingerprint = "counting", "synthetic", 17, "counting-17"
    splits = ("train", "valid", "longer")

    def __init__(self, masked_from: int | None = None, held_out: int = 17):
        self.masked_from, self.held_out = masked_from, held_out

    def natural_length(self, split="train"):
        self._check_split(split)
        return 24 if split == "longer" else 12

    def nulls(self):
        return {"uniform": math.log(17)}

    def _order(self, split, length, seed):
        def draw(samples):
            starts = np.array([np.random.default_rng((seed, i)).integers(17) for i in samples])
            ids = (starts[:, None] + np.arange(length)) % 17
            hidden = self.masked_from is not None and samples[0] >= self.masked_from
            return as_batch(ids, np.full_like(ids, -100) if hidden else None)

        return draw

    def _held_out(self, split, length):
        return self.held_out, lambda chosen: as_batch((chosen[:, None] + np.arange(length)) % 17)


BASE = {"depth": 2, "width": 16, "heads": 2, "sequence_length": 12, "batch_size": 8, "steps": 20, "lr": 1e-2}
BASE |= {"eval_every": 10, "eval_batches": 2, "threads": 1, "geometry": False}


def config(**changes):
    return TrainConfig(**(BASE | changes))


def run(path, task=None, measure=None, on_event=None, stop=None, resume=False, **changes):
    return train(
        config(**changes), path, task=task or Counting(), measure=measure, on_event=on_event, stop=stop, resume=resume
    )


def test_the_loss_falls_and_everything_is_recorded(tmp_path):
    events = []
    result = run(tmp_path / "a", on_event=events.append, connection="mgt", steps=40, eval_every=20)
    record = RunFolder.open(tmp_path / "a")
    assert (record.status, result.status, result.step) == ("done", "done", 40)
    losses = dict(record.metrics("train/loss"))
    assert losses[1] == pytest.approx(math.log(17), abs=0.1) and result.train_loss == losses[40] < 0.5 * losses[1]
    assert [step for step, _ in record.metrics("val/loss")] == [0, 20, 40]
    assert result.final_loss == result.best_loss == record.metrics("val/loss")[-1][1] < 1.2
    assert [step for step, _ in record.metrics("moved/connection")] == [20, 40]
    assert record.metrics("moved/connection")[-1][1] > 0 and record.metrics("gradient/connection")[-1][1] > 0
    for name in ("task/exact_match", "task/token_accuracy", "task/longer_exact_match", "val/longer_loss"):
        assert record.metrics(name), name
    assert "val/bits_per_byte" not in record.series() and record.units()["val/loss"] == "nats/token"
    for measure in ("weight_gradient_norm", "stream_rms", "connection_distance"):
        assert {(row.step, row.layer) for row in record.measures().where(measure=measure)} == {
            (20, 0),
            (20, 1),
            (40, 0),
            (40, 1),
        }
    assert (
        record.result["nulls"] == {"uniform": math.log(17)}
        and record.result["cost"]["parameters"] == result.cost["parameters"]
    )
    assert (
        result.cost["tokens_per_second"] > 0 and result.cost["peak_memory"] > 0 and result.cost["tokens"] == 40 * 8 * 12
    )
    assert [e.kind for e in events if e.kind != "step"] == ["start", *["evaluation", "checkpoint"] * 3, "end"]


def test_a_finished_run_can_be_loaded_and_is_not_trained_twice(tmp_path):
    first = run(tmp_path / "a", steps=3, eval_every=2)
    assert run(tmp_path / "a", steps=3, eval_every=2, resume=True) == first
    with pytest.raises(InputError, match="holds a run already"):
        run(tmp_path / "a", steps=3, eval_every=2)
    model, manifest = load_decoder(tmp_path / "a", "last")
    assert manifest["step"] == 3 and not model.training
    losses = [model(b["input_ids"], labels=b["labels"]).loss.item() for b in Counting().eval_batches("valid", 12, 8, 2)]
    assert sum(losses) / 2 == pytest.approx(first.final_loss, rel=1e-5)


def test_same_seed_same_bits_whatever_the_global_generator_holds(tmp_path):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a = run(tmp_path / "a", steps=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(2)
    b = run(tmp_path / "b", steps=5)
    c = run(tmp_path / "c", steps=5, seed=1)
    assert a.final_loss == b.final_loss != c.final_loss


def test_arms_share_data_and_sublayers(tmp_path):
    """Two connections with one seed see the same batches: the first losses agree to what the connections differ in at the start."""
    seen = {}
    for connection in ("additive", "mgt"):
        task = Counting()
        order = task._order
        task._order = lambda *a, o=order, c=connection: lambda s: seen.setdefault(c, []).append(o(*a)(s)) or o(*a)(s)
        run(tmp_path / connection, task=task, connection=connection, steps=4)
    assert len(seen["additive"]) == 4
    for one, other in zip(seen["additive"], seen["mgt"], strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])


def test_accumulation_changes_nothing_but_rounding(tmp_path):
    one = run(tmp_path / "one", steps=6, clip=0.0)
    four = run(tmp_path / "four", steps=6, clip=0.0, accumulation=4)
    assert four.final_loss == pytest.approx(one.final_loss, abs=2e-6)
    assert four.train_loss == pytest.approx(one.train_loss, abs=2e-6)


def test_options_that_only_move_the_computation(tmp_path):
    plain = run(tmp_path / "plain", steps=4)
    recomputed = run(tmp_path / "recomputed", steps=4, gradient_checkpointing=True)
    narrow = run(tmp_path / "narrow", steps=4, precision="bfloat16")
    assert recomputed.final_loss == plain.final_loss
    assert narrow.final_loss != plain.final_loss and narrow.final_loss == pytest.approx(plain.final_loss, rel=0.02)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # dynamo's own, on its inputs
def test_compiled_blocks_train_alike_and_are_still_looked_into(tmp_path, monkeypatch):
    """The backend that only traces stands for inductor: the same graphs without the code generator."""
    compile_blocks, called = Decoder.compile_blocks, []

    def quick(self):
        called.append(self)
        compile_blocks(self, backend="eager")

    monkeypatch.setattr(Decoder, "compile_blocks", quick)
    changes = {"steps": 4, "eval_every": 2}
    compiled = run(tmp_path / "compiled", compile=True, geometry=True, **changes)
    assert called and compiled.final_loss == pytest.approx(run(tmp_path / "eager", **changes).final_loss, abs=1e-6)
    rows = RunFolder.open(tmp_path / "compiled").measures()
    assert len(rows.where(measure="stream_rms")) == 4 and len(rows.where(measure="effective_rank", step=4))


def test_muon_trains(tmp_path):
    assert run(tmp_path / "muon", optimizer="muon", steps=40).final_loss < 1.2


# divergence is a result


def test_a_huge_learning_rate_is_recorded_as_divergence(tmp_path):
    result = run(tmp_path / "a", lr=1e4, warmup=0.0, clip=0.0, connection="none", steps=200, diverge_patience=3)
    record = RunFolder.open(tmp_path / "a")
    assert result.status == record.status == "diverged" and result.reason == record.result["reason"] != ""
    assert result.final_loss is None and 0 < result.step < 200
    again = run(
        tmp_path / "a", lr=1e4, warmup=0.0, clip=0.0, connection="none", steps=200, diverge_patience=3, resume=True
    )
    assert repr(again) == repr(result)  # the last loss may be NaN


def test_a_loss_that_stays_high(tmp_path):
    result = run(
        tmp_path / "a",
        lr=3.0,
        schedule="constant",
        warmup=0.0,
        clip=0.0,
        steps=200,
        diverge_factor=1.0,
        diverge_patience=4,
    )
    assert result.status == "diverged" and "above" in result.reason and "for 4 steps" in result.reason


@pytest.mark.parametrize(("where", "says"), [("loss", "the loss is nan"), ("gradient", "the gradient norm is")])
def test_nan_ends_the_run_before_the_weights_are_touched(tmp_path, monkeypatch, where, says):
    forward, calls = Decoder.forward, []

    def poisoned(self, ids, **kwargs):
        out = forward(self, ids, **kwargs)
        if not self.training:
            return out
        calls.append(self)
        if len(calls) < 4:
            return out
        if where == "gradient":
            out.loss.register_hook(lambda gradient: gradient * math.inf)
            return out
        return out._replace(loss=out.loss * math.nan)

    monkeypatch.setattr(Decoder, "forward", poisoned)
    result = run(tmp_path / "a")
    assert (result.status, result.step) == ("diverged", 4) and says in result.reason
    assert all(torch.isfinite(p).all() for p in calls[0].parameters())
    record = RunFolder.open(tmp_path / "a")
    assert math.isnan(record.metrics("train/loss")[-1][1]) == (where == "loss")


def test_a_stream_that_grows_past_its_bound(tmp_path):
    result = run(tmp_path / "a", diverge_rms=1e-3)
    assert (result.status, result.step) == ("diverged", 10) and "root mean square" in result.reason


def test_a_batch_without_labels_is_an_error_and_says_so(tmp_path):
    with pytest.raises(InputError, match="no scored token"):
        run(tmp_path / "a", task=Counting(masked_from=16))
    record = RunFolder.open(tmp_path / "a")
    assert record.status == "failed" and record.result["step"] == 2


# interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_ends_with_130(tmp_path, number):
    before = signal.getsignal(number)

    def kick(event):
        if event.kind == "step" and event.step == 7:
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match=f"{number.name}.*after step 7") as caught:
        run(tmp_path / "a", on_event=kick)
    assert caught.value.exit_code == ExitCode.INTERRUPTED == 130
    assert signal.getsignal(number) is before
    record = RunFolder.open(tmp_path / "a")
    assert record.status == "interrupted" and checkpoints.list_steps(record.checkpoints)[-1] == 7
    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "a", resume=True)
    assert (resumed.status, resumed.final_loss, resumed.best_loss) == ("done", whole.final_loss, whole.best_loss)
    assert RunFolder.open(tmp_path / "a").metrics("train/loss") == RunFolder.open(tmp_path / "whole").metrics(
        "train/loss"
    )


def test_a_second_ctrl_c_acts_at_once(tmp_path):
    def kick(event):
        if event.kind == "step" and event.step == 3:
            signal.raise_signal(signal.SIGINT)  # at once and in this thread; two kills in a row may be delivered as one
            signal.raise_signal(signal.SIGINT)
            pytest.fail("still running")

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a", on_event=kick)
    record = RunFolder.open(tmp_path / "a")
    assert record.status == "interrupted" and checkpoints.list_steps(record.checkpoints) == [0]


def test_the_caller_may_stop_a_run(tmp_path):
    result = run(tmp_path / "a", stop=lambda: True)
    assert (result.status, result.step) == ("interrupted", 1)
    assert run(tmp_path / "a", resume=True).status == "done"


# resumption is refused where it would not be the same run


def test_another_configuration_is_refused_by_name(tmp_path):
    run(tmp_path / "a", stop=lambda: True)
    with pytest.raises(CheckpointError, match=r"another configuration \(depth 2 -> 3; lr 0.01 -> 0.5\)") as caught:
        run(tmp_path / "a", resume=True, depth=3, lr=0.5)
    assert "\n" not in str(caught.value)


def test_other_data_is_refused(tmp_path):
    run(tmp_path / "a", stop=lambda: True)
    other = Counting()
    other.fingerprint = "another"
    with pytest.raises(CheckpointError, match="resume with the data of its start"):
        run(tmp_path / "a", resume=True, task=other)


def test_other_threads_resume_but_are_noted(tmp_path):
    run(tmp_path / "a", stop=lambda: True, steps=2)
    assert run(tmp_path / "a", resume=True, steps=2, threads=2).status == "done"
    notes = RunFolder.open(tmp_path / "a").notes
    assert len(notes) == 1 and "not bitwise because threads 1 -> 2" in notes[0]


def test_a_damaged_checkpoint_is_one_line_and_the_one_before_still_serves(tmp_path):
    run(tmp_path / "a", stop=lambda: True)
    folder = RunFolder.open(tmp_path / "a").checkpoints
    (checkpoints.find(folder) / checkpoints.WEIGHTS).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"damaged.*go on from step 0"):
        run(tmp_path / "a", resume=True)
    import shutil

    shutil.rmtree(checkpoints.find(folder))
    assert run(tmp_path / "a", resume=True).final_loss == run(tmp_path / "b").final_loss


def test_a_full_disk_fails_the_run_and_it_can_go_on(tmp_path, monkeypatch):
    save, calls = checkpoints.save_file, []

    def full(*args):
        calls.append(0)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save(*args)

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left.*step 0 is intact"):
        run(tmp_path / "a")
    assert RunFolder.open(tmp_path / "a").status == "failed"
    assert run(tmp_path / "a", resume=True).final_loss == run(tmp_path / "b").final_loss


# callbacks


def test_measurements_are_taken_on_time_and_at_the_end(tmp_path):
    def measure(model, step):
        assert isinstance(model, nn.Module)
        return [Measurement("toy", float(step), step=step)]

    run(tmp_path / "a", measure=measure, measure_every=8)
    assert [row.step for row in RunFolder.open(tmp_path / "a").measures().where(measure="toy")] == [0, 8, 16, 20]


def test_the_geometry_is_measured_at_the_start_and_the_end_or_its_absence_is_noted(tmp_path):
    run(tmp_path / "a", geometry=True, steps=4)
    measured = RunFolder.open(tmp_path / "a").measures()
    assert {row.step for row in measured.where(measure="effective_rank")} == {0, 4}
    plain = run(tmp_path / "plain", steps=4)
    assert RunFolder.open(tmp_path / "a").result["final_loss"] == plain.final_loss  # looking changes nothing
    run(tmp_path / "b", geometry=True, steps=2, task=Counting(held_out=5))
    record = RunFolder.open(tmp_path / "b")
    assert len(record.notes) == 1 and "5 held-out sequences" in record.notes[0]
    assert not record.measures().where(measure="effective_rank").to_rows()


def test_a_measurement_that_fails_does_not_lose_the_run(tmp_path):
    def measure(model, step):
        raise InputError("the state holds infinities")

    assert run(tmp_path / "a", measure=measure, steps=2).status == "done"
    assert RunFolder.open(tmp_path / "a").notes == [
        f"not measured at step {step}: the state holds infinities" for step in (0, 2)
    ]


def test_a_configuration_that_cannot_be_built_leaves_no_folder(tmp_path):
    for changes in ({"connection": "aditive"}, {"heads": 3}, {"device": "cuda"}, {"sequence_length": 5}):
        if changes.get("device") == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(InputError):
            run(tmp_path / "a", **changes)
        assert not (tmp_path / "a").exists()


def test_the_record_is_plain_json(tmp_path):
    run(tmp_path / "a", steps=2)
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    assert record["config"]["depth"] == 2 and record["result"]["status"] == "done" and record["seed"] == 0


def test_the_plan_agrees_with_the_run(tmp_path):
    from thalweg.training import plan_of

    plan = plan_of(config(connection="mgt", steps=4), task=Counting())
    result = run(tmp_path / "a", connection="mgt", steps=4)
    assert plan.parameters == result.cost["parameters"] and plan.flops_per_token == result.cost["flops_per_token"]
    assert plan.tokens == result.cost["tokens"] and plan.seconds_per_step > 0 and plan.memory > 16 * plan.parameters
    assert len(str(plan).splitlines()) == 6
    assert plan_of(config(), task=Counting(), probe=False).seconds is None


def test_a_second_process_touches_nothing(tmp_path):
    before = {}

    def second(event):
        if event.kind == "step" and event.step == 3:
            before.update({p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()})
            for resume in (True, False):
                with pytest.raises(InputError, match="in use by another process"):
                    run(tmp_path / "a", steps=4, resume=resume)
            assert before == {p: p.read_bytes() for p in before}

    assert run(tmp_path / "a", on_event=second, steps=4).status == "done" and before


@pytest.mark.parametrize("edit", [{"step": "x"}, {"status": None}, {"best_loss": []}, {"later": 1}])
def test_an_edited_result_is_refused_and_unknown_keys_are_passed_over(tmp_path, edit):
    first = run(tmp_path / "a", steps=1)
    file = tmp_path / "a" / "run.json"
    record = json.loads(file.read_text())
    record["result"] |= edit
    file.write_text(json.dumps(record))
    if "later" in edit:
        assert run(tmp_path / "a", steps=1, resume=True) == first
    else:
        with pytest.raises(CheckpointError, match=rf"run\.json is damaged: '{next(iter(edit))}'"):
            run(tmp_path / "a", steps=1, resume=True)


@pytest.mark.parametrize("values", [{"warmup": math.inf}, {"warmup": math.nan}, {"threads": 1025}])
def test_values_that_no_run_can_have(values):
    with pytest.raises(InputError, match=next(iter(values))):
        config(**values)


def test_norms_do_not_count_as_movement_of_the_connection():
    from thalweg.training.diagnostics import connection_parameters

    model = Decoder(config(connection="post_norm", connection_options={"enter_norm": True}).decoder(17))
    assert connection_parameters(model) == {}
