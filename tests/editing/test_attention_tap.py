"""The attention tap: the same function as without it, masks included; always restored; A_tt as the matrix has it."""

import threading

import pytest
import torch
from edit_subjects import MODELS, logits, padded, tiny, words
from torch import nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from thalweg.capture import attention
from thalweg.capture.attention import attention_tap, backend_of
from thalweg.errors import CaptureError, InputError
from thalweg.models import Decoder, DecoderConfig

NO_SDPA = ("gemma2", "gpt_oss")
CASES = [
    (kind, backend) for kind in MODELS for backend in ("eager", "sdpa") if backend == "eager" or kind not in NO_SDPA
]


def batch_of(kind: str, side: str) -> tuple[torch.Tensor, dict]:
    """Ids and the other arguments of a padded batch."""
    batch = padded(words(), side)
    if kind == "bert":
        batch.pop("position_ids")
    return batch.pop("input_ids"), batch


def registered() -> tuple[set[str], set[str]]:
    return set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)


@pytest.fixture(autouse=True)
def unproven():
    """The start-up check is remembered by model; forget it, so that every test sees it."""
    attention._proven.clear()


@pytest.mark.parametrize(("kind", "backend"), CASES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_looking_changes_nothing_and_leaves_nothing(kind, backend, side):
    model, calls, before = tiny(kind, backend), [], registered()
    ids, more = batch_of(kind, side)
    plain = logits(model, ids, **more)
    with attention_tap(model, calls.append) as name:
        assert name == backend == backend_of(model)
        assert torch.equal(logits(model, ids, **more), plain)
    assert len(calls) == 3  # one per layer: the start-up check is not heard
    assert registered() == before
    assert model.config._attn_implementation == backend


@pytest.mark.parametrize(("kind", "backend"), CASES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_own_weights_are_the_diagonal_of_the_matrix(kind, backend, side):
    """The oracle is the eager function's own matrix, through every softcap, sink, window and padding."""
    ids, more = batch_of(kind, side)
    with torch.no_grad():
        matrices = tiny(kind, "eager")(input_ids=ids, output_attentions=True, **more).attentions
    owns: list[torch.Tensor] = []
    with attention_tap(tiny(kind, backend), lambda call: owns.append(call.own())):
        logits(tiny(kind, backend), ids, **more)
    real = more["attention_mask"].bool()[:, None]
    assert len(owns) == len(matrices) == 3
    for own, matrix in zip(owns, matrices, strict=True):
        wanted = matrix.diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(own * real, wanted * real, atol=2e-6, rtol=0)
        assert float((own * ~real).abs().max()) == 0
        assert float(own.max()) > 0.05


def test_an_output_that_is_returned_takes_the_place():
    model, ids = tiny("llama"), words()
    with attention_tap(model, lambda call: torch.zeros_like(call.output)):
        silent = logits(model, ids)
    handles = [
        layer.self_attn.o_proj.register_forward_hook(lambda *_: torch.zeros(2, 9, 24)) for layer in model.model.layers
    ]
    wanted = logits(model, ids)
    for handle in handles:
        handle.remove()
    assert torch.equal(silent, wanted)
    assert not torch.equal(silent, logits(model, ids))


def test_taps_nest_and_the_inner_one_sees_what_the_outer_one_returned():
    model, ids, seen = tiny("llama", "eager"), words(), []
    with attention_tap(model, lambda call: call.output * 2) as outer:
        with attention_tap(model, lambda call: seen.append(call.output)) as inner:
            twice = logits(model, ids)
        assert torch.equal(logits(model, ids), twice)
    assert outer == inner == "eager"
    first: list[torch.Tensor] = []
    with attention_tap(model, lambda call: first.append(call.output)):
        logits(model, ids)
    assert torch.equal(seen[0], 2 * first[0])


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_lost_mask_function_is_caught(kind, monkeypatch):
    """The silent-mask trap: without its second registration the model sees padding and future, and says nothing."""
    model, before = tiny(kind), registered()
    monkeypatch.setattr(AttentionMaskInterface, "register", classmethod(lambda *_: None))
    ids, more = batch_of(kind, "left")
    plain = logits(model, ids, **more)
    with pytest.raises(CaptureError, match=r"padded batch by .* as when a mask is lost"), attention_tap(model, print):
        pytest.fail("a model without its mask was tapped")
    monkeypatch.undo()
    assert registered() == before
    assert torch.equal(logits(model, ids, **more), plain)
    with attention_tap(model, lambda call: None, check=False):
        assert torch.equal(logits(model, ids, **more), plain)


def test_the_start_up_check_runs_once_for_a_model_and_leaves_its_mode(monkeypatch):
    model, passes = tiny("llama"), []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    model.train()
    for _ in range(2):
        with attention_tap(model, lambda call: None):
            assert model.training and model.model.layers[0].training
    handle.remove()
    model.eval()
    assert len(passes) == 4  # two sides, with and without


def test_everything_is_back_after_an_exception():
    model, before = tiny("llama"), registered()
    with pytest.raises(RuntimeError, match="of ours"), attention_tap(model, lambda call: None):
        raise RuntimeError("of ours")

    def fail(call):
        raise ValueError("in the call")

    with pytest.raises(ValueError, match="in the call"), attention_tap(model, fail):
        logits(model, words())
    assert registered() == before
    assert model.config._attn_implementation == "sdpa"


def test_taps_left_in_another_order_than_entered():
    model = tiny("llama", "sdpa")
    before, heard, names = logits(model, words()), [], registered()
    first, second = (attention_tap(model, lambda call, n=n: heard.append(n)) for n in (1, 2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(logits(model, words()), before) and set(heard) == {2} and backend_of(model) == "sdpa"
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa" and torch.equal(logits(model, words()), before)
    assert not attention._wrapped and registered() == names


def test_threads_that_tap_one_model_leave_it_as_it_was():
    model = tiny("llama", "sdpa")
    before, failed = logits(model, words()), []

    def work():
        try:
            for _ in range(5):
                with attention_tap(model, lambda call: None):
                    logits(model, words())
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and model.config._attn_implementation == "sdpa" and torch.equal(logits(model, words()), before)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_own_key_of_a_token_is_found_in_every_cache(kind, cache):
    """The full pass is the oracle: what a token reads of itself does not depend on how the tokens before it are kept."""
    model = tiny(kind)
    batch = padded(words(), "left")
    with torch.no_grad():
        done = model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 5, dtype=torch.long)], 1)
    full: list[torch.Tensor] = []
    with attention_tap(model, lambda call: full.append(torch.cat([call.own()[..., None], own_size(call)], -1))):
        logits(model, done, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    stepwise: list[torch.Tensor] = []
    with (
        attention_tap(model, lambda call: stepwise.append(torch.cat([call.own()[..., None], own_size(call)], -1))),
        torch.no_grad(),
    ):
        again = model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            cache_implementation=cache,
            disable_compile=True,
        )
    assert torch.equal(done, again)
    for layer in range(3):
        found = torch.cat(stepwise[layer::3], 2)
        real = mask[:, : found.shape[2]].bool()[:, None, :, None]
        torch.testing.assert_close(found * real, (full[layer][:, :, : found.shape[2]]) * real, atol=2e-6, rtol=1e-5)


def own_size(call) -> torch.Tensor:
    """[b h q 1] norm of the own value of every query head: tells values apart as A_tt does keys."""
    values = call.own_values().norm(dim=-1).transpose(1, 2)  # [b kv q]
    return values.repeat_interleave(call.query.shape[1] // values.shape[1], 1).unsqueeze(-1)


@pytest.mark.parametrize(("kind", "backend"), CASES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_without_own_is_the_matrix_with_its_diagonal_removed_and_renormalised(kind, backend, side):
    ids, more = batch_of(kind, side)
    with torch.no_grad():
        matrix = tiny(kind, "eager")(input_ids=ids, output_attentions=True, **more).attentions[0].double()
    found: list[tuple] = []
    with attention_tap(tiny(kind, backend), lambda call: found.append((call.without_own(), call.value, call.sinks))):
        logits(tiny(kind, backend), ids, **more)
    output, value, sinks = found[0]
    value = value.repeat_interleave(4 // value.shape[1], 1).double()
    for b, h, t in torch.ones(matrix.shape[:3]).nonzero().tolist():
        if not more["attention_mask"][b, t]:
            continue
        row = matrix[b, h, t].clone()
        own = row[t].item()
        row[t] = 0
        if float(row.sum()) < 1e-12:
            row[t] = own  # nobody else is seen
        elif sinks is None:
            row = row / row.sum()
        else:
            row = row / (1 - own)  # the sink keeps its share
        torch.testing.assert_close(output[b, t, h].double(), row @ value[b, h], atol=2e-5, rtol=1e-4)


def test_sub_configurations_and_other_backends_inside_a_model_come_back():
    model = tiny("llama")
    inner = GPT2Like(tiny("gpt2", "eager"))
    model.add_module("beside", inner)
    try:
        with attention_tap(model, lambda call: None):
            assert inner.kept.config._attn_implementation == "eager"
        assert inner.kept.config._attn_implementation == "eager"
        assert model.config._attn_implementation == "sdpa"
    finally:
        del model.beside


class GPT2Like(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.kept = kept


def test_what_cannot_be_tapped_is_refused_in_one_line(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    with (
        pytest.raises(InputError, match="'flash_attention_2' keeps its weights to itself"),
        attention_tap(model, print),
    ):
        pass
    monkeypatch.undo()
    with pytest.raises(InputError, match="Linear is no model"), attention_tap(nn.Linear(2, 2), print):
        pass
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(InputError, match="does not take its attention"), attention_tap(model, print):
        pass


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_compiled_model_is_refused_whole_or_in_part():
    model = Decoder(DecoderConfig(vocab_size=61, width=24, depth=2, heads=4))
    with (
        pytest.raises(InputError, match=r"compiled \(it\).*before torch\.compile"),
        attention_tap(torch.compile(model), print),
    ):
        pass
    model.compile_blocks()
    with pytest.raises(InputError, match=r"compiled \(its module 'blocks\.0'\)"), attention_tap(model, print):
        pass


def test_dropout_makes_own_weights_random_and_is_refused():
    model, ids = tiny("llama"), words()
    rates = [layer.self_attn.attention_dropout for layer in model.model.layers]
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    try:
        with (
            pytest.raises(InputError, match=r"dropout is on.*model\.eval"),
            attention_tap(model, lambda call: call.own() and None),
        ):
            logits(model, ids)
    finally:
        model.eval()
        for layer, rate in zip(model.model.layers, rates, strict=True):
            layer.self_attn.attention_dropout = rate


def test_a_model_of_ours_is_tapped_through_its_slot():
    model = Decoder(DecoderConfig(vocab_size=61, width=24, depth=2, heads=4, kv_heads=2)).eval()
    ids, calls = words(), []
    with torch.no_grad():
        plain = model(ids).logits
        with attention_tap(model, calls.append) as backend:
            assert torch.equal(model(ids).logits, plain)
        assert backend == "thalweg"
        assert len(calls) == 2
        with attention_tap(model, lambda call: call.output * 0):
            assert not torch.equal(model(ids).logits, plain)
        assert torch.equal(model(ids).logits, plain)
    q, k = calls[0].query, calls[0].key.repeat_interleave(2, 1)
    scores = (q @ k.mT * 6**-0.5).masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf)
    torch.testing.assert_close(calls[0].own(), scores.softmax(-1).diagonal(dim1=-2, dim2=-1))
    assert all(block.sublayers[0].value_edit is None for block in model.blocks)
