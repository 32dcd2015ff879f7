"""mHC against transformers' DeepSeek-V4: hyper-connection, head, decoder layer and a whole small model, weights copied by the converter."""

import pytest
import torch
from agreement import Branch, Errors, compare, gaussian, our_stream, ours_from, randomise, record, transpose_mix, worst
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from thalweg.connections.layouts import load_layout, to_layout

OPTIONS = {"contraction": "head", "read_eps": 1e-6, "mixer_options": {"eps": 1e-6}}
DEPTH = 2


def configuration(n=4, width=8, iterations=20):
    return DeepseekV4Config(
        vocab_size=31,
        hidden_size=width,
        hc_mult=n,
        hc_sinkhorn_iters=iterations,
        num_hidden_layers=DEPTH,
        num_attention_heads=2,
        head_dim=16,
        q_lora_rank=8,
        o_lora_rank=8,
        o_groups=2,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        index_head_dim=16,
        index_n_heads=2,
        index_topk=4,
        sliding_window=16,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        mlp_layer_types=["moe"] * DEPTH,
        qk_rope_head_dim=8,
        partial_rotary_factor=0.5,
        max_position_embeddings=64,
        experts_implementation="eager",  # the grouped one has no float64
    )


class Attention(Branch):
    """A branch in the place of attention, which returns its weights beside its output."""

    def forward(self, x, **rest):
        return super().forward(x), None


class Stack(nn.Module):
    """Their decoder layers and head around plain branches: the code that mixes and writes is theirs."""

    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList(deepseek.DeepseekV4DecoderLayer(config, i) for i in range(DEPTH))
        for layer in self.layers:
            layer.self_attn, layer.mlp = Attention(config.hidden_size), Branch(config.hidden_size)
            layer.input_layernorm, layer.post_attention_layernorm = nn.Identity(), nn.Identity()
        self.head = deepseek.DeepseekV4HyperHead(config)

    def forward(self, state):
        reads = []
        for layer in self.layers:
            state = layer(state)
            reads += [layer.self_attn.seen, layer.mlp.seen]
        return [*reads, state, self.head(state)]


PLACES = {str(2 * i + k): f"layers.{i}.{name}." for i in range(DEPTH) for k, name in enumerate(("attn_hc", "ffn_hc"))}
BRANCHES = [f"layers.{i}.{name}.weight" for i in range(DEPTH) for name in ("self_attn", "mlp")]


def layers_and_head(n, iterations, spoil=None) -> Errors:
    width = 8
    theirs = Stack(configuration(n, width, iterations)).double()
    options = {**OPTIONS, "mixer_options": {"eps": 1e-6, "iterations": iterations}}
    ours = our_stream("mhc", width=width, sites=2 * DEPTH, streams=n, **options)
    if spoil is not None:
        spoil(ours)
    places = {**PLACES, "head": "head."}
    return compare(
        theirs,
        ours,
        lambda leaves: ours_from(ours, leaves, places, "deepseek_v4", BRANCHES),
        gaussian(2, 3, n, width, seed=1),
        randomise(theirs),
    )


@pytest.mark.parametrize(("n", "iterations"), [(4, 20), (4, 1), (3, 2), (1, 20)])
def test_layers_and_head(n, iterations, float64_throughout):
    """What every sublayer reads, the streams after two layers, the head, and the gradients of all parameters and of the input."""
    errors = layers_and_head(n, iterations)
    assert errors.worst < 1e-12
    record("deepseek_v4_layer", errors, ["transformers"])


def test_a_transposed_mix_is_noticed(float64_throughout):
    assert layers_and_head(4, 20, transpose_mix).outputs > 0.05


def test_the_eps_of_the_released_code_matters(float64_throughout):
    """Without the eps of reads and sums we have the paper, and differ from DeepSeek by about that eps."""

    def paper(ours):
        for site in ours.stream.sites:
            site.options = type(site.options)(**{**vars(site.options), "read_eps": 0.0})

    assert 1e-8 < layers_and_head(4, 20, paper).outputs < 1e-5


def whole_model(spoil=None) -> Errors:
    """Their model, embedding to final norm, and ours that moves the streams around their attention, experts and norms."""
    torch.manual_seed(0)
    config = configuration(width=32)
    theirs = deepseek.DeepseekV4Model(config).double().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "hc" in name:
                parameter.copy_(gaussian(*parameter.shape, seed=len(name)) * 0.5)
    ours = our_stream("mhc", width=32, sites=2 * DEPTH, **OPTIONS).double()
    for i, layer in enumerate(theirs.layers):
        load_layout(ours.stream.sites[2 * i], dict(layer.attn_hc.named_parameters()), "deepseek_v4")
        load_layout(ours.stream.sites[2 * i + 1], dict(layer.ffn_hc.named_parameters()), "deepseek_v4")
    load_layout(ours.stream, dict(theirs.hc_head.named_parameters()), "deepseek_v4")
    if spoil is not None:
        spoil(ours)
    given = {}
    for layer in theirs.layers:
        for name in ("self_attn", "mlp"):
            module = getattr(layer, name)
            module.register_forward_pre_hook(lambda m, args, kwargs: given.update({m: kwargs}), with_kwargs=True)
    tokens = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(3))
    wanted = theirs(tokens, use_cache=False).last_hidden_state
    state = ours.stream.enter(theirs.embed_tokens(tokens))
    for site, (norm, module) in zip(
        ours.stream.sites,
        (half for layer in theirs.layers for half in halves(layer)),
        strict=True,
    ):
        x, context = site.read(state)
        update = module(norm(x), **given[module])
        state = site.write(state, update[0] if isinstance(update, tuple) else update, context)
    found = theirs.norm(ours.stream.leave(state))
    cotangent = gaussian(*wanted.shape, seed=5)
    both = [theirs.embed_tokens.weight, *theirs.layers[0].mlp.experts.parameters(), theirs.layers[1].self_attn.sinks]
    hyper = [module for layer in theirs.layers for module in (layer.attn_hc, layer.ffn_hc)] + [theirs.hc_head]
    expected = torch.autograd.grad(wanted, [*both, *(p for module in hyper for p in module.parameters())], cotangent)
    mine = dict(ours.stream.named_parameters())
    gradients = dict(
        zip(mine, torch.autograd.grad(found, list(mine.values()), cotangent, retain_graph=True), strict=True)
    )
    got = list(torch.autograd.grad(found, both, cotangent))
    for i, module in enumerate(hyper):  # gradients change their order as the parameters do
        place, own = (ours.stream, "") if i == 2 * DEPTH else (ours.stream.sites[i], f"sites.{i}.")
        turned = to_layout(
            place, "deepseek_v4", {n.removeprefix(own): g for n, g in gradients.items() if n.startswith(own)}
        )
        got += [turned[name] for name, _ in module.named_parameters()]
    return Errors(worst([found], [wanted]), worst(got, expected))


def halves(layer):
    yield layer.input_layernorm, layer.self_attn
    yield layer.post_attention_layernorm, layer.mlp


def test_a_whole_model(float64_throughout, monkeypatch):
    monkeypatch.setattr(torch, "float32", torch.float64)  # their norms and rotary angles say .to(torch.float32)
    errors = whole_model()
    assert errors.worst < 1e-9
    record("deepseek_v4_model", errors, ["transformers"])


def test_a_transposed_mix_is_noticed_in_the_whole_model(float64_throughout):
    assert whole_model(transpose_mix).outputs > 0.02
