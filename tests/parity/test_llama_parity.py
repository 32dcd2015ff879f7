"""Additive, SwiGLU, RMSNorm and RoPE together are transformers' Llama: same weights, same logits, loss and gradients, in float64."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from thalweg.models import Decoder, DecoderConfig
from thalweg.models.rotary import angles

VOCAB, WIDTH, DEPTH, FFN, BASE, EPS = 37, 24, 3, 40, 500.0, 1e-5


class Angles(nn.Module):
    """Llama's angles in float64; its own are float32, whatever the model."""

    def forward(self, x, position_ids):
        cos, sin = angles(position_ids, WIDTH // 4, BASE, torch.float64)
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


class WideNorm(nn.Module):
    """Llama's norm without its detour through float32."""

    def __init__(self, norm):
        super().__init__()
        self.weight = norm.weight

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def llama(kv_heads, tied):
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.model.rotary_emb = Angles()
    model.model.norm = WideNorm(model.model.norm)
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = (
            WideNorm(layer.input_layernorm),
            WideNorm(layer.post_attention_layernorm),
        )
    return model


def pairs(ours, theirs):
    """Our parameters and Llama's, one by one."""
    yield ours.embedding.weight, theirs.model.embed_tokens.weight
    yield ours.stream.final_norm.weight, theirs.model.norm.weight
    if not ours.config.tie_embeddings:
        yield ours.head.weight, theirs.lm_head.weight
    for i, layer in enumerate(theirs.model.layers):
        attention, feed_forward = ours.blocks[i].sublayers
        yield ours.stream.sites[2 * i].input_norm.weight, layer.input_layernorm.weight
        yield ours.stream.sites[2 * i + 1].input_norm.weight, layer.post_attention_layernorm.weight
        for name, other in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj")):
            yield getattr(attention, name).weight, getattr(layer.self_attn, other).weight
        for name in ("gate", "up", "down"):
            yield getattr(feed_forward, name).weight, getattr(layer.mlp, f"{name}_proj").weight


@pytest.mark.parametrize(("kv_heads", "tied"), [(4, True), (2, False)])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_loss_and_gradients(kv_heads, tied, padded):
    theirs = llama(kv_heads, tied)
    ours = Decoder(
        DecoderConfig(
            vocab_size=VOCAB,
            width=WIDTH,
            depth=DEPTH,
            heads=4,
            kv_heads=kv_heads,
            ffn_width=FFN,
            norm_eps=EPS,
            rope_base=BASE,
            tie_embeddings=tied,
        )
    ).double()
    both = list(pairs(ours, theirs))
    assert len({id(p) for p, _ in both}) == len(list(ours.parameters())) == len(list(theirs.parameters()))
    with torch.no_grad():
        for mine, other in both:
            mine.copy_(other)
    x = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    labels, mask = x.clone(), torch.ones_like(x)
    if padded:
        mask[0, :3], labels[0, :4] = 0, -100
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    mine = ours(x, labels=labels, attention_mask=mask if padded else None)
    other = theirs(x, labels=labels, attention_mask=mask, position_ids=positions)
    real = mask.bool()
    torch.testing.assert_close(mine.logits[real], other.logits[real], rtol=1e-10, atol=1e-11)
    # transformers takes the loss in float32.
    assert mine.loss.item() == pytest.approx(other.loss.item(), rel=1e-6)
    cotangent = torch.randn(mine.logits[real].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad(mine.logits[real], [p for p, _ in both], cotangent)
    expected = torch.autograd.grad(other.logits[real], [p for _, p in both], cotangent)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-9)
