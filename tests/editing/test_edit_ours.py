"""Edits of our own decoders: the same calls on every connection."""

import functools

import pytest
import torch
from edit_subjects import hooks, padded, words

from thalweg import capture, connections
from thalweg.editing import edit, matched_noop
from thalweg.errors import InputError
from thalweg.models import Decoder, DecoderCache, DecoderConfig, ThalwegConfig, ThalwegForCausalLM

SITES = ("value", "attention", "mlp", "block")
NAMES = tuple(connections.names())


@functools.cache
def decoder(name: str, dtype: torch.dtype = torch.float64, **options: object) -> Decoder:
    """Random weights everywhere, so that no connection stands at a start that is another one."""
    config = DecoderConfig(vocab_size=61, width=24, depth=3, heads=4, kv_heads=2, connection=name, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Decoder(config).to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def logits(model, ids, **more):
    return model(ids, **more).logits


def steps(model, ids):
    cache = DecoderCache()
    return torch.cat([logits(model, ids[:, t : t + 1], cache=cache) for t in range(ids.shape[1])], 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("site", SITES)
def test_every_connection_is_edited_alike(name, site):
    """Nothing at scales of 1, a computed no-op, cached decoding equal to the full pass, padding on both sides unseen, all restored."""
    model, ids = decoder(name), words()
    plain = logits(model, ids)
    with edit(model, site=site) as facts:
        assert not facts.active
    assert matched_noop(model, {"input_ids": ids}, site=site).worst < 1e-9
    with edit(model, site=site, parallel=0.2, perpendicular=1.3) as facts:
        assert facts.backend == "thalweg" and len(facts.layers) == 3
        edited = logits(model, ids)
        torch.testing.assert_close(steps(model, ids), edited, atol=1e-7, rtol=1e-6)
        for side in ("left", "right"):
            batch = padded(ids, side)
            mask = batch["attention_mask"]
            found = logits(model, batch["input_ids"], attention_mask=mask)[mask.bool()]
            torch.testing.assert_close(found.view_as(edited), edited, atol=1e-7, rtol=1e-6)
    assert (edited - plain).abs().max() > 1e-3
    assert torch.equal(logits(model, ids), plain)
    assert hooks(model) == 0


@pytest.mark.parametrize("name", NAMES)
def test_what_a_site_reads_is_the_reference_of_its_update(name):
    """(what is read, before its norm) . (the update that is given) = 0 after removal, at every site of every connection."""
    model = decoder(name)
    for site, kind in (("attention", "attention"), ("mlp", "feed_forward")):
        places = [place for place in capture.locate(model).sites if place.kind == kind]
        seen: list = []
        with edit(model, site=site, parallel=0.0):
            handles = [model.get_submodule(p.state.module).register_forward_pre_hook(keep(seen)) for p in places]
            handles += [model.get_submodule(p.update).register_forward_hook(keep(seen)) for p in places]
            logits(model, words())
            for handle in handles:
                handle.remove()
        assert len(seen) == 6
        for read, update in zip(seen[::2], seen[1::2], strict=True):
            assert (read * update).sum(-1).abs().max() < 1e-9 * max(1.0, float(read.norm() * update.norm()))
            assert update.norm() > 1e-3


def keep(seen: list):
    def hook(module, args, *output):
        seen.append((output or args)[0].detach())

    return hook


def test_values_are_those_of_the_explicit_matrix():
    model, ids = decoder("additive"), words()
    sublayer = model.blocks[0].sublayers[0]
    calls, outputs = [], []
    with capture.attention.attention_tap(model, calls.append):
        logits(model, ids)
    with edit(model, site="value", parallel=0.1, perpendicular=0.7, layers=[0]):
        handle = sublayer.output.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
        logits(model, ids)
        handle.remove()
    q, k, v = (x.repeat_interleave(4 // x.shape[1], 1) for x in (calls[0].query, calls[0].key, calls[0].value))
    matrix = (q @ k.mT / 6**0.5).masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf).softmax(-1)
    own = matrix.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * v
    others = matrix @ v - own
    along = (others * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True) * v
    wanted = own + 0.1 * along + 0.7 * (others - along)
    torch.testing.assert_close(outputs[0].unflatten(-1, (4, -1)), wanted.transpose(1, 2), atol=1e-9, rtol=1e-9)


def test_values_are_edited_before_the_gate():
    model, ids = decoder("additive", attention_gate="head"), words()
    calls: list = []
    with (
        edit(model, site="value", parallel=0.0, exclude_self=False),
        capture.attention.attention_tap(model, calls.append),
    ):
        logits(model, ids)
    for call in calls:
        v = call.own_values().repeat_interleave(2, 2)
        assert (call.output * v).sum(-1).abs().max() < 1e-9
    with (
        pytest.raises(InputError, match="pass a gate"),
        edit(model, site="value", exclude_self=False, route="hooks", parallel=0.0),
    ):
        pass


@pytest.mark.parametrize(("parallel", "perpendicular"), [(0.3, 0.8), (0.0, 0.0)])
def test_branches_side_by_side_are_edited_one_by_one_and_together(parallel, perpendicular):
    model, ids = decoder("additive", layers=("parallel",)), words()
    found: dict[str, list] = {"plain": [], "attention": [], "block": []}
    with capture.watch(capture.locate(model), found["plain"].append):
        logits(model, ids)
    scales = {"parallel": parallel, "perpendicular": perpendicular, "layers": [0]}
    for site in ("attention", "block"):
        with edit(model, site=site, **scales), capture.watch(capture.locate(model), found[site].append):
            logits(model, ids)
    z = found["plain"][0].state
    attention, mlp = (event.branch for event in found["plain"][:2])

    def scaled(update):
        along = ((update * z).sum(-1) / z.square().sum(-1)).unsqueeze(-1) * z
        return parallel * along + perpendicular * (update - along)

    torch.testing.assert_close(found["attention"][2].state, z + scaled(attention) + mlp, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(found["block"][2].state, z + scaled(attention + mlp), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("site", SITES)
def test_the_shell_generates_under_an_edit(site):
    torch.manual_seed(0)
    model = ThalwegForCausalLM(ThalwegConfig.of(decoder("mhc").config, pad_token_id=0)).double().eval()
    batch = padded(words(), "left")
    with edit(model, site=site, parallel=-0.5):
        done = model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=5,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        mask = torch.cat([batch["attention_mask"], torch.ones(2, 5, dtype=torch.long)], 1)
        full = logits(model, done.sequences, attention_mask=mask)
    torch.testing.assert_close(torch.stack(done.logits, 1).double(), full[:, -6:-1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"connection_options": {"update_norm": True, "norm": "layernorm", "norm_bias": True}},
        {"layers": ("attention", "moe"), "experts": 4, "active_experts": 2},
        {"windows": (3, 0)},
        {"positions": "learned", "max_length": 32},
    ],
)
def test_other_sublayers_and_norms_are_edited_too(options):
    model, ids = (
        Decoder(DecoderConfig(vocab_size=61, width=24, depth=2, heads=4, kv_heads=2, **options)).double().eval(),
        words(),
    )
    for site in SITES:
        assert matched_noop(model, {"input_ids": ids}, site=site).worst < 1e-9
        with edit(model, site=site, parallel=-2.0):
            torch.testing.assert_close(steps(model, ids), logits(model, ids), atol=1e-7, rtol=1e-6)
    seen: list = []
    with edit(model, site="mlp", parallel=0.0), capture.watch(capture.locate(model), seen.append):
        logits(model, ids)
    for event in seen[1::2]:
        assert (event.state * event.branch).sum(-1).abs().max() < 1e-9


def test_dropping_a_layer_leaves_the_stream_as_it_was():
    model, ids, seen = decoder("additive"), words(), []
    with (
        edit(model, site="block", parallel=0.0, perpendicular=0.0, layers=[1]),
        capture.watch(capture.locate(model), seen.append),
    ):
        logits(model, ids)
    torch.testing.assert_close(seen[4].state, seen[2].state, atol=0, rtol=0)


def test_an_edit_has_gradients_and_trains():
    model, ids = decoder("mhc", torch.float32), words()
    with edit(model, site="value", parallel=0.0):
        loss = model(ids, labels=ids).loss
        loss.backward()
    found = model.blocks[0].sublayers[0].value.weight.grad
    assert found is not None and found.abs().max() > 0
    model.zero_grad(set_to_none=True)
