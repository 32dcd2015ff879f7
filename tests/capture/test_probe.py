"""The probe: what it sees is the training pass, once; the training does not notice; nothing is left behind."""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from thalweg import capture
from thalweg.capture import probe as probing
from thalweg.capture.probe import Probe
from thalweg.errors import InputError, ProofError, ThalwegWarning, UnknownNameError
from thalweg.models import Decoder, DecoderConfig
from thalweg.records import Measurements

VOCAB, LENGTH, ROWS = 31, 9, 4


def gpt2(**more):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=3, n_head=2, n_positions=LENGTH, bos_token_id=1, eos_token_id=2, **more
    )
    return GPT2LMHeadModel(config).train()


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, max_position_embeddings=LENGTH)).train()


def batches(count):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB, (ROWS, LENGTH), generator=generator) for _ in range(count)]


def loss_of(model, ids):
    out = model(input_ids=ids, labels=ids)
    return out.loss


def train(model, steps=5, probe=None, micro=1, between=None):
    """A plain loop; the state of everything at its end."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids in batches(steps):
        for part in ids.chunk(micro):
            (loss_of(model, part) / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(model)
        if probe is not None:
            probe.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, torch.get_rng_state()


def hooks_of(model):
    return [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or "advance" in module.__dict__
    ]


def values(rows, measure, step):
    return {row.site: row.value for row in rows.where(measure=measure, step=step)}


def by_hand(model, ids):
    """Share of every update along the stream, by hooks of this test's own, for GPT-2 in training mode."""
    found, handles = {}, []

    def see(site, norm, sublayer):
        kept = {}
        handles.append(norm.register_forward_pre_hook(lambda _, args: kept.update(state=args[0])))

        def measure(_, args, out):
            state, update = kept["state"].detach(), (out[0] if isinstance(out, tuple) else out).detach()
            along = (state * update).sum(-1) / state.norm(dim=-1)
            found[site] = (along.abs() / update.norm(dim=-1)).mean().item()

        handles.append(sublayer.register_forward_hook(measure))

    for i, block in enumerate(model.transformer.h):
        see(f"layers.{i}.attention", block.ln_1, block.attn)
        see(f"layers.{i}.feed_forward", block.ln_2, block.mlp)
    model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return found


def test_the_training_does_not_notice(tmp_path):
    plain, state = train(gpt2())
    model = gpt2()
    with Probe(model, every=2) as probe:
        assert hooks_of(model)
        watched, after = train(model, probe=probe)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    assert torch.equal(state, after) and all(m.training for m in model.modules())
    assert hooks_of(model) == []
    assert {row.step for row in probe.measurements} == {0, 2, 4}
    assert probe.proved is not None and probe.proved < 1e-5


def test_it_measures_the_training_pass_itself():
    model, (ids,) = gpt2(), batches(1)
    torch.manual_seed(3)
    expected = by_hand(model, ids)  # with dropout: another pass would draw another one
    torch.manual_seed(3)
    with Probe(model, measures=["parallel_fraction.raw"]) as probe:
        loss_of(model, ids).backward()
        rows = probe.step()
    assert values(rows, "parallel_fraction.raw", 0) == pytest.approx(expected, rel=1e-5)
    (row,) = rows.where(measure="parallel_fraction.raw", site="layers.2.attention")
    assert (row.n, row.split, row.dtype, row.layer, row.branch) == (ROWS, "train", "float32", 2, "attention")
    assert {row.measure for row in rows} == {"parallel_fraction.raw", "capture_error"}


def test_one_microbatch_and_no_evaluation():
    def evaluate(model):
        model.eval()
        loss_of(model, batches(1)[0][:1])
        model.train()

    first = batches(1)[0][:2]
    alone = gpt2()
    torch.manual_seed(1)
    with Probe(alone, every=2) as probe:
        loss_of(alone, first)
        expected = probe.step()
    model = gpt2()
    evaluate(model)
    with Probe(model, every=2) as probe:
        evaluate(model)  # a pass of a measured step that is not one of training
        with torch.no_grad():
            loss_of(model, first[:1])
        train(model, steps=3, probe=probe, micro=2, between=evaluate)
    assert probe.measurements.where(step=0) == expected
    assert {row.n for row in probe.measurements.where(measure="rms")} == {2}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_passes_count_once(reentrant):
    def rows(checkpointed):
        model = llama()
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with Probe(model) as probe:
            end, _ = train(model, steps=1, probe=probe)
        return probe.measurements, end

    plain, checkpointed = rows(False), rows(True)
    assert plain[0] == checkpointed[0]
    assert all(torch.equal(plain[1][name], checkpointed[1][name]) for name in plain[1])


@pytest.mark.parametrize("connection", ["additive", "mhc"])
def test_our_own_decoder_checkpointed(connection):
    def rows(checkpointing):
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCAB, "width": 16, "depth": 2, "heads": 2, "connection": connection}
        model = Decoder(DecoderConfig(**sizes, gradient_checkpointing=checkpointing)).train()
        with Probe(model) as probe:
            (ids,) = batches(1)
            model(ids, labels=ids).loss.backward()
            probe.step()
        assert hooks_of(model) == []
        return probe.measurements

    assert rows(False) == rows(True) and len(rows(False)) > 20


def test_an_exception_leaves_no_hooks():
    model = gpt2()
    with pytest.raises(ZeroDivisionError), Probe(model):
        assert hooks_of(model)
        raise ZeroDivisionError
    assert hooks_of(model) == []


def test_a_pass_that_raises_does_not_count():
    model, (ids,) = gpt2(), batches(1)
    block = model.transformer.h[1].mlp
    handle = block.register_forward_pre_hook(lambda *_: 1 / 0)
    with Probe(model) as probe:
        with pytest.raises(ZeroDivisionError):
            loss_of(model, ids[:1])
        handle.remove()
        loss_of(model, ids)
        rows = probe.step()
    assert {row.n for row in rows.where(measure="rms")} == {ROWS}


def test_inside_distributed_data_parallel(tmp_path):
    plain, _ = train(llama(), steps=2)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        inner = llama()
        model = DistributedDataParallel(inner)
        with Probe(model, every=1) as probe:
            train(model, steps=2, probe=probe)
        assert hooks_of(inner) == [] and {row.step for row in probe.measurements} == {0, 1}
        assert all(torch.allclose(p, plain[name]) for name, p in inner.named_parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(probing, "_rank", lambda: (1, 2))
    model = llama()
    with Probe(model) as probe:
        assert hooks_of(model) == []
        train(model, steps=2, probe=probe)
    assert len(probe.measurements) == 0
    with Probe(llama(), ranks="all", path=tmp_path / "rows.jsonl") as probe:
        train(probe.located.model, steps=1, probe=probe)
    assert probe.path == tmp_path / "rows-rank1.jsonl" and {row.run for row in probe.measurements} == {"rank 1"}


def test_what_cannot_be_looked_into_is_refused():
    with pytest.raises(InputError, match="a model inside DataParallel cannot be watched; use DistributedDataParallel"):
        Probe(nn.DataParallel(llama()))


def test_compiled():
    from torch._dynamo.testing import CompileCounter

    counter, inner = CompileCounter(), llama()
    model = torch.compile(inner, backend=counter)
    with Probe(model, every=2) as probe:
        train(model, steps=4, probe=probe)
        frames = counter.frame_count
    assert {row.step for row in probe.measurements} == {0, 2} and frames > 0
    assert probe.notes == ["compiled code runs uncompiled on measured steps"]
    train(model, steps=2)
    assert counter.frame_count == frames  # nothing is compiled anew
    torch._dynamo.reset()


class Block(nn.Module):
    """Adds its update through a dropout of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp, self.dropout = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(self.mlp(self.norm(x)))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(VOCAB, 8),
            nn.ModuleList([Block(), Block()]),
            nn.Linear(8, VOCAB),
        )

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MAP = {"blocks": "layers", "head": "head", "width": 8, "sites": [{"kind": "feed_forward", "sublayer": "mlp"}]}


def test_a_stream_that_is_not_is_refused_at_the_first_step():
    model = Small().train()
    probe = Probe(model, map=MAP).start()
    model(batches(1)[0]).sum().backward()
    with pytest.raises(ProofError, match=r"fails at layers\.0\.feed_forward"):
        probe.step()
    assert hooks_of(model) == []
    with pytest.raises(InputError, match="has not been started"):
        probe.step()


def test_a_diverged_step_is_a_warning_and_no_rows(tmp_path):
    model, (ids,) = gpt2(), batches(1)
    with Probe(model, every=1) as probe:
        loss_of(model, ids)
        assert probe.step() is not None
        with torch.no_grad():
            model.transformer.h[1].mlp.c_proj.weight.fill_(torch.nan)
        loss_of(model, ids)
        with pytest.warns(ThalwegWarning, match="probe, step 1: not measured: .*finite"):
            assert probe.step() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once, noted each time
            loss_of(model, ids)
            assert probe.step() is None
    assert len(probe.notes) == 2 and {row.step for row in probe.measurements} == {0}


def test_a_model_that_is_not_trained_is_told():
    with (
        Probe(copy.deepcopy(gpt2())) as probe,
        pytest.warns(ThalwegWarning, match="no forward pass of the model in training mode"),
    ):
        train(gpt2(), steps=1, probe=probe)


def test_files(tmp_path):
    import pandas

    model = llama()
    with Probe(
        model, path=tmp_path / "rows.jsonl", every=1, name="tiny", measures=["rms", "pooled_effective_rank"]
    ) as probe:
        train(model, steps=2, probe=probe)
    rows = probe.measurements
    assert Measurements.load(tmp_path / "rows.jsonl") == rows and {row.model for row in rows} == {"tiny"}
    assert {row.measure for row in rows} == {"rms", "pooled_effective_rank", "capture_error"}
    for name in ("all.jsonl", "all.parquet", "all.csv"):
        probe.save(tmp_path / name)
    assert Measurements.load(tmp_path / "all.jsonl") == rows
    for table in (
        pandas.read_parquet(tmp_path / "all.parquet"),
        pandas.read_csv(tmp_path / "all.csv"),
        probe.to_pandas(),
    ):
        assert list(table["value"]) == pytest.approx([row.value for row in rows]) and list(table["step"]) == [
            row.step for row in rows
        ]
    ranks = {f"pooled_effective_rank/{kind}" for kind in ("attention", "feed_forward", "stream.end")}
    assert set(probe.summary()) == {"rms/attention", "rms/feed_forward", "rms/stream.end", *ranks} - {"capture_error"}
    with pytest.raises(InputError, match=r"must end in \.jsonl, \.parquet, \.csv"):
        probe.save(tmp_path / "all.xlsx")
    with pytest.raises(InputError, match=r"there is no folder .*absent; make it or choose another place"):
        probe.save(tmp_path / "absent" / "all.csv")
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"every": 0}, InputError, "every must be a whole number of at least 1, got 0"),
        ({"every": 1.5}, InputError, "every must be a whole number"),
        ({"first_step": -1}, InputError, "first_step must be a whole number of at least 0"),
        ({"measures": ["rsm"]}, UnknownNameError, "Did you mean 'rms'"),
        ({"measures": "rms"}, InputError, "must be a list of names"),
        ({"ranks": "second"}, UnknownNameError, "choice of ranks"),
        ({"path": "rows.csv"}, InputError, r"path must end in \.jsonl"),
    ],
)
def test_wrong_options(options, error, says):
    with pytest.raises(error, match=says):
        Probe(llama(), **options)


def test_started_twice():
    with Probe(llama()) as probe, pytest.raises(InputError, match="started already"):
        probe.start()
    assert capture.Probe is Probe


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "probe.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        exec(block, {})
    out = capsys.readouterr().out
    assert out.startswith("step 5\nmean over sites") and "parallel_fraction.raw" in out
    assert (tmp_path / "geometry.jsonl").exists()


def test_a_probe_that_is_never_stepped_says_so_once():
    model, ids = gpt2(), batches(1)[0]
    probe = Probe(model)
    with pytest.warns(ThalwegWarning, match=r"step\(\) was never called, so nothing was measured") as caught, probe:
        loss_of(model, ids).backward()
    assert len(caught) == 1 and len(probe.notes) == 1 and not hooks_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Probe(model) as probe:  # not trained
            pass
        with Probe(model) as probe:
            loss_of(model, ids).backward()
            probe.step()
        with pytest.raises(ValueError, match="mine"), Probe(model):  # an error says enough
            loss_of(model, ids).backward()
            raise ValueError("mine")


def test_a_summary_reads_as_a_table():
    model, probe = gpt2(), Probe(gpt2())
    assert str(probe.summary()).startswith("nothing was measured yet; step()")
    probe = Probe(model, every=2, measures=["rms", "layer_drop_cosine"])
    with probe:
        train(model, steps=3, probe=probe)
    found = probe.summary()
    title, head, *lines = str(found).splitlines()
    assert title == "step 2"
    assert head.split() == ["mean", "over", "sites", "attention", "feed_forward", "stream.end", "layer"]
    assert lines[0].split() == [
        "rms",
        *(f"{found[f'rms/{kind}']:.4g}" for kind in ("attention", "feed_forward", "stream.end")),
    ]
    assert lines[1].split() == ["layer_drop_cosine", f"{found['layer_drop_cosine/layer']:.4g}"]
    assert len({len(line) for line in (head, lines[1])}) == 1  # its only number stands under its heading
    assert str(probe.summary(probe.measurements)).startswith("steps 0 to 2\n")
