"""A map of one's own, as a dict or a TOML file; what it names wrongly is said by name."""

import pytest
from tiny_families import batch, tiny

from thalweg import capture
from thalweg.errors import InputError, ProofError, UnknownNameError

MAP = """
blocks = "model.layers"
final_norm = "model.norm"
head = "lm_head"
base = "model"

[[sites]]
kind = "attention"
reads = "input_layernorm"
sublayer = "self_attn"
heads = { value = "self_attn.v_proj", output = "self_attn.o_proj" }

[[sites]]
kind = "feed_forward"
reads = "post_attention_layernorm"
sublayer = "mlp"
inner = { last = "mlp.down_proj" }
"""
SITE = {"kind": "attention", "reads": "input_layernorm", "sublayer": "self_attn"}


def test_a_file_is_what_the_table_says(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MAP)
    table, mine = capture.locate(tiny("llama")), capture.locate(tiny("llama"), path)
    assert mine.found_by == "map" and mine.sites == table.sites
    assert capture.prove(mine, batch("llama")).worst <= 1e-10
    assert capture.locate(tiny("llama"), str(path)).sites == table.sites


@pytest.mark.parametrize(
    ("change", "error", "line"),
    [
        ({"block": "x"}, UnknownNameError, "unknown key 'map.block'. Did you mean 'map.blocks'"),
        (
            {"blocks": "model.layer"},
            UnknownNameError,
            "module of the model (blocks) 'model.layer'. Did you mean 'model.layers'",
        ),
        ({"final_norm": "model.nrom"}, UnknownNameError, "(final_norm) 'model.nrom'. Did you mean 'model.norm'"),
        ({"sites": [{**SITE, "read": "x"}]}, UnknownNameError, "unknown key 'map.sites[0].read'"),
        ({"sites": [{**SITE, "sublayer": "attn"}]}, UnknownNameError, "module in model.layers.0 (sublayer) 'attn'"),
        ({"sites": []}, InputError, "at least one site"),
        ({"blocks": "lm_head"}, InputError, "lm_head holds no blocks"),
        ({"sites": [{**SITE, "kind": "atention"}]}, InputError, "a site was 'atention'; did you mean 'attention'?"),
        ({"sites": [{**SITE, "kind": "Attn"}]}, InputError, "a site was 'Attn'; did you mean 'attention'?"),
        ({"sites": [{**SITE, "kind": "mlp"}]}, InputError, "a site was 'mlp'; did you mean 'feed_forward'?"),
        ({"sites": [{**SITE, "kind": "my kind"}]}, InputError, "a site was 'my kind'; it must be one word"),
        ({"sites": [{**SITE, "kind": ""}]}, InputError, "it must be one word"),
        ({"sites": [{"kind": "attention"}]}, InputError, "lacks the required key sublayer"),
        (
            {"sites": [{**SITE, "heads": {"value": "self_attn.v_proj", "output": "self_attn.o_proj", "part": "all"}}]},
            UnknownNameError,
            "map.sites[0].heads.part",
        ),
        (
            {"sites": [{**SITE, "heads": {"value": "self_attn.v_proj", "output": "self_attn.o_proj", "key_value": 3}}]},
            InputError,
            "a multiple of key-value heads, got 4 and 3",
        ),
    ],
)
def test_what_a_map_names_wrongly_is_said(change, error, line):
    with pytest.raises(error) as caught:
        capture.locate(tiny("llama"), {"blocks": "model.layers", "sites": [SITE], **change})
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["mixer", "convolution", "cross_attention", "memory"])
def test_a_sublayer_of_another_sort_may_be_called_anything_else(kind):
    located = capture.locate(tiny("llama"), {"blocks": "model.layers", "sites": [{**SITE, "kind": kind}]})
    assert {place.kind for place in located.sites} == {kind} and not located.attention


def test_a_map_that_does_not_fit_is_refused_by_the_proof():
    swapped = capture.read_map({"blocks": "model.layers", "sites": [{**SITE, "sublayer": "mlp"}]})
    with pytest.raises(ProofError, match=r"the map of 'llama' \(found by map\) fails at layers\.0\.attention"):
        capture.prove(capture.locate(tiny("llama"), swapped), batch("llama"))


def test_a_hybrid_may_name_several_modules_of_which_a_block_has_one():
    located = capture.locate(tiny("qwen3_next"))
    assert [p.sublayer.rsplit(".", 1)[1] for p in located.attention] == ["linear_attn", "self_attn"]
