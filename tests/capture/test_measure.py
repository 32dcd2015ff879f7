"""``thalweg.measure``: one proved pass over a text, its loss, its rows, what it says beforehand and what it refuses."""

import copy
import math

import pandas
import pytest
import torch
from tiny_families import LENGTH, VOCAB, tiny

import thalweg
from thalweg.capture import locate, watch
from thalweg.capture.measure import DEFAULT, MEASURES
from thalweg.capture.plan import rows_of_a_batch
from thalweg.capture.values import MARK, prove_values
from thalweg.capture.windows import NOT_SCORED, cut
from thalweg.errors import InputError, ProofError, UnknownNameError
from thalweg.geometry import catalog, state_cosine
from thalweg.models import Decoder, DecoderConfig
from thalweg.records import Measurements


def documents(*lengths):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def encode(text):
    return [3 + ord(letter) % 50 for letter in text]


class Words:
    """The least that a tokenizer of ours has."""

    encode = staticmethod(encode)


TEXTS = documents(40, 17, 25, 9)


def rows_of(kind="llama", texts=TEXTS, dtype=torch.float64, **options):
    return thalweg.measure(tiny(kind, dtype), texts, **({"length": 16} | options))


def one(rows, measure, **where):
    found = list(rows.where(measure=measure, **where))
    assert len(found) == 1
    return found[0]


def test_loss_is_that_of_transformers():
    rows, model = rows_of(batch_size=3), tiny("llama")
    nats, scored = 0.0, 0
    for ids in TEXTS:
        for start in range(0, len(ids), 16):
            part = torch.tensor([ids[start : start + 17]])  # with the token behind the window as the last label
            if part.shape[1] > 1:
                nats += model(part, labels=part).loss.item() * (part.shape[1] - 1)
                scored += part.shape[1] - 1
    loss, perplexity = one(rows, "loss"), one(rows, "token_perplexity")
    assert loss.value == pytest.approx(nats / scored, rel=1e-5)
    assert perplexity.value == pytest.approx(math.exp(nats / scored), rel=1e-4)
    assert f"of {scored} scored tokens" in loss.interval and loss.low < loss.value < loss.high
    assert (
        loss.split == "disjoint windows of 16 tokens, first token of a document not scored"
        and loss.unit == "nats/token"
    )


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 7}])
def test_batches_change_nothing(options):
    some, other = rows_of(batch_size=2), rows_of(**options)
    for a, b in zip(some, other, strict=True):
        if a.measure != "capture_error":
            assert (a.measure, a.site, a.n) == (b.measure, b.site, b.n)
            assert a.value == pytest.approx(b.value, rel=1e-6, abs=1e-9, nan_ok=True), a.measure


def test_the_default_set_is_measured_and_catalogued():
    rows = rows_of(texts=documents(*[20] * 9), name="tiny")
    names = {row.measure for row in rows}
    plain = {name.removesuffix(".sd").removesuffix(".median") for name in names}
    assert plain == set(DEFAULT) | {"capture_error"}
    assert set(MEASURES) <= set(catalog.names()) | {"loss", "token_perplexity"}
    assert {row.model for row in rows} == {"tiny"}
    proof = one(rows, "capture_error")
    assert 0 <= proof.value <= proof.null == 1e-10 and "llama, found by family" in proof.null_kind
    assert one(rows, "rms", site="stream.end").interval == "95% percentile bootstrap over 9 documents of 180 tokens"
    assert one(rows_of(), "rms", site="stream.end").interval.startswith("95% percentile bootstrap over 7 windows")


def test_named_measures_and_what_they_need():
    rows = rows_of(measures=["rms", "linear_cka", "value_fraction"])
    assert {row.measure for row in rows} == {
        "capture_error", "capture_error.values", "rms", "rms.sd", "rms.median",
        "linear_cka", "value_fraction", "value_fraction.sd", "value_fraction.median",
    }  # fmt: skip
    assert one(rows, "capture_error.values").value < 1e-10
    own = rows_of(measures=["own_weight"], dtype=torch.float32)
    assert {row.head for row in own.where(measure="own_weight")} == {None, 0, 1, 2, 3}
    everywhere = rows_of(rank=True, measures=["pooled_effective_rank"]).where(measure="pooled_effective_rank")
    assert len(everywhere) == 5


def test_an_encoder_has_no_loss_and_its_text_is_padded_right():
    rows = rows_of("bert")
    assert not rows.where(measure="loss") and len(rows.where(measure="update_rms.step")) == 6
    assert rows.where(measure="layer_drop_cosine", site="layers.1")


@pytest.mark.parametrize("connection", ["additive", "post_norm", "mhc"])
def test_models_of_ours_whatever_they_write(connection):
    config = DecoderConfig(vocab_size=VOCAB, width=32, depth=2, heads=4, connection=connection)
    model = Decoder(config, generator=torch.Generator().manual_seed(0)).double()
    rows = thalweg.measure(model, TEXTS, length=16, values=True)
    assert one(rows, "capture_error").value <= 1e-10 and one(rows, "loss").value > 0
    assert len(rows.where(measure="value_fraction", head=3)) == 2
    kept, located = [], locate(model)

    def see(event):
        states = (
            (event.state, event.following)
            if event.states is None
            else (event.states.mean(2), event.next_states.mean(2))
        )
        kept.append(state_cosine(*(x[event.real] for x in states)).mean().item())

    with torch.no_grad(), watch(located, see):
        model(torch.tensor([TEXTS[0][:16]]))
    alone = thalweg.measure(model, [TEXTS[0][:16]], length=16)
    turned = [row.value for row in alone.where(measure="state_cosine")]
    assert turned == pytest.approx(kept) and len(turned) == 4


def hooks_of(model):
    return [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_the_proof_of_heads_leaves_no_hook_of_transformers_behind(kind):
    """Fails without the sweep: transformers keeps a hook on every module that it took attention weights from."""
    model = copy.deepcopy(tiny(kind, torch.float32))
    for module in model.modules():
        module._forward_hooks.clear()
        vars(module).pop(MARK, None)
    ids = torch.tensor([TEXTS[0][:9]])
    kept = model.register_forward_hook(lambda *_: None)  # somebody's own stays
    for _ in range(2):
        assert max(prove_values(locate(model), ids).values()) <= 1e-5
        assert len(hooks_of(model)) == 1 and not any(MARK in vars(module) for module in model.modules())
    kept.remove()
    model.set_attn_implementation("eager")
    asked = model(ids, output_attentions=True).attentions  # transformers puts its own back when it is asked again
    theirs = hooks_of(model)
    assert len(asked) == len(locate(model).attention)
    prove_values(locate(model), ids)
    assert hooks_of(model) == theirs  # what the user asked for stays
    assert len(model(ids, output_attentions=True).attentions) == len(asked)


def test_no_hook_is_left_where_the_proof_fails():
    model = copy.deepcopy(tiny("llama", torch.float32))
    before = hooks_of(model)
    with pytest.raises(ProofError):
        prove_values(locate(model), torch.tensor([TEXTS[0][:9]]), tolerance=0.0)
    assert hooks_of(model) == before


def test_the_model_is_left_as_it_was():
    model = tiny("llama", torch.float32)
    before = hooks_of(model)
    model.train()
    model.model.layers[0].eval()
    try:
        thalweg.measure(model, TEXTS, length=16, values=True, own_weights=True)
        assert model.training and not model.model.layers[0].training and model.model.layers[1].training
        assert hooks_of(model) == before
        assert all(parameter.grad is None for parameter in model.parameters())
    finally:
        model.eval()


def test_the_plan_says_what_the_run_takes():
    seen = []
    rows_of(batch_size=2, progress=lambda done, plan: seen.append((done, plan)))
    assert [done for done, _ in seen] == [0, 1, 2, 3, 4]
    before, after = seen[0][1], seen[-1][1]
    assert (before.tokens, before.documents, before.windows, before.passes) == (90, 4, 7, 4)
    assert before.seconds is None and after.seconds > 0
    assert before.kept == seen[-1][1].kept > 0 and "capture proved on 32 tokens" in before.lines[2]
    some, more = (cut([TEXTS[0] * times], None, 16, None).units for times in (250, 500))
    assert some == more == (512, "groups of windows")  # the only thing of a text that memory depends on
    assert rows_of_a_batch(512, 50_000) == 5 and rows_of_a_batch(512, 0) == 8 and rows_of_a_batch(10**6, 10**6) == 1


def test_text_needs_a_tokenizer_and_gets_it():
    text = ["a text that has some letters", "and another one"]
    by_text = thalweg.measure(tiny("llama"), text, tokenizer=Words(), length=16)
    by_ids = thalweg.measure(tiny("llama"), [encode(part) for part in text], length=16)
    assert by_text == by_ids
    with pytest.raises(InputError, match="text needs a tokenizer"):
        thalweg.measure(tiny("llama"), text, length=16)
    with pytest.raises(InputError, match=r"a list of documents, got one text; write \[text\], or of a file"):
        thalweg.measure(tiny("llama"), "a/file.txt", tokenizer=Words(), length=16)
    with pytest.raises(InputError, match="a tokenizer of transformers or of ours"):
        thalweg.measure(tiny("llama"), text, tokenizer=3, length=16)


def test_windows_cover_every_token_once():
    text = cut(documents(40, 1, 17, 32), None, 16, None)
    assert sorted(len(w.ids) for w in text.windows) == [8, 16, 16, 16, 16, 16]
    assert text.tokens == 88 and text.documents == 3  # a last window of one token is not read
    scored = sum(len(w.targets) for w in text.windows)
    assert scored == 39 + 16 + 31
    assert text.notes == ("1 of 4 documents have fewer than 2 tokens and were left out",)
    first = next(text.batches(4, padding_id=7))
    assert first.attention_mask is None and first.input_ids.shape == (4, 16)
    last = list(text.batches(4))[1]
    assert last.attention_mask.sum(1).tolist() == [16, 8] and last.targets[1, 7:].eq(NOT_SCORED).all()
    capped = cut(documents(40, 40), None, 16, 30)
    assert capped.tokens == 32 and "1 of 2 documents were read" in capped.notes[-1]
    assert "no document is as long as the window" in cut(documents(5), None, 16, None).notes[0]
    many = cut(documents(*[4] * 1000), None, 16, None)
    assert many.units == (512, "groups of documents") and {w.unit for w in many.windows} == set(range(512))


def test_what_cannot_be_measured_is_refused_in_a_line():
    model = tiny("llama")
    for options, line in (
        ({"length": 1}, "length must be a whole number of at least 2"),
        ({"length": LENGTH + 1}, f"takes {LENGTH} tokens at most"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"tokens": 1.5}, "tokens must be a whole number"),
        ({"measures": "rms"}, "measures must be a list of names"),
    ):
        with pytest.raises(InputError, match=line):
            thalweg.measure(model, TEXTS, **({"length": 16} | options))
    with pytest.raises(UnknownNameError, match=r"Did you mean 'update_angle\.raw'"):
        thalweg.measure(model, TEXTS, measures=["update_angel.raw"], length=16)
    with pytest.raises(InputError, match="none has 2 tokens"):
        thalweg.measure(model, [[5]], length=16)
    with pytest.raises(InputError, match=f"token 99 is in the text, the model has {VOCAB} tokens"):
        thalweg.measure(model, [[5, 99, 4]], length=16)
    with pytest.raises(InputError, match="must be a string or a list of token ids, got float"):
        thalweg.measure(model, [1.5], length=16)


def test_heads_are_needed_for_value_space():
    model = tiny("deepseek_v4")
    assert not any(place.heads for place in locate(model).sites)
    with pytest.raises(InputError, match="no heads to measure in value space"):
        thalweg.measure(model, TEXTS, length=16, values=True)


def test_a_wrong_map_is_refused_or_stamped(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(thalweg.capture.measure, "prove", refuse)
    with pytest.raises(ProofError, match="fails at layers"):
        thalweg.measure(model, TEXTS, length=16)
    rows = thalweg.measure(model, TEXTS, length=16, measures=["rms"], allow_unverified=True)
    stamp = one(rows, "capture_error")
    assert math.isnan(stamp.value) and stamp.null_kind == "not verified: fails at layers.1.attention"
    assert one(rows, "rms", site="stream.end").value > 0


def refuse(located, batch):
    raise ProofError("fails at layers.1.attention")


def test_rows_can_be_kept(tmp_path):
    rows = rows_of(measures=["rms", "loss"])
    rows.save(tmp_path / "rows.jsonl")
    assert Measurements.load(tmp_path / "rows.jsonl") == rows
    with pytest.raises(InputError, match=r"is called NAME\.parquet"):
        rows.to_parquet(tmp_path / "rows.jsonl")
    rows.to_parquet(tmp_path / "rows.parquet")
    table = pandas.read_parquet(tmp_path / "rows.parquet")
    assert len(table) == len(rows) and table["value"].tolist() == [row.value for row in rows]


def test_a_tokenizer_may_be_named_by_its_folder(tmp_path):
    with pytest.raises(InputError, match=f"no tokenizer in {tmp_path}"):
        thalweg.measure(tiny("llama"), ["Emma Woodhouse, handsome"], tokenizer=str(tmp_path))
