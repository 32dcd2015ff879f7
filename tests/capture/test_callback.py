"""The probe under the Trainer of Hugging Face: it logs, it writes, and the training is the same."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from thalweg.capture.callback import ProbeCallback
from thalweg.errors import InputError, ThalwegWarning
from thalweg.records import Measurements


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        ids = torch.arange(i, i + 8) % 29
        return {"input_ids": ids, "labels": ids}


class Reporter(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **more):
        self.seen.append(dict(logs))


def run(folder, *callbacks, first=None, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=29, **sizes, max_position_embeddings=8))
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=100,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=5,
        dataloader_pin_memory=False,
        **options,
    )
    trainer = Trainer(model, arguments, train_dataset=Texts(), callbacks=list(callbacks))
    if first is not None:
        first.attach(trainer)
    trainer.train()
    return trainer, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_it_logs_and_writes_and_the_training_is_the_same(tmp_path, capsys):
    _, plain = run(tmp_path / "plain")
    reporter, probe = Reporter(), ProbeCallback(every=2, name="tiny")
    trainer, watched = run(tmp_path / "watched", reporter, first=probe)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    rows = Measurements.load(tmp_path / "watched" / "probe.jsonl")
    assert rows == probe.measurements and {row.step for row in rows} == {0, 2}
    assert {row.n for row in rows.where(measure="rms")} == {2}  # one microbatch of two
    logged = {
        entry["step"]: entry["probe/parallel_fraction.raw/attention"]
        for entry in trainer.state.log_history
        if "probe/rms/attention" in entry
    }
    fractions = [r.value for r in rows.where(measure="parallel_fraction.raw", branch="attention", step=2)]
    assert list(logged) == [1, 3] and logged[3] == pytest.approx(sum(fractions) / len(fractions))
    assert sum("probe/rms/attention" in logs for logs in reporter.seen) == 2
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())
    probe.save(tmp_path / "rows.parquet")
    assert (tmp_path / "rows.parquet").exists()


def test_with_activation_checkpointing_and_bfloat16(tmp_path, capsys):
    probe = ProbeCallback(every=3, path=tmp_path / "here.jsonl")
    run(tmp_path, probe, activation_checkpointing=True, bf16=True)
    assert {row.step for row in probe.measurements} == {0, 3} and {
        row.n for row in probe.measurements.where(measure="rms")
    } == {2}


def test_before_training():
    with pytest.raises(InputError, match="nothing is measured yet"):
        ProbeCallback().save("rows.jsonl")


def test_another_training_sets_the_rows_of_an_earlier_one_aside(tmp_path):
    run(tmp_path, ProbeCallback(every=2))
    first = (tmp_path / "probe.jsonl").read_bytes()
    for kept in ("probe.1.jsonl", "probe.2.jsonl"):
        with pytest.warns(ThalwegWarning, match=f"holds the rows of another training; they are now in {kept}"):
            run(tmp_path, ProbeCallback(every=2))
        assert (tmp_path / kept).exists()
    assert (tmp_path / "probe.1.jsonl").read_bytes() == first
    steps = [row.step for row in Measurements.load(tmp_path / "probe.jsonl").where(measure="capture_error")]
    assert len(steps) == len(set(steps))
