"""Sizes known beforehand against the model itself: parameters, FLOPs, bytes kept, and widths found by matching."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from thalweg import connections
from thalweg.errors import InputError, UnknownNameError
from thalweg.models import Decoder, DecoderConfig, match_flops, match_parameters, size_of
from thalweg.models.activations import KeptBytes
from thalweg.models.matching import nearest
from thalweg.models.size import flops, parameters

VARIANTS = {
    "plain": {},
    "untied": {"tie_embeddings": False},
    "grouped, gated per head": {"kv_heads": 2, "attention_gate": "head"},
    "gated per element": {"attention_gate": "element", "qk_norm": True},
    "bias": {"bias": True, "attention_gate": "element"},
    "gelu": {"feed_forward": "gelu", "ffn_width": 20},
    "attention only": {"layers": ("attention",)},
    "parallel": {"layers": ("parallel", "feed_forward")},
    "inner norms": {"connection": "sub_ln"},
    "shared parameters": {"connection": "mgt", "connection_options": {"alpha_per": "network"}},
}


def config(**changes):
    return DecoderConfig(**{"vocab_size": 50, "width": 32, "depth": 3, "heads": 4, "max_length": 64, **changes})


def counted(cfg):
    return sum(parameter.numel() for parameter in Decoder(cfg).parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_by_part(variant):
    cfg = config(**VARIANTS[variant])
    decoder, parts = Decoder(cfg), parameters(cfg)
    assert sum(parts.values()) == counted(cfg)
    assert parts["stream"] == sum(p.numel() for p in decoder.stream.parameters())
    in_sublayers = sum(p.numel() for layer in decoder.sublayers for p in layer.parameters())
    assert parts["attention"] + parts["feed_forward"] == in_sublayers
    alone = [layer for layer in decoder.sublayers if layer.kind == "feed_forward"]
    if "parallel" not in cfg.layers:
        assert parts["feed_forward"] == sum(p.numel() for layer in alone for p in layer.parameters())


@pytest.mark.parametrize("name", connections.names())
def test_parameters_and_bytes_of_every_connection(name):
    cfg = config(connection=name, depth=4)
    size = size_of(cfg, length=16)
    decoder = Decoder(cfg)
    assert size.total_parameters == sum(p.numel() for p in decoder.parameters())
    assert size.non_embedding_parameters == size.total_parameters - 50 * 32
    x = torch.zeros(1, 16, dtype=torch.long)
    with KeptBytes(decoder) as kept:
        decoder(x, labels=x)
    assert size.activation_bytes == kept.bytes


@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - {"shared parameters"}))
def test_flops_equal_the_counter(variant):
    cfg = config(**VARIANTS[variant])
    decoder, parts, length = Decoder(cfg), flops(cfg, 24), 24
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        decoder(torch.zeros(2, length, dtype=torch.long))
    products = {name: value for name, value in parts.items() if name != "stream"}  # here element-wise only
    assert sum(products.values()) * 2 * length == counter.get_total_flops()


def test_flops_of_a_stream_with_products_are_in_its_part():
    cfg = config(connection="mgt")
    decoder = Decoder(cfg)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        decoder(torch.zeros(1, 8, dtype=torch.long))
    parts = flops(cfg, 8)
    products = counter.get_total_flops() / 8 - sum(value for name, value in parts.items() if name != "stream")
    assert products >= 6 * 2 * 2 * 32 * 32  # two maps [d d] a site
    assert products < parts["stream"] < 1.5 * products  # and element-wise work beside them


def test_training_costs_three_forward_passes_and_recomputing_one_of_the_blocks():
    plain, recomputed = size_of(config(), length=16), size_of(config(gradient_checkpointing=True), length=16)
    assert plain.train_flops == 3 * plain.forward_flops
    assert recomputed.train_flops - plain.train_flops == plain.forward_flops - plain.flops["unembedding"]
    assert recomputed.activation_bytes < 0.6 * plain.activation_bytes
    assert plain.training_bytes(4) == 16 * plain.total_parameters + 4 * plain.activation_bytes


def test_recomputing_keeps_about_what_is_announced():
    cfg = config(depth=6, gradient_checkpointing=True)
    decoder = Decoder(cfg)
    held, x = [], torch.zeros(1, 16, dtype=torch.long)
    for block in decoder.blocks:
        block.register_forward_pre_hook(lambda _, args: held.extend(t.untyped_storage() for t in args[0][:2]))
    with KeptBytes(decoder) as kept:
        decoder(x, labels=x)
    inputs = sum({storage._cdata: storage.nbytes() for storage in held}.values())
    plain = config(depth=1), config(depth=2)
    block = size_of(plain[1], length=16).activation_bytes - size_of(plain[0], length=16).activation_bytes
    assert size_of(cfg, length=16).activation_bytes == pytest.approx(kept.bytes + inputs + block, rel=0.1)


def test_a_half_precision_model_keeps_less():
    assert (
        size_of(config(), length=16, dtype=torch.bfloat16).activation_bytes
        < 0.85 * size_of(config(), length=16).activation_bytes
    )


def test_the_plan_prints():
    text = str(size_of(config(tie_embeddings=False), length=16))
    assert "attention scores" in text and "total" in text and "without embeddings" in text
    assert f"{counted(config(tie_embeddings=False)):,}" in text
    assert "for one sequence of 16 tokens in float32" in text


@pytest.mark.parametrize("name", ["mgt", "highway"])
def test_matching_parameters(name):
    base = config(depth=4, width=64)
    larger = base.replace(connection=name)
    assert counted(larger) > 1.1 * counted(base)
    narrow = match_parameters(larger, base)
    unit = 3 * 64 * 4  # one step of ffn_width
    assert abs(counted(narrow) - counted(base)) <= unit / 2
    assert narrow == larger.replace(ffn_width=narrow.ffn_width)
    slim = match_parameters(larger, base, adjust="width", count="non_embedding", tolerance=0.2)
    assert slim.width < 64 and slim.width % 8 == 0 and slim.ffn_width is None

    def outside(cfg):
        return size_of(cfg, length=8).non_embedding_parameters

    misses = [
        abs(outside(larger.replace(width=w)) - outside(base)) for w in (slim.width - 8, slim.width, slim.width + 8)
    ]
    assert min(misses) == misses[1]


def test_matching_keeps_the_ratio_of_a_fixed_ffn_width():
    wide = match_parameters(config(ffn_width=64), counted(config()) * 3, adjust="width", tolerance=0.2)
    assert wide.ffn_width == 2 * wide.width


def test_matching_flops():
    base = config(depth=4, width=64)
    larger = base.replace(connection="mgt")
    matched = match_flops(larger, base, length=32)
    target = size_of(base, length=32).forward_flops
    assert size_of(matched, length=32).forward_flops == pytest.approx(target, abs=6 * 64 * 4 / 2)
    assert matched.ffn_width < base.feed_forward_width
    assert match_flops(base, target, length=32).ffn_width == base.feed_forward_width


def test_matching_says_what_it_cannot_do():
    with pytest.raises(
        InputError, match=r"no ffn_width brings 'additive' within 5.0% of 1,000 parameters: the nearest is ffn_width 1"
    ):
        match_parameters(config(), 1000)
    with pytest.raises(InputError, match="has no ffn_width to adjust"):
        match_parameters(config(layers=("attention",)), 30_000)
    with pytest.raises(InputError, match="the target must be a positive number"):
        match_parameters(config(), -1)
    with pytest.raises(UnknownNameError, match="Did you mean 'width'"):
        match_parameters(config(), 30_000, adjust="widht")
    with pytest.raises(UnknownNameError, match="non_embedding"):
        match_parameters(config(), 30_000, count="nonembedding")


def test_nearest_finds_the_best_integer_from_any_start():
    for start in (1, 7, 400):
        assert nearest(lambda n: n * n, 50, start) == 7
        assert nearest(lambda n: n * n, 57, start) == 8
        assert nearest(lambda n: n * n, 0.5, start) == 1
