"""Edits of anybody's model: against explicit attention matrices and loops, in every cache, padding and backend."""

import pytest
import torch
from edit_subjects import DECODERS, MODELS, captured, hooks, logits, padded, tiny, words

from thalweg.editing import edit, matched_noop

EDITS = {
    "value": {"site": "value", "parallel": 0.3, "perpendicular": 1.2},
    "value, full": {"site": "value", "parallel": 0.0, "exclude_self": False},
    "value, full, hooks": {"site": "value", "parallel": 0.0, "exclude_self": False, "route": "hooks"},
    "value, jointly": {"site": "value", "parallel": -1.0, "group": "kv"},
    "value, one head": {"site": "value", "parallel": 0.0, "heads": [1], "layers": "1:"},
    "attention": {"site": "attention", "parallel": 0.0},
    "mlp": {"site": "mlp", "parallel": 0.5, "perpendicular": 0.7},
    "mlp, block input": {"site": "mlp", "parallel": 0.0, "reference": "block_input"},
    "block": {"site": "block", "parallel": 0.2, "perpendicular": 1.1},
    "drop": {"site": "block", "parallel": 0.0, "perpendicular": 0.0, "layers": "last"},
    "diagonal": {"control": "diagonal"},
    "random": {"site": "value", "control": "random", "seed": 4},
    "direction": {"site": "attention", "control": "random_direction", "parallel": 0.0, "seed": 4},
    "value direction": {"site": "value", "control": "random_direction", "parallel": 0.0, "seed": 4},
    "mean": {"site": "attention", "coefficient": "layer_mean"},
    "other": {"site": "value", "coefficient": "other_token", "seed": 2},
}


def options_of(name: str) -> dict:
    """Keywords of an edit, with something to calibrate on where it needs that."""
    found = dict(EDITS[name])
    if "coefficient" in found:
        found["calibration"] = {"input_ids": words(seed=5)}
    return found


def steps(model, ids, *, cache=None, **more):
    """Logits of every token, one forward pass per token."""
    from transformers import DynamicCache

    kept, found = cache or DynamicCache(config=model.config), []
    for t in range(ids.shape[1]):
        given = {
            name: value[:, : t + 1] if name == "attention_mask" else value[:, t : t + 1] for name, value in more.items()
        }
        with torch.no_grad():
            found.append(model(input_ids=ids[:, t : t + 1], cache=kept, use_cache=True, **given).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("site", ["value", "attention", "mlp", "block"])
def test_scales_of_one_touch_nothing_and_the_matched_no_op_computes_it(kind, site):
    model = tiny(kind, "eager")
    ids = words()
    plain, before = logits(model, ids), hooks(model)
    with edit(model, site=site) as facts:
        assert not facts.active
        assert torch.equal(logits(model, ids), plain)
        assert hooks(model) == before
    with edit(model, site=site, forced=True) as facts:
        assert facts.active
        torch.testing.assert_close(logits(model, ids), plain, atol=1e-5, rtol=1e-5)
        assert hooks(model) > before
    drift = matched_noop(model, {"input_ids": ids}, site=site)
    assert drift.worst < 1e-6 and drift.tokens == 18


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("name", EDITS)
def test_decoding_with_a_cache_equals_the_full_pass(kind, name):
    model, ids = tiny(kind, "eager"), words()
    with edit(model, **options_of(name)):
        full, stepwise = logits(model, ids), steps(model, ids)
    torch.testing.assert_close(stepwise, full, atol=2e-4, rtol=1e-3)
    assert (full - logits(model, ids)).abs().max() > 1e-3  # the edit did something


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_moves_nobody(kind, name, side):
    model, ids, batch = tiny(kind, "eager"), words(), padded(words(), side)
    mask = batch["attention_mask"].bool()
    with edit(model, **options_of(name)):
        alone, together = logits(model, ids), logits(model, **{"ids": batch.pop("input_ids"), **batch})
    torch.testing.assert_close(together[mask].view_as(alone), alone, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("name", [n for n in EDITS if not n.startswith("direction")])
def test_both_backends_give_the_same_edit(kind, name):
    batch = {
        "input_ids": padded(words(), "left")["input_ids"],
        "attention_mask": padded(words(), "left")["attention_mask"],
    }
    mask = batch["attention_mask"].bool()
    found = []
    for backend in ("eager", "sdpa"):
        with edit(tiny(kind, backend), **options_of(name)) as facts:
            found.append(logits(tiny(kind, backend), batch["input_ids"], attention_mask=batch["attention_mask"])[mask])
            assert facts.backend == backend
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)


# Composition, restoration, dtypes, generation.


def test_nested_edits_multiply_and_several_sites_hold_at_once():
    model, ids = tiny("llama", "eager", torch.float64), words()
    for site in ("value", "attention", "mlp", "block"):
        with (
            edit(model, site=site, parallel=0.5, perpendicular=1.2),
            edit(model, site=site, parallel=-0.6, perpendicular=0.5),
        ):
            nested = logits(model, ids)
        with edit(model, site=site, parallel=-0.3, perpendicular=0.6):
            torch.testing.assert_close(nested, logits(model, ids), atol=1e-6, rtol=1e-6)
    sites = ("value", "attention", "mlp")
    orders = []
    for order in (sites, sites[::-1]):
        with (
            edit(model, site=order[0], parallel=0.0),
            edit(model, site=order[1], parallel=0.2),
            edit(model, site=order[2], parallel=0.4),
        ):
            orders.append(logits(model, ids))
    assert (orders[0] - orders[1]).abs().max() > 1e-3  # the scales went to other sites
    with (
        edit(model, site="mlp", parallel=0.4),
        edit(model, site="value", parallel=0.0),
        edit(model, site="attention", parallel=0.2),
    ):
        torch.testing.assert_close(logits(model, ids), orders[0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", EDITS)
def test_everything_is_restored_after_an_exception(name):
    model, ids = tiny("llama"), words()
    plain, before = logits(model, ids), hooks(model)
    with pytest.raises(RuntimeError, match="ours"), edit(model, **options_of(name)):
        logits(model, ids)
        raise RuntimeError("ours")
    assert hooks(model) == before
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("name", ["value", "value, full", "attention", "mlp", "block", "diagonal"])
def test_half_precision_keeps_its_dtype_and_computes_wide(name):
    model, ids = tiny("llama", "sdpa", torch.bfloat16), words()
    with edit(model, **options_of(name)) as facts:
        edited = logits(model, ids)
    assert edited.dtype == torch.bfloat16 and facts.dtype == "bfloat16"
    with edit(tiny("llama"), **options_of(name)):
        wanted = logits(tiny("llama"), ids)
    assert (edited.float() - wanted).abs().max() < 0.05 * wanted.abs().max()


@pytest.mark.parametrize("name", ["value", "value, full", "mlp", "block"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_under_left_padding_equals_the_full_pass(name, cache):
    model, batch = tiny("llama"), padded(words(), "left")
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    more = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    with edit(model, **options_of(name)):
        done = model.generate(
            **given,
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **more,
        )
        mask = torch.cat([batch["attention_mask"], torch.ones(2, 6, dtype=torch.long)], 1)
        full = logits(model, done.sequences, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    torch.testing.assert_close(torch.stack(done.logits, 1), full[:, -7:-1], atol=2e-4, rtol=1e-3)


def test_phases_split_the_tokens_between_them():
    model, ids = tiny("llama", "eager"), words()
    plain = logits(model, ids)
    with edit(model, site="attention", parallel=0.0, phase="decode"):
        assert torch.equal(logits(model, ids), plain)  # a full pass is prefill
        decoded = steps(model, ids)
    assert torch.allclose(decoded[:, 0], plain[:, 0], atol=1e-5)
    assert (decoded[:, 1:] - plain[:, 1:]).abs().max() > 1e-2
    with edit(model, site="attention", parallel=0.0, phase="prefill"):
        full = logits(model, ids)
        first = steps(model, ids)
    assert (full - plain).abs().max() > 1e-2
    torch.testing.assert_close(first[:, 0], full[:, 0], atol=1e-5, rtol=1e-4)


def test_heads_and_layers_choose():
    model, ids = tiny("llama", "eager", torch.float64), words()
    plain, all_heads = captured(model, ids, site="value"), captured(model, ids, site="value", parallel=0.0)
    one = captured(model, ids, site="value", parallel=0.0, heads=[2])
    assert torch.equal(one[:, :, [0, 1, 3]], plain[:, :, [0, 1, 3]])
    assert torch.equal(one[:, :, 2], all_heads[:, :, 2])
    with edit(model, site="value", parallel=0.0, skip_first=1) as facts:
        assert facts.layers == (1, 2) and facts.sites == ("layers.1.attention", "layers.2.attention")
    with edit(model, site="mlp", parallel={1: 0.0}) as facts:
        by_layer = logits(model, ids)
        assert facts.scales == {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (1.0, 1.0)}
    with edit(model, site="mlp", parallel=0.0, layers=[1]):
        assert torch.equal(logits(model, ids), by_layer)


@pytest.mark.parametrize("name", ["value", "attention", "block"])
def test_gradients_pass_an_edit_with_recomputation_too(name):
    """The backward pass runs the layers again, inside the block: the edit is found there as it was."""
    model, ids, found = tiny("llama", "sdpa", torch.float64), words(), []
    model.train()
    for recompute in (False, True):
        if recompute:
            model.activation_checkpointing_enable()
        with edit(model, **options_of(name)):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad(set_to_none=True)
    model.activation_checkpointing_disable()
    model.eval()
    assert len(found[0]) == len(found[1]) > 10
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(again, plain, atol=1e-10, rtol=1e-8)
