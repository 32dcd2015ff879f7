"""The mixture of experts inside a decoder: what its configuration allows, decoding, padding, precision, compiled, saved."""

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from thalweg.connections import Requirements
from thalweg.errors import InputError, UnknownNameError
from thalweg.models import (
    Decoder,
    DecoderCache,
    DecoderConfig,
    ThalwegConfig,
    ThalwegForCausalLM,
    match_parameters,
    size_of,
)
from thalweg.models.activations import KeptBytes
from thalweg.models.balancing import Balancer
from thalweg.models.init import initialise_map
from thalweg.models.sublayers import Map, MixtureOfExperts
from thalweg.models.sublayers.moe import ExpertLinear

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
VOCAB = 31


def config(**changes):
    values = {"vocab_size": VOCAB, "width": 16, "depth": 3, "heads": 2, "layers": ("attention", "moe"), "experts": 4}
    return DecoderConfig(**{**values, "max_length": 64, **changes})


def make(seed=0, **changes):
    return Decoder(config(**changes), generator=torch.Generator().manual_seed(seed))


def loud(model):
    """Weights and biases of ordinary size, in float64."""
    generator, model = torch.Generator().manual_seed(1), model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
        for name, buffer in model.named_buffers():
            if name.endswith("votes"):
                buffer.copy_(torch.randint(-200, 200, buffer.shape, generator=generator))
    return model


def ids(length=8, batch=2, seed=0):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


# what may be asked for


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"experts": 2, "active_experts": 3}, "active_experts must be at most experts, got 3 of 2"),
        ({"active_experts": 0}, "active_experts must be at least 1"),
        ({"shared_experts": -1}, "shared_experts must be at least 0"),
        ({"dense_layers": 4}, r"dense_layers must be 0 to depth \(3\), got 4"),
        ({"expert_width": 0}, "expert_width must be at least 1"),
        ({"balancing_rate": -1e-3}, "balancing_rate must be finite and not negative"),
        ({"balancing_rate": float("nan")}, "balancing_rate must be finite"),
        ({"feed_forward": "gelu"}, "experts are swiglu without bias"),
        ({"bias": True}, "experts are swiglu without bias"),
    ],
)
def test_what_is_refused(changes, says):
    with pytest.raises(InputError, match=says):
        config(**changes)


def test_an_unknown_router_is_an_error_with_the_nearest_name():
    with pytest.raises(UnknownNameError, match="Did you mean 'sigmoid'"):
        config(router="sigmoidal")


def test_the_first_layers_may_be_dense():
    decoder = make(dense_layers=2)
    assert [site.kind for site in decoder.config.sites] == ["attention", "feed_forward"] * 2 + ["attention", "moe"]
    assert [layer.kind for layer in decoder.sublayers] == [site.kind for site in decoder.config.sites]
    assert [site.index for site in decoder.config.sites] == list(range(6))


def test_by_default_a_token_costs_as_much_as_without_experts():
    mixed, dense = config(width=96), config(width=96, layers=("attention", "feed_forward"))
    assert mixed.feed_forward_width == 256 and mixed.expert_feed_forward_width == 88  # 256 / 3, in steps of 8
    ours, theirs = size_of(mixed, length=8), size_of(dense, length=8)
    assert ours.forward_flops == pytest.approx(theirs.forward_flops, rel=0.03)
    assert ours.total_parameters > 1.3 * ours.active_parameters


# size

VARIANTS = {
    "plain": {},
    "dense first": {"dense_layers": 1},
    "all dense": {"dense_layers": 3},
    "no shared": {"shared_experts": 0, "active_experts": 3},
    "inner norms": {"connection": "sub_ln"},
    "softmax, more of them": {"router": "softmax", "experts": 7, "expert_width": 5},
    "beside a feed-forward": {"layers": ("attention", "moe", "feed_forward"), "depth": 6, "dense_layers": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_size_is_known_beforehand(variant):
    cfg = config(**VARIANTS[variant])
    decoder, size, x = Decoder(cfg), size_of(cfg, length=24), ids(24, 1)
    assert size.total_parameters == sum(p.numel() for p in decoder.parameters())
    mixtures = [layer for layer in decoder.sublayers if isinstance(layer, MixtureOfExperts)]
    idle = sum(
        p[cfg.active_experts :].numel() for m in mixtures for k in (m.gate, m.up, m.down) for p in k.parameters()
    )
    assert size.active_parameters == size.total_parameters - idle and (idle > 0) == bool(mixtures)
    assert ("active for a token" in str(size)) == bool(mixtures)
    with KeptBytes(decoder) as kept:
        decoder(x, labels=x)
    assert size.activation_bytes == pytest.approx(kept.bytes, rel=5e-3)  # a graph keeps the sizes too
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        decoder(x)
    assert sum(value for name, value in size.flops.items() if name != "stream") * 24 == counter.get_total_flops()


def test_recomputing_keeps_no_more_than_the_larger_of_the_two_kinds():
    mixed, experts, dense = (
        size_of(config(depth=6, gradient_checkpointing=True, **more), length=16).activation_bytes
        for more in ({"dense_layers": 1}, {}, {"dense_layers": 6})
    )
    assert mixed == max(experts, dense) > min(experts, dense)


def test_widths_are_matched_through_the_experts():
    target = size_of(config(layers=("attention", "feed_forward"), width=64), length=8).total_parameters * 2
    found = match_parameters(config(width=64, depth=6), target, tolerance=0.1)
    assert size_of(found, length=8).total_parameters == pytest.approx(target, rel=0.1)
    with pytest.raises(InputError, match="ffn_width changes nothing here"):
        match_parameters(config(expert_width=8), target)
    assert match_parameters(config(expert_width=8, dense_layers=2), 30_000, tolerance=0.1).expert_width == 8


# initialisation


def test_every_map_is_named_once_and_gains_multiply_the_draw_exactly():
    cfg, drawn = config(), {}
    for required in (Requirements(), Requirements(gain=0.5, output_gain=0.25)):
        layer = MixtureOfExperts(cfg, required, 0)
        maps = list(layer.maps())
        linear = [m for m in layer.modules() if isinstance(m, torch.nn.Linear | ExpertLinear)]
        assert sorted(id(m.linear) for m in maps) == sorted(map(id, linear))
        torch.manual_seed(1)
        with torch.no_grad():
            for linear_map in maps:
                initialise_map(linear_map, required, 0.02)
        drawn[required.gain] = {name: p.clone() for name, p in layer.named_parameters()}
    for name, plain in drawn[1.0].items():
        factor = {"up": 0.5, "down": 0.125}.get(name.split(".")[-2], 1.0)
        assert torch.equal(drawn[0.5][name], plain * factor), name
        assert plain.std().item() == pytest.approx(0.02, rel=0.2), name


def test_xavier_counts_the_fans_of_one_expert():
    expert = ExpertLinear(64, 30, 10)
    with torch.no_grad():
        initialise_map(Map(expert), Requirements(init="xavier"), 1.0)
    assert expert.weight.std().item() == pytest.approx((2 / 40) ** 0.5, rel=0.03)


# decoding


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
@torch.no_grad()
def test_cached_decoding_equals_the_full_pass(router):
    decoder, x = loud(make(router=router, dense_layers=1)), ids(9)
    full = decoder(x).logits
    for pieces in ([1] * 9, [4, 1, 4], [9]):
        cache = DecoderCache()
        parts = [decoder(part, cache=cache).logits for part in x.split(pieces, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-10, atol=1e-11)


@torch.no_grad()
def test_left_padding_changes_nothing_and_does_not_count():
    decoder, x = loud(make()), ids(5, 1)
    alone = decoder(x).logits
    loads = [layer.load.clone() for layer in decoder.sublayers if layer.kind == "moe"]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), x], 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    torch.testing.assert_close(decoder(padded, attention_mask=mask).logits[:, 3:], alone, rtol=1e-10, atol=1e-11)
    for layer, load in zip([m for m in decoder.sublayers if m.kind == "moe"], loads, strict=True):
        assert torch.equal(layer.load, load) and load.sum() == 5 * 2
    cache = DecoderCache()
    first = decoder(padded[:, :6], attention_mask=mask[:, :6], cache=cache).logits[:, 3:]
    rest = decoder(padded[:, 6:], attention_mask=mask, cache=cache).logits
    torch.testing.assert_close(torch.cat([first, rest], 1), alone, rtol=1e-10, atol=1e-11)


def test_generate_with_left_padding_equals_row_by_row():
    torch.manual_seed(0)
    shell = loud(ThalwegForCausalLM(ThalwegConfig.of(config(), pad_token_id=0, bos_token_id=1, eos_token_id=None)))
    x = ids(6)
    mask = torch.ones_like(x)
    mask[0, :2] = 0
    wanted = {"max_new_tokens": 5, "do_sample": False}
    both = shell.generate(x, attention_mask=mask, **wanted)
    for row, start in ((0, 2), (1, 0)):
        single = shell.generate(x[row : row + 1, start:], attention_mask=mask[row : row + 1, start:], **wanted)
        assert torch.equal(both[row, 6:], single[0, 6 - start :])


def test_saved_and_loaded_with_its_bias(tmp_path):
    torch.manual_seed(0)
    saved = ThalwegForCausalLM(ThalwegConfig.of(config(dense_layers=1, router="softmax", expert_width=5)))
    saved.decoder.sublayers[3].router.votes.copy_(torch.tensor([1001, -7, 0, 2]))
    saved.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert loaded.config.to_decoder() == saved.config.to_decoder()
        assert loaded.decoder.sublayers[3].router.votes.tolist() == [1001, -7, 0, 2]
        assert torch.equal(loaded(ids()).logits, saved.to(dtype)(ids()).logits)


# precision, recomputing, compiling


@pytest.mark.parametrize("autocast", [True, False])
def test_under_bfloat16_the_router_stays_in_float32(autocast):
    decoder = make() if autocast else make().to(torch.bfloat16)
    seen = []
    for layer in decoder.sublayers:
        if layer.kind == "moe":
            layer.router.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
            layer.down.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = decoder(ids(), labels=ids())
    out.loss.backward()
    assert seen == [torch.float32, torch.bfloat16] * 3
    exact = make()(ids(), labels=ids()).loss
    assert out.loss.item() == pytest.approx(exact.item(), rel=5e-3)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in decoder.parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_share_their_graphs_and_change_no_number(checkpointing):
    def passed(decoder):
        decoder.zero_grad()
        balancer.forget()
        loss = decoder(ids(), labels=ids()).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in decoder.parameters()], balancer.load

    counts = []
    for depth in (3, 6):
        torch._dynamo.reset()
        graphs: list[object] = []
        decoder = make(depth=depth, gradient_checkpointing=checkpointing)
        balancer = Balancer(decoder)
        plain = passed(decoder)
        decoder.compile_blocks(
            backend=lambda graph, inputs, seen=graphs, depth=depth: (
                seen.append(graph) or (aot_eager(graph, inputs) if depth == 3 else graph)  # once backwards too
            )
        )
        torch.testing.assert_close(passed(decoder), plain, rtol=1e-5, atol=1e-7)
        assert torch.equal(balancer.load, plain[2])
        balancer.step()
        passed(decoder)  # the bias is data: no new graph
        counts.append(len(graphs))
    assert counts == [2, 2]  # however deep; the last layer reads no further
    torch._dynamo.reset()


def test_the_whole_model_compiles_at_every_length():
    torch._dynamo.reset()
    decoder = make(depth=2)
    compiled = torch.compile(decoder, fullgraph=True, backend="eager")  # breaks are the tracer's
    for length in (8, 5, 1):
        x = ids(length)
        torch.testing.assert_close(compiled(x, labels=x).logits, decoder(x).logits, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


def test_recomputed_gradients_are_bitwise_equal_and_nothing_is_counted_twice():
    found = []
    for checkpointing in (False, True):
        decoder = make(gradient_checkpointing=checkpointing)
        balancer, passes = Balancer(decoder), []
        decoder.sublayers[1].register_forward_hook(lambda *_, seen=passes: seen.append(1))
        decoder(ids(), labels=ids()).loss.backward()
        assert len(passes) == 1 + checkpointing
        assert balancer.load.sum(1).tolist() == [2 * 8 * 2] * 3
        found.append(([p.grad for p in decoder.parameters()], balancer.load))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert torch.equal(found[0][1], found[1][1])
