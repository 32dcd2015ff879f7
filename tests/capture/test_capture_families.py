"""Every family of the table: located, proved at every site and at the end, in every precision; its values proved with its own weights."""

import pytest
import torch
from tiny_families import FAMILIES, batch, tiny

from thalweg import capture
from thalweg.capture import families
from thalweg.capture.proof import TOLERANCE

WITHOUT_HEADS = {"deepseek_v3", "deepseek_v4", "qwen3_next"}
# transformers' eager attention takes its softmax in float32, where the mask of float64 is infinite: a row that sees nothing is NaN
NOT_LEFT = {"gemma2"}


def test_the_tiny_models_cover_the_table():
    assert set(FAMILIES) == set(families.registry.names())


@pytest.mark.parametrize("kind", FAMILIES)
def test_float64_proves_every_site_and_the_end(kind):
    located = capture.locate(tiny(kind))
    assert (located.family, located.found_by, located.depth, located.width) == (kind, "family", 2, 32)
    side = "right" if kind in NOT_LEFT else "left"
    proof = capture.prove(located, batch(kind, side))
    assert proof.worst <= 1e-10 and proof.tolerance == 1e-10 and proof.dtype == "float64"
    assert proof.tokens == 18  # four of the 22 are padding
    assert list(proof.sites) == [place.name for place in located.sites] and len(proof.sites) == 4
    assert proof.end == ("logits" if located.causal else "last_hidden_state")


@pytest.mark.parametrize("kind", FAMILIES)
def test_float32_and_bfloat16_stay_within_what_is_stated(kind):
    for dtype, measured in ((torch.float32, 5e-7), (torch.bfloat16, 8e-3)):
        model = tiny(kind, dtype)
        for side in ("left", "right"):
            proof = capture.prove(capture.locate(model), batch(kind, side))
            assert proof.worst <= measured < proof.tolerance == TOLERANCE[dtype]


@pytest.mark.parametrize("kind", FAMILIES)
def test_values_weighted_by_the_models_own_attention_are_what_leaves_the_heads(kind):
    model = tiny(kind)
    located, backend = capture.locate(model), model.config._attn_implementation
    assert all((place.heads is None) == (kind in WITHOUT_HEADS) for place in located.attention)
    assert all(bool(place.no_heads) == (kind in WITHOUT_HEADS) for place in located.attention)
    errors = capture.prove_values(located, batch(kind, "right"))
    assert set(errors) == {place.name for place in located.attention if place.heads}
    assert all(error <= 1e-10 for error in errors.values())
    assert model.config._attn_implementation == backend


def test_a_model_without_an_unembedding_ends_at_its_hidden_state():
    for kind in ("llama", "gpt2", "deepseek_v4"):
        located = capture.locate(tiny(kind).base_model)
        assert located.head is None and located.base == ""
        assert capture.prove(located, batch(kind)["input_ids"]).end == "last_hidden_state"


def test_sizes_of_heads_come_from_the_config():
    llama, bert = (capture.locate(tiny(kind)).attention[0].heads for kind in ("qwen3", "bert"))
    assert llama is not None and bert is not None
    assert (llama.query, llama.key_value, llama.width, llama.group) == (4, 2, 10, 2)
    assert (bert.query, bert.key_value, bert.width) == (4, 4, 8)
    o = torch.randn(2, 3, 40)
    assert torch.equal(llama.flat(llama.outputs(o)), o) and llama.outputs(o).shape == (2, 3, 4, 10)


def test_what_is_special_about_a_family_is_said():
    granite, gemma, v4, phi = (capture.locate(tiny(kind)) for kind in ("granite", "gemma2", "deepseek_v4", "phi"))
    assert {place.multiplier for place in granite.sites} == {0.3} and granite.logit_scale == pytest.approx(1 / 5)
    assert gemma.sites[0].update.endswith("post_attention_layernorm") and gemma.logit_softcap == 3.0
    assert v4.streams == 3 and v4.contract == "model.hc_head"
    assert all(place.parallel for place in phi.sites) and phi.sites[0].state == phi.sites[1].state
