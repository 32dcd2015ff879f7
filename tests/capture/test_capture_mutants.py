"""Wrong maps: each of the field's slips is refused by the proof, naming the first block that fails."""

from dataclasses import replace

import pytest
import torch
from tiny_families import FAMILIES, batch, tiny

from thalweg import capture
from thalweg.capture import Heads, Located, Point
from thalweg.capture.values import attention_weights, mismatch
from thalweg.capture.watching import HookTap
from thalweg.errors import ExitCode, ProofError, ShapeError


def changed(located: Located, change, where=lambda place: True) -> Located:
    return replace(located, sites=tuple(change(p) if where(p) else p for p in located.sites))


def refused(located: Located, kind: str, at: str) -> str:
    with pytest.raises(ProofError) as error:
        capture.prove(located, batch(kind, "right"))
    assert error.value.exit_code == ExitCode.CAPTURE == 5
    line = str(error.value)
    assert f"fails at {at}" in line and "\n" not in line
    return line


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "olmo2", "olmo3"])
def test_the_output_of_the_sublayer_in_place_of_its_post_norm(kind):
    wrong = changed(capture.locate(tiny(kind)), lambda p: replace(p, update=p.sublayer))
    assert "model.layers.0.self_attn" in refused(wrong, kind, "layers.0.attention (model.layers.0)")


@pytest.mark.parametrize("kind", ["gpt_neox", "phi", "cohere"])
def test_a_parallel_block_taken_as_sequential(kind):
    located = capture.locate(tiny(kind))

    def change(place):
        other = located.sites[place.index + 1] if place.kind == "attention" else None
        following = place.following if other is None else Point(other.sublayer, "input")
        return replace(place, parallel=False, following=following)

    refused(changed(located, change), kind, "layers.0.attention")
    one_by_one = changed(located, lambda p: replace(p, parallel=False))
    refused(one_by_one, kind, "layers.0.attention")


def test_a_sequential_block_taken_as_parallel():
    located = capture.locate(tiny("llama"))
    wrong = changed(located, lambda p: replace(p, parallel=True, following=Point(p.block, "output")))
    assert "begins with another state" in refused(wrong, "llama", "layers.0.feed_forward")


def test_a_multiplier_dropped():
    wrong = changed(capture.locate(tiny("granite")), lambda p: replace(p, multiplier=1.0))
    refused(wrong, "granite", "layers.0.attention")


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_reference_off_by_one_block(kind):
    located = capture.locate(tiny(kind))
    first = {p.kind: p for p in located.sites if p.layer == 0}

    def change(place):
        return replace(place, state=first[place.kind].state)

    refused(changed(located, change, lambda p: p.layer == 1), kind, "layers.1.attention")


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_a_post_norm_dropped(kind):
    refused(changed(capture.locate(tiny(kind)), lambda p: replace(p, norm_after=None)), kind, "layers.0.attention")


def test_a_site_left_out():
    located = capture.locate(tiny("llama"))
    fewer = tuple(replace(p, index=i) for i, p in enumerate(p for p in located.sites if p.kind == "attention"))
    refused(replace(located, sites=fewer), "llama", "layers.1.attention")


def test_streams_mixed_by_the_transpose_or_written_with_the_weights_of_another_site():
    located = capture.locate(tiny("deepseek_v4"))
    other = located.sites[1].mixing
    assert other is not None
    swapped = changed(
        located, lambda p: replace(p, mixing=p.mixing and (p.mixing[0], other[1])), lambda p: p.index == 2
    )
    refused(swapped, "deepseek_v4", "layers.1.attention")

    class Transposed(HookTap):
        def write(self, events):
            seen = {**events[0].seen, "mix": events[0].seen["mix"].mT}
            return super().write([replace(events[0], seen=seen)])

    refused(replace(located, tap=Transposed), "deepseek_v4", "layers.0.attention")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("granite", {"logit_scale": 1.0}),
        ("cohere", {"logit_scale": 1.0}),
        ("gemma2", {"logit_softcap": None}),
        ("llama", {"final_norm": None}),
        ("deepseek_v4", {"final_norm": None}),
        ("modernbert", {"final_norm": None}),
    ],
)
def test_an_end_that_does_not_follow(kind, change):
    refused(replace(capture.locate(tiny(kind)), **change), kind, "the l")


def test_a_small_update_is_seen_beside_a_large_state():
    """An update of a millionth of the state cannot hide a wrong map: the error is held against the step too."""
    model = tiny("gemma3_text")
    norms = [m for name, m in model.named_modules() if name.endswith("attention_layernorm")]
    with torch.no_grad():
        for norm in norms:
            norm.weight.sub_(0.999999).mul_(1e-9)
    try:
        wrong = changed(capture.locate(model), lambda p: replace(p, multiplier=2.0), lambda p: p.kind == "attention")
        with pytest.raises(ProofError, match=r"fails at layers\.0\.attention"):
            capture.prove(wrong, batch("gemma3_text"), tolerance=1e-6)
    finally:
        tiny.cache_clear()


# heads


def elementwise(v, group):
    """The slip of a published code base: elements repeated in place of heads."""
    flat = v.flatten(2).repeat_interleave(group, -1)
    return flat.unflatten(-1, (v.shape[2] * group, v.shape[3]))


def test_elements_repeated_in_place_of_heads_are_not_the_values():
    model = tiny("llama")
    located = capture.locate(model)
    kept = []
    with capture.watch(located, lambda e: kept.append((e.values, e.real)), values=True):
        weights = attention_weights(model, batch("llama"))
    values, real = kept[0]
    assert mismatch(values.o, values.v, weights[0], real) <= 1e-10
    assert mismatch(values.o, values.v.repeat_interleave(2, 2), weights[0], real) <= 1e-10  # heads repeated: the same
    assert mismatch(values.o, elementwise(values.v, 2), weights[0], real) > 0.1
    assert mismatch(values.o, values.v.repeat(1, 1, 2, 1), weights[0], real) > 0.1  # heads in turn


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gpt_neox", {"part": "last"}),
        ("gpt2", {"part": "tail"}),
        ("phi3", {"part": "tail"}),
        ("llama", {"value": "model.layers.0.self_attn.k_proj"}),
        ("llama", {"key_value": 1, "part": "last"}),
        ("modernbert", {"part": "tail"}),
    ],
)
def test_values_cut_wrongly_are_refused(kind, change):
    def change_heads(place):
        return replace(place, heads=replace(place.heads, **change))

    wrong = changed(capture.locate(tiny(kind)), change_heads, lambda p: p.index == 0)
    with pytest.raises(ProofError, match=r"the heads of .* fail at layers\.0\.attention"):
        capture.prove_values(wrong, batch(kind))


def test_channels_that_do_not_divide_are_refused():
    heads = Heads(4, 2, 8, "value", "output")
    for part, channels in (("whole", 24), ("last", 8), ("tail", 17)):
        with pytest.raises(ShapeError, match=f"value gives {channels} channels"):
            replace(heads, part=part).values(torch.zeros(1, 2, channels))
    with pytest.raises(ShapeError, match="output takes 30 channels"):
        heads.outputs(torch.zeros(1, 2, 30))
