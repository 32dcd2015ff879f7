"""A decoder with edits of its own: scale 1, caches, padding, recomputation, compilation, mixed precision, schedules, resumption, ranks."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from thalweg.connections import Site, Stream
from thalweg.connections.additive import AdditiveSite
from thalweg.data.task import Task, as_batch
from thalweg.errors import InputError, UnknownNameError
from thalweg.models import Decoder, DecoderCache, DecoderConfig, StreamTrace, ThalwegConfig, ThalwegForCausalLM
from thalweg.models.along import edit_sites
from thalweg.models.retained import count_updates, edits_of
from thalweg.records import RunFolder
from thalweg.training import TrainConfig, load_decoder, train
from thalweg.training.initial import load as load_initial

# Tracing looks at .grad of activations and hides torch's warning by a hook that "warnings are errors" overtakes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
VOCAB = 19
EDITS = {
    "value, full": {"attention_edit": "value:full:0"},
    "value, exclude-self": {"attention_edit": "value:exclude-self:0.5,perpendicular=0.8,group=kv"},
    "value, learned by head": {"attention_edit": "value:exclude-self:learned,perpendicular=learned,per=head"},
    "stream": {"attention_edit": "residual:0", "mlp_edit": "residual:learned,perpendicular=0.9"},
    "both": {"attention_edit": "value:full:1..0@10,layers=1:", "mlp_edit": "residual:0+1+0.5"},
    "random": {
        "attention_edit": "value:exclude-self:0,control=random-direction",
        "mlp_edit": "residual:0,control=random-direction",
    },
}
MODELS = {
    "additive": {},
    "mhc, gated": {
        "connection": "mhc",
        "connection_options": {"streams": 2},
        "attention_gate": "head",
        "qk_norm": True,
    },
    "windows": {"windows": (3, 0, 2)},
    "experts, sandwich": {
        "layers": ("attention", "moe"),
        "connection_options": {"update_norm": True},
        "experts": 3,
        "active_experts": 1,
    },
}


def cfg(model="additive", edit=None, **changes):
    values = {"vocab_size": VOCAB, "width": 16, "depth": 3, "heads": 4, "kv_heads": 2}
    return DecoderConfig(**values | MODELS[model] | (EDITS[edit] if edit else {}) | changes)


def make(*args, seed=0, **changes):
    return Decoder(cfg(*args, **changes), generator=torch.Generator().manual_seed(seed))


def stirred(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


def ids(batch, length, seed=0):
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def gradients(decoder, x):
    decoder.zero_grad()
    out = decoder(x, labels=x)
    out.loss.backward()
    return out.logits.detach(), [parameter.grad.clone() for parameter in decoder.parameters()]


def losses(decoder, steps=4):
    """Losses of AdamW, and the weights at the end."""
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        x = ids(2, 9, seed=step)
        loss = decoder(x, labels=x).loss
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found, dict(decoder.named_parameters())


@pytest.mark.parametrize("model", MODELS)
def test_training_at_scale_one_is_bitwise_the_unedited_training(model):
    ones = {"attention_edit": "value:exclude-self:1,perpendicular=1", "mlp_edit": "residual:1"}
    (plain, weights), (edited, others) = losses(make(model)), losses(make(model, **ones))
    assert plain == edited and all(torch.equal(weights[name], others[name]) for name in weights | others)
    removed, _ = losses(make(model, attention_edit="value:full:0"))
    assert removed[0] != plain[0]


@pytest.mark.parametrize("model", MODELS)
def test_a_learned_scale_starts_as_the_unedited_model_and_moves(model):
    edited = make(model, attention_edit="value:exclude-self:learned,per=head", mlp_edit="residual:learned")
    assert torch.equal(edited(ids(2, 9)).logits, make(model)(ids(2, 9)).logits)
    _, weights = losses(edited)
    offsets = {name: value for name, value in weights.items() if ".edit." in name}
    assert len(offsets) == 6 and all(value.abs().min() > 1e-3 for value in offsets.values())


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("model", MODELS)
def test_cached_decoding_equals_the_full_pass_padded_or_not(model, edit):
    decoder, pad, pieces = stirred(make(model, edit)), 2, (4, 1, 3, 1)
    x = ids(2, pad + sum(pieces))
    mask = torch.ones_like(x)
    mask[0, :pad] = 0
    with torch.no_grad():
        full = decoder(x, attention_mask=mask).logits
        close(full[:1, pad:], decoder(x[:1, pad:]).logits)
        cache, splits = DecoderCache(), [pad + pieces[0], *pieces[1:]]
        parts = zip(x.split(splits, 1), mask.split(splits, 1), strict=True)
        cached = torch.cat([decoder(part, attention_mask=real, cache=cache).logits for part, real in parts], 1)
        right = torch.ones_like(x[:1])
        right[:, -3:] = 0
        close(decoder(x[1:], attention_mask=right).logits[:, :-3], full[1:, :-3])
    close(cached[0, pad:], full[0, pad:])
    close(cached[1], full[1])


def test_generating_with_a_cache_equals_without():
    model = ThalwegForCausalLM(ThalwegConfig.of(cfg(edit="value, exclude-self"), pad_token_id=0)).eval()
    stirred(model)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    x = ids(2, 5)
    assert torch.equal(model.generate(x, **options), model.generate(x, use_cache=False, **options))


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("model", ["additive", "mhc, gated"])
def test_recomputed_gradients_are_bitwise_equal(model, edit):
    plain, again = make(model, edit), make(model, edit, gradient_checkpointing=True)
    (out, found), (other, wanted) = gradients(plain, ids(2, 8)), gradients(again, ids(2, 8))
    assert torch.equal(out, other) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("connection", "edits"),
    [
        ("additive", {"attention_edit": "value:exclude-self:learned,per=head", "mlp_edit": "residual:1..0@9"}),
        ("mhc", {"attention_edit": "residual:learned", "mlp_edit": "residual:0,control=random-direction"}),
    ],
)
def test_compiled_without_a_break(connection, edits):
    options = {"streams": 2, "mixer_options": {"iterations": 1}} if connection == "mhc" else {}
    torch._dynamo.reset()
    plain, compiled = (
        stirred(make(connection=connection, connection_options=options, depth=1, **edits)) for _ in range(2)
    )
    compiled.compile_blocks(backend=aot_eager)
    (out, found), (other, wanted) = gradients(plain, ids(2, 8)), gradients(compiled, ids(2, 8))
    close(out, other)
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs)
    torch._dynamo.reset()


@pytest.mark.parametrize("edit", EDITS)
def test_mixed_precision_edits_in_float32(edit):
    """What is left along the reference is what the arithmetic of bfloat16 inputs leaves, not that of bfloat16 dot products."""
    decoder, x = make("additive", edit), ids(2, 9)
    exact = decoder(x).logits
    seen = []
    for module in edits_of(decoder).values():
        module.register_forward_hook(lambda _, args, out: seen.append((args, out)))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = decoder(x).logits
    assert (rounded - exact).abs().max() < 0.05 * exact.abs().max()
    assert seen and all(out.dtype == args[0].dtype for args, out in seen)
    if (
        edit == "stream"
    ):  # the raw stream stays in float32, and removal leaves what rounding the result to bfloat16 leaves
        (update, raw), left = next((args, out) for args, out in seen)
        assert raw.dtype == torch.float32 and left.dtype == update.dtype == torch.bfloat16
        share = (left.float() * raw).sum(-1).abs() / (left.float().norm(dim=-1) * raw.norm(dim=-1))
        assert share.max() < 2**-9


def test_copies_and_pickles_are_edited_too():
    decoder = stirred(make("mhc, gated", "stream"))
    x = ids(2, 7)
    for other in (copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))):
        assert torch.equal(other(x).logits, decoder(x).logits) and type(other.stream.sites[0]).__name__.startswith(
            "Edited"
        )
        other.stream.sites[1].update_norm.edit.parallel.offset.data.add_(1.0)
        assert not torch.equal(other(x).logits, decoder(x).logits)


def test_a_trace_shows_the_branch_before_and_the_step_after_the_edit():
    decoder, trace = stirred(make("additive", attention_edit="residual:0")), StreamTrace()
    with torch.no_grad():
        decoder(ids(2, 7), trace=trace)
    for record in trace.records:
        step, edited = record.state_after - record.state_before, record.site.kind == "attention"
        along = (step * record.state_before).sum(-1).abs().max().item()
        assert along < 1e-10 if edited else along > 1e-6
        assert torch.allclose(step, record.update) is not edited


class Fused(AdditiveSite):
    def advance(self, following, state, update, context, tokens=None):
        return super().advance(following, state, update, context, tokens)


class PastTheNorm(AdditiveSite):
    def write(self, state, update, context):
        return state + update


class Blind(AdditiveSite):
    def read(self, state, tokens=None):
        return state, None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Fused, "writes and reads in one step"),
        (PastTheNorm, "writes past its update norm"),
        (Blind, "reads past its input norm"),
    ],
)
def test_a_connection_that_cannot_be_edited_says_so(kind, said):
    class Mine(Stream):
        SiteModule = kind

    edited, x = cfg(attention_edit="residual:0"), torch.randn(1, 2, 16)
    stream = Mine(16, Site.decoder(3), Mine.Options())
    with pytest.raises(InputError, match=said):
        edit_sites(stream, edited)
        stream(x, [lambda y: y] * 6)


# runs


class Counting(Task):
    """Each sequence counts upwards from a start drawn by the sample number."""

    name, kind, vocab_size, fingerprint = "counting", "synthetic", 17, "counting-17"

    def nulls(self):
        return {}

    def _order(self, split, length, seed):
        return lambda samples: as_batch((np.array(samples)[:, None] * 7 + np.arange(length)) % 17)

    def _held_out(self, split, length):
        return 17, lambda chosen: as_batch((chosen[:, None] + np.arange(length)) % 17)


RUN = {"depth": 2, "width": 16, "heads": 2, "sequence_length": 12, "batch_size": 4, "steps": 8, "lr": 1e-2}
RUN |= {"eval_every": 4, "save_every": 2, "eval_batches": 1, "threads": 1, "geometry": False}
SCHEDULED = {"attention_edit": "value:exclude-self:1..0@6", "mlp_edit": "residual:learned"}


def run(path, stop=None, resume=False, **changes):
    return train(TrainConfig(**RUN | changes), path, task=Counting(), stop=stop, resume=resume)


def test_a_scheduled_run_is_resumed_bitwise_and_says_where_it_is(tmp_path):
    calls = iter(range(100))
    whole = run(tmp_path / "whole", **SCHEDULED)
    assert run(tmp_path / "cut", stop=lambda: next(calls) == 2, **SCHEDULED).status == "interrupted"
    resumed = run(tmp_path / "cut", resume=True, **SCHEDULED)
    assert whole.train_loss == resumed.train_loss and whole.evaluation == resumed.evaluation
    one, other = (dict(RunFolder.open(tmp_path / name).metrics("train/loss")) for name in ("whole", "cut"))
    assert one == other
    record = RunFolder.open(tmp_path / "whole")
    rows = list(record.measures().where(measure="retained_scale"))
    found = {(row.step, row.layer, row.branch): row.value for row in rows}
    assert found[4, 0, "attention.parallel"] == pytest.approx(1 - 4 / 6) and found[8, 1, "attention.parallel"] == 0
    assert found[8, 0, "feed_forward.parallel"] != 1
    assert dict(record.metrics("moved/edit"))[8] > 0 < dict(record.metrics("gradient/edit"))[8]
    assert not record.metrics("moved/connection")  # an edit is no part of the connection
    decoder, _ = load_decoder(tmp_path / "whole", "last")
    scale = decoder.sublayers[0].edit.parallel
    assert scale.updates.item() == 8 and scale(torch.zeros(1)).item() == 0


def test_the_same_weights_with_other_edits():
    trained = stirred(make(edit="value, learned by head"))
    without = trained.with_edits(attention_edit=None)
    plain = stirred(make())
    assert not edits_of(without) and without.head.weight.dtype == torch.float64 and not without.training
    with_zero = plain.with_edits(attention_edit="value:full:0", mlp_edit="residual:0")
    assert torch.equal(
        with_zero.with_edits(attention_edit=None, mlp_edit=None)(ids(2, 7)).logits, plain(ids(2, 7)).logits
    )
    assert (with_zero(ids(2, 7)).logits - plain(ids(2, 7)).logits).abs().max() > 1e-3
    assert torch.equal(trained.with_edits(mlp_edit=None)(ids(2, 7)).logits, trained(ids(2, 7)).logits)
    with pytest.raises(UnknownNameError, match="Did you mean 'mlp_edit'"):
        plain.with_edits(mlp_edits="residual:0")


def test_a_schedule_begins_at_its_first_value():
    scale = make(attention_edit="value:full:1..0.5@4").sublayers[0].edit.parallel
    found = []
    for updates in (0, 1, 2, 4, 9):
        scale.count(updates)
        found.append(scale(torch.zeros(1)).item())
    assert found == [1.0, 0.875, 0.75, 0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_schedule_counts_in_float32_or_wider(dtype):
    """float16 ends at 65,504, and bfloat16 cannot tell 1000 from 1002."""
    scale = make(attention_edit="value:full:1..0@200000").sublayers[0].edit.parallel
    for updates in (1000, 1002, 70_000, 140_000):
        scale.count(updates)
        assert scale(torch.zeros(1, dtype=dtype)).item() == pytest.approx(1 - updates / 200_000, abs=1e-7)


def test_a_run_that_begins_from_a_scheduled_one_goes_on_from_its_scale(tmp_path):
    edit = {"attention_edit": "value:full:1..0@20"}
    model = ThalwegForCausalLM(ThalwegConfig.of(cfg(**edit)))
    count_updates(model, 12)
    model.save_pretrained(tmp_path / "model")
    run(tmp_path / "run", init_from=str(tmp_path / "model"), depth=3, width=16, heads=4, kv_heads=2, **edit)
    rows = RunFolder.open(tmp_path / "run").measures().where(measure="retained_scale")
    found = {row.step: row.value for row in rows if row.layer == 0 and row.branch == "attention.parallel"}
    assert {0: 0.4} | found == pytest.approx({0: 0.4, **{step: 1 - min(12 + step, 20) / 20 for step in found}})
    assert max(found) == 8 and load_decoder(tmp_path / "run", "last")[0].sublayers[0].edit.parallel.updates.item() == 20


def test_runs_of_scale_one_and_without_an_edit_are_the_same(tmp_path):
    plain = run(tmp_path / "plain")
    edited = run(tmp_path / "one", attention_edit="value:full:1", mlp_edit="residual:1")
    assert (plain.train_loss, plain.evaluation) == (edited.train_loss, edited.evaluation)


def test_a_run_may_begin_from_a_model_with_other_edits(tmp_path):
    model = ThalwegForCausalLM(ThalwegConfig.of(cfg(edit="value, learned by head")))
    stirred(model).float().save_pretrained(tmp_path / "model")
    saved = model.decoder.state_dict()
    for edit in ({"attention_edit": "value:full:learned"}, EDITS["value, learned by head"], {}):
        begun = make(**edit)
        load_initial(begun, tmp_path / "model")
        same = edit == EDITS["value, learned by head"]
        for name, value in begun.state_dict().items():
            wanted = saved[name] if name in saved and (same or ".edit." not in name) else torch.zeros_like(value)
            assert torch.equal(value, wanted), name
    table = {"init_from": str(tmp_path / "model"), "depth": 3, "width": 16, "heads": 4, "kv_heads": 2}
    assert TrainConfig(**table, attention_edit="value:full:0").decoder(17).edits.keys() == {"attention_edit"}
    from thalweg.training.initial import table_of

    assert table_of(tmp_path / "model")["attention_edit"] == EDITS["value, learned by head"]["attention_edit"]
