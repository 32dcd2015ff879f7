"""Our own decoders, with every connection and every form of it: located by themselves, watched and proved."""

import functools
from dataclasses import replace

import pytest
import torch

import thalweg
from thalweg import capture, connections
from thalweg.capture.values import mismatch
from thalweg.errors import ProofError
from thalweg.models import Decoder, DecoderConfig, StreamTrace, ThalwegConfig, ThalwegForCausalLM
from thalweg.models.capture import DecoderTap

IDS = torch.randint(3, 31, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0
FORMS = [(name, form) for name in connections.names() for form in [{}, *connections.registry[name].variants()]]


def made(name, form=None, dtype=torch.float64, **more):
    """A decoder with random parameters everywhere."""
    config = DecoderConfig(
        vocab_size=31, width=16, depth=2, heads=4, kv_heads=2, connection=name, connection_options=form or {}, **more
    )
    model = Decoder(config, generator=torch.Generator().manual_seed(0)).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator).to(p))
    return model


@pytest.mark.parametrize(("name", "form"), FORMS, ids=str)
def test_every_connection_is_proved_and_says_what_a_trace_says(name, form):
    model = made(name, form)
    located = capture.locate(model)
    assert located.found_by == "own" and located.depth == 2 and len(located.sites) == 4
    assert capture.prove(located, {"input_ids": IDS, "attention_mask": MASK}).worst <= 1e-10
    events, trace = [], StreamTrace()
    with capture.watch(located, events.append, values=True):
        model(IDS, trace=trace)
    assert located.streams == model.stream.observe(trace.entered).shape[2]
    for event, record in zip(events, trace.records, strict=True):
        site = model.stream.sites[record.site.index]
        assert torch.equal(event.branch, site.update_norm(record.update))
        assert torch.equal(event.seen["given"], record.update)
        assert (event.states is None) == (located.streams == 1)
        if event.states is not None:
            assert torch.equal(event.states, model.stream.observe(record.state_before))
            assert torch.equal(event.next_states, model.stream.observe(record.state_after))
        elif isinstance(record.state_before, torch.Tensor) and record.state_before.ndim == 3:
            assert torch.equal(event.state, record.state_before) and torch.equal(event.following, record.state_after)
        assert event.state.shape == event.following.shape == (2, 9, 16)
    reads = [event.state for event in events[1:]]
    assert all(torch.equal(event.following, read) for event, read in zip(events, reads, strict=False))


@pytest.mark.parametrize("name", connections.names())
def test_float32_bfloat16_branches_side_by_side_and_experts(name):
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        proof = capture.prove(capture.locate(made(name, dtype=dtype)), IDS)
        assert proof.worst <= allowed == proof.tolerance
    for layers in (("parallel",), ("attention", "moe")):
        located = capture.locate(made(name, layers=layers))
        assert [p.kind for p in located.sites] == ["attention", "feed_forward"] * 2
        assert all(p.parallel == (layers == ("parallel",)) for p in located.sites)
        assert capture.prove(located, IDS).worst <= 1e-10


def test_a_norm_over_two_branches_makes_one_site_of_them():
    located = capture.locate(made("additive", {"update_norm": True}, layers=("parallel",)))
    assert [p.kind for p in located.sites] == ["parallel"] * 2
    assert located.sites[0].update == "stream.sites.0.update_norm"
    assert capture.prove(located, IDS).worst <= 1e-10


def test_sites_of_one_kind_in_a_layer_are_told_apart():
    located = capture.locate(made("mhc", layers=("attention", "attention", "feed_forward")))
    assert [p.name for p in located.sites[:3]] == [
        "layers.0.attention",
        "layers.0.attention.2",
        "layers.0.feed_forward",
    ]


def test_the_hugging_face_shell_is_located_too():
    model = ThalwegForCausalLM(ThalwegConfig(vocab_size=31, width=16, depth=2, heads=4, connection="mhc")).double()
    located = capture.locate(model)
    assert located.head == "decoder.head" and capture.prove(located, IDS).end == "logits"


def test_a_soft_cap_is_part_of_the_end():
    located = capture.locate(made("additive", logit_softcap=2.0))
    assert capture.prove(located, IDS).logits <= 1e-10
    with pytest.raises(ProofError, match="fails at the logits"):
        capture.prove(replace(located, logit_softcap=None), IDS)


def test_the_values_of_our_attention_are_those():
    """A by hand: query, key and rotation of the sublayer itself, softmax in float64."""
    model = made("additive", head_size=6, positions="learned")
    located, values, inputs = capture.locate(model), [], []
    attention = model.blocks[0].sublayers[0]
    handle = attention.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    with capture.watch(located, lambda e: values.append(e.values), values=True):
        model(IDS)
    handle.remove()
    q, k = attention.split(attention.query(inputs[0])), attention.split(attention.key(inputs[0]))
    scores = q @ k.repeat_interleave(2, 1).mT / 6**0.5
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    real = torch.ones(2, 9, dtype=torch.bool)
    assert values[0].v.shape == (2, 9, 2, 6)
    assert mismatch(values[0].o, values[0].v, weights.detach(), real) <= 1e-10


@pytest.mark.parametrize("name", ["additive", "mhc", "post_norm"])
@pytest.mark.parametrize("more", [{}, {"windows": (3, 0)}, {"qk_norm": True}, {"positions": "learned"}], ids=str)
@pytest.mark.parametrize("batch", [IDS, {"input_ids": IDS, "attention_mask": MASK}], ids=["whole", "padded"])
def test_heads_are_proved_by_the_weights_of_the_tap(name, more, batch):
    """Fails for ungrouped or repeated values, a wrong scale, a mask that is left out, a window that is forgotten."""
    model = made(name, **more)
    located = capture.locate(model)
    errors = capture.prove_values(located, batch)
    assert list(errors) == ["layers.0.attention", "layers.1.attention"] and max(errors.values()) <= 1e-10
    shell = ThalwegForCausalLM(ThalwegConfig.of(model.config)).double()
    shell.decoder.load_state_dict(model.state_dict())
    assert max(capture.prove_values(capture.locate(shell), batch).values()) <= 1e-10
    assert all(sublayer.value_edit is None for sublayer in model.sublayers if hasattr(sublayer, "value_edit"))
    wrong = tuple(
        replace(p, heads=replace(p.heads, value=p.heads.value.replace("value", "key")))
        if p.heads and p.layer == 1
        else p
        for p in located.sites
    )
    with pytest.raises(ProofError, match=r"fail at layers\.1\.attention"):
        capture.prove_values(replace(located, sites=wrong), batch)


def test_measuring_heads_of_a_model_of_ours_proves_them_first():
    rows = thalweg.measure(made("additive"), [IDS[0].tolist()], length=9, values=True)
    (proof,) = rows.where(measure="capture_error.values")
    assert proof.value <= proof.null == 1e-10 and "attention weights times values" in proof.null_kind


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"attention_gate": "head"}, "pass a gate"),
        ({}, "pass a norm"),
        ({"attention_edit": {"space": "value", "parallel": 0.5}}, "pass a scaling"),
    ],
)
def test_heads_that_are_changed_before_the_output_map_are_not_shown(more, why):
    place = capture.locate(made("sub_ln" if not more else "additive", **more)).sites[0]
    assert place.heads is None and why in place.no_heads


@pytest.mark.parametrize(
    "name", ["mhc", "hyper_connections", "mhc_delta", "delta", "denseformer", "attention_residuals"]
)
def test_a_write_that_is_not_the_models_is_refused(name):
    form = {"value_channels": 3} if name == "delta" else {}

    class Wrong(DecoderTap):
        def write(self, events):
            seen = {**events[0].seen, "given": 1.01 * events[0].seen["given"].roll(1, -1)}
            return super().write([replace(events[0], seen=seen)])

    model = made(name, form)
    wrong = replace(capture.locate(model), tap=functools.partial(Wrong, decoder=model))
    with pytest.raises(ProofError, match=r"fails at layers\.0\.attention \(blocks\.0\)"):
        capture.prove(wrong, IDS)
