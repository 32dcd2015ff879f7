"""Watching changes nothing, keeps nothing and leaves nothing behind."""

import copy

import pytest
import torch
from tiny_families import batch, tiny
from torch.nn.parallel import DataParallel

from thalweg import capture
from thalweg.capture.padding import real_tokens
from thalweg.capture.values import attention_weights
from thalweg.errors import CaptureError, InputError
from thalweg.models import Decoder, DecoderConfig


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def own(**more):
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab_size=61, width=16, depth=2, heads=4, **more)).eval()


def names(located, run):
    seen: list[str] = []
    with capture.watch(located, lambda event: seen.append(event.place.name)):
        run()
    return seen


ALL = ["layers.0.attention", "layers.0.feed_forward", "layers.1.attention", "layers.1.feed_forward"]


@pytest.mark.parametrize("make", [lambda: tiny("llama"), own], ids=["llama", "own"])
def test_hooks_are_gone_also_after_an_exception(make):
    model = make()
    located, before = capture.locate(model), hooks(model)

    def fail(event):
        raise RuntimeError("stop")

    for run in (lambda e: None, fail):
        try:
            with capture.watch(located, run):
                assert hooks(model) > before
                model(batch("llama")["input_ids"])
        except RuntimeError as error:
            assert str(error) == "stop" and run is fail
        assert hooks(model) == before
        assert not any("advance" in vars(m) for m in model.modules())
    assert names(located, lambda: model(batch("llama")["input_ids"])) == ALL  # and it can be watched again


def test_a_pass_that_fails_leaves_the_next_one_whole():
    model = tiny("llama")
    located, seen = capture.locate(model), []
    with capture.watch(located, lambda e: seen.append(e.place.name)):
        with pytest.raises(IndexError):
            model(torch.full((1, 3), 10**6))
        model(batch("llama")["input_ids"])
    assert seen == ALL


def test_watching_changes_no_output_and_no_mode():
    model = copy.deepcopy(tiny("llama"))
    model.model.layers[1].train()
    modes = [m.training for m in model.modules()]
    before = model(**batch("llama")).logits
    with capture.watch(capture.locate(model), lambda e: None, values=True):
        assert torch.equal(model(**batch("llama")).logits, before)
    capture.prove(capture.locate(model), batch("llama"))
    assert [m.training for m in model.modules()] == modes


def test_events_are_the_models_own_tensors_without_gradient():
    model, events = tiny("llama"), []
    inside: list[torch.Tensor] = []
    handle = model.model.layers[0].post_attention_layernorm.register_forward_pre_hook(
        lambda m, args: inside.append(args[0])
    )
    with capture.watch(capture.locate(model), events.append, values=True):
        model(**batch("llama"))
    handle.remove()
    event = events[0]
    assert event.following.data_ptr() == inside[0].data_ptr()  # no copy
    assert not any(
        x.requires_grad for x in (event.state, event.branch, event.following, event.values.o, event.values.v)
    )
    assert inside[0].requires_grad
    assert event.states is None and event.values.own is None and events[1].values is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_told_from_tokens_and_changes_no_token(side):
    model = tiny("llama")
    located, padded, plain = capture.locate(model), [], []
    call = batch("llama", side)
    mask = call["attention_mask"].bool()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with capture.watch(located, padded.append):
        model(**call, position_ids=positions)
    with capture.watch(located, plain.append):
        model(call["input_ids"][:1][mask[:1]][None])
    for with_padding, without in zip(padded, plain, strict=True):
        assert torch.equal(with_padding.real, mask)
        for part in ("state", "branch", "following"):
            got, wanted = getattr(with_padding, part)[0][mask[0]], getattr(without, part)[0]
            assert torch.allclose(got, wanted, rtol=0, atol=1e-12)


def test_cached_decoding_shows_what_the_full_pass_shows():
    model = tiny("llama")
    located, ids = capture.locate(model), batch("llama")["input_ids"]
    full: list = []
    with capture.watch(located, full.append, values=True):
        model(ids)
    for call in ({}, {"attention_mask": torch.ones_like(ids)}):
        steps: list = []
        with capture.watch(located, steps.append, values=True):
            past = (
                model(ids[:, :8], use_cache=True).past_key_values
                if hasattr(model(ids[:, :1]), "past_key_values")
                else None
            )
            past = model(ids[:, :8], use_cache=True)
            cache = past.get("past_key_values", past.get("cache"))
            steps.clear()
            model(ids[:, 8:], cache=cache, **call)
        for one, whole in zip(steps, full, strict=True):
            assert one.real.shape == (2, 3) and one.real.all()
            assert torch.allclose(one.following, whole.following[:, 8:], rtol=0, atol=1e-12)
            if one.values is not None:
                assert torch.allclose(one.values.o, whole.values.o[:, 8:], rtol=0, atol=1e-12)
                assert torch.allclose(one.values.v, whole.values.v[:, 8:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_repeats_is_not_counted_twice(reentrant):
    model = copy.deepcopy(tiny("llama")).train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    runs: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *call: runs.append(1))
    located, call = capture.locate(model), batch("llama")

    def step():
        model(**call, labels=call["input_ids"]).loss.backward()

    assert names(located, step) == ALL and len(runs) == 2


def test_our_own_checkpointing_is_not_counted_twice():
    model = own(gradient_checkpointing=True).train()
    ids = batch("llama")["input_ids"]
    assert names(capture.locate(model), lambda: model(ids, labels=ids).loss.backward()) == ALL


def test_compiled_models_are_watched_uncompiled():
    ids = batch("llama")["input_ids"]
    model = copy.deepcopy(tiny("llama", torch.float32))
    whole = torch.compile(model, backend="eager")
    blocks = own()
    blocks.compile_blocks(backend="eager")
    with torch.no_grad():
        whole(ids), blocks(ids)  # compiled before anything is hooked
        located = capture.locate(whole)
        assert located.model is model and names(located, lambda: whole(ids)) == ALL
        assert names(capture.locate(blocks), lambda: blocks(ids)) == ALL


def test_wrappers_that_cannot_be_watched_are_refused():
    with pytest.raises(InputError, match="DataParallel cannot be watched"):
        capture.locate(DataParallel(tiny("llama")))


def test_a_site_that_the_pass_does_not_reach_is_said(monkeypatch):
    model = copy.deepcopy(tiny("llama"))
    located = capture.locate(model)
    layer = model.model.layers[1]
    monkeypatch.setattr(layer, "forward", lambda hidden_states, **kwargs: hidden_states)
    with pytest.raises(CaptureError, match=r"layers\.1\.attention \(model\.layers\.1\) was not seen whole"):
        names(located, lambda: model(batch("llama")["input_ids"]))


def test_masks_that_do_not_say_what_is_padding_are_refused():
    model = tiny("llama")
    located, ids = capture.locate(model), batch("llama")["input_ids"]
    with pytest.raises(InputError, match=r"attention_mask must be \[b t\]"):
        names(located, lambda: model(ids, attention_mask=torch.ones(2, 1, 11, 11, dtype=torch.bool)))
    bert = tiny("bert")
    by_place = real_tokens(bert, (ids, batch("bert", "left")["attention_mask"]), {}, (2, 11), ids.device)
    assert by_place.sum() == 18


def test_weights_that_are_not_there_are_said():
    with torch.device("meta"):
        model = type(tiny("llama"))(tiny("llama").config)
    with pytest.raises(InputError, match="meta device; load them first"):
        capture.prove(capture.locate(model), batch("llama"))


def test_a_dtype_without_a_tolerance_needs_one():
    model = copy.deepcopy(tiny("llama", torch.float32))
    model.model.embed_tokens.to(torch.float8_e4m3fn)
    with pytest.raises(InputError, match="has no stated tolerance"):
        capture.prove(capture.locate(model), batch("llama"))


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "bert"])
def test_own_weights_are_the_diagonal_of_the_attention_weights(kind):
    model, events = tiny(kind), []
    with capture.watch(capture.locate(model), events.append, own_weights=True):
        model(**batch(kind, "right"))
    weights = attention_weights(model, batch(kind, "right"))
    for event, weight in zip([e for e in events if e.values], weights, strict=True):
        own = event.values.own.transpose(1, 2)[event.real]
        assert torch.allclose(
            own, weight.diagonal(dim1=-2, dim2=-1).transpose(1, 2)[event.real].to(own), rtol=0, atol=1e-6
        )
