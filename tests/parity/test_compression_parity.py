"""Our Wanda, AWQ and rounding against llm-compressor and torchao on a toy model, each in its own environment.

THALWEG_LLMCOMPRESSOR and THALWEG_TORCHAO name the Pythons of those environments; ``make test-parity`` makes both.
"""

import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from thalweg import compression
from thalweg.compression import compressors
from thalweg.compression.adapters import compress_outside
from thalweg.compression.calibration import Inputs
from thalweg.compression.pruning import Structure, lowest

GENERATOR = torch.Generator().manual_seed(0)
SAMPLES = [torch.randint(0, 61, (32,), generator=GENERATOR).tolist() for _ in range(8)]


def toy() -> LlamaForCausalLM:
    """Two layers with as many key-value as query heads, so that llm-compressor scales all maps; norms that are not one."""
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=48,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.copy_(torch.exp(torch.randn(p.shape, generator=generator)))
    return model


def python(name: str) -> str:
    found = os.environ.get(name)
    assert found, f"{name} must name the Python of an environment; run: make test-parity"
    return found


@pytest.fixture(scope="module")
def llmcompressor():
    return python("THALWEG_LLMCOMPRESSOR")


@pytest.fixture(scope="module")
def torchao():
    return python("THALWEG_TORCHAO")


def pruned(model) -> dict[str, torch.Tensor]:
    return {n: p == 0 for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n}


@pytest.mark.parity
@pytest.mark.parametrize("sparsity", [0.5, "2:4", "4:8"])
def test_the_masks_of_wanda_are_those_of_llmcompressor(llmcompressor, sparsity):
    theirs, mine = toy(), toy()
    compress_outside(theirs, "llmcompressor:wanda", environment=llmcompressor, calibration=SAMPLES, sparsity=sparsity)
    compression.compress(mine, "wanda", calibration=SAMPLES, sparsity=sparsity)
    ours, others = pruned(mine), pruned(theirs)
    same = {n: float((ours[n] == others[n]).double().mean()) for n in ours}
    print(
        f"wanda {sparsity}: masks agree in {min(same.values()):.6f} to {max(same.values()):.6f} of the weights of a map"
    )
    assert len(same) == 14 and min(same.values()) > 0.999
    other = toy()
    compression.compress(other, "magnitude", sparsity=sparsity, within="row")
    assert min(float((m == others[n]).double().mean()) for n, m in pruned(other).items()) < 0.95  # the check can fail


@torch.no_grad()
def sublayer_choice(model, module, names, weights, scales) -> int:
    """The point of the grid with the least error of the whole sublayer's output, as llm-compressor measures it."""
    kept, outputs = [], []

    def keep(m, args, kwargs, output):
        kept.append((args, kwargs))
        outputs.append(output[0] if isinstance(output, tuple) else output)

    hook = module.register_forward_hook(keep, with_kwargs=True)
    for row in SAMPLES:
        model(torch.tensor([row]), use_cache=False)
    hook.remove()
    compressor, errors = compressors.create("awq", group=32), []
    for scale in scales:
        for name, weight in zip(names, weights, strict=True):
            module.get_submodule(name).weight.copy_(compressor.fold(weight, scale))
        found = [module(*args, **kwargs) for args, kwargs in kept]
        found = [f[0] if isinstance(f, tuple) else f for f in found]
        errors.append(sum(float((f - o).square().sum()) for f, o in zip(found, outputs, strict=True)))
    for name, weight in zip(names, weights, strict=True):
        module.get_submodule(name).weight.copy_(weight)
    return int(torch.tensor(errors).argmin())


def inputs_of(model, layer) -> dict[str, Inputs]:
    """What the maps of a layer are given."""
    seen: dict[str, Inputs] = {}
    hooks = [
        m.register_forward_pre_hook(lambda m, a, n=n: seen.setdefault(n, Inputs(a[0].shape[-1], a[0])).add(a[0]))
        for n, m in layer.named_modules()
        if isinstance(m, torch.nn.Linear)
    ]
    with torch.no_grad():
        for row in SAMPLES:
            model(torch.tensor([row]))
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parity
def test_the_scales_of_awq_are_those_of_llmcompressor(llmcompressor):
    """Of the first layer, whose inputs are the same: s = norm before / norm after; of o and down, which have none, the rounded weights."""
    dense, theirs = toy(), toy()
    compress_outside(theirs, "llmcompressor:awq", environment=llmcompressor, calibration=SAMPLES, group=32)
    compressor = compressors.create("awq", group=32)
    layer, made = dense.model.layers[0], theirs.model.layers[0]
    seen = inputs_of(dense, layer)
    for norm, sublayer, names in (
        ("input_layernorm", "self_attn", ("q_proj", "k_proj", "v_proj")),
        ("post_attention_layernorm", "mlp", ("gate_proj", "up_proj")),
    ):
        weights = [layer.get_submodule(f"{sublayer}.{n}").weight.detach().clone() for n in names]
        scales = [s for *_, s in compressor.scales(weights, seen[f"{sublayer}.{names[0]}"].mean_absolute)]
        scale = (layer.get_submodule(norm).weight / made.get_submodule(norm).weight).detach()
        gaps = torch.tensor([float((s - scale).abs().max() / scale.max()) for s in scales])
        chosen = int(gaps.argmin())
        same = sublayer_choice(dense, layer.get_submodule(sublayer), names, weights, scales)
        own = compressor.search(weights, seen[f"{sublayer}.{names[0]}"])
        mine = next(i for i, s in enumerate(scales) if torch.equal(s, own.scale))
        print(
            f"awq {sublayer}: scales of point {chosen} agree to {gaps[chosen]:.1e}; error of the sublayer chooses {same}, of the maps {mine}"
        )
        assert gaps[chosen] < 1e-4 and sorted(gaps)[1] > 1e-3
        assert same == chosen
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weight = layer.get_submodule(name).weight.detach()
        found = compressor.search([weight], seen[name])
        ours, other = compressor.fold(weight, found.scale) * found.scale, made.get_submodule(name).weight.detach()
        gap = float((ours - other).abs().max() / other.abs().max())
        print(f"awq {name}: rounded weights agree to {gap:.1e}")
        assert gap < 1e-5
        assert not torch.allclose(compressor.fold(weight, torch.ones_like(found.scale)), other, atol=1e-3)


@pytest.mark.parity
@pytest.mark.parametrize("sparsity", ["2:4", "4:8"])
def test_the_masks_of_torchao_are_ours_with_the_square_of_the_norm(torchao, sparsity):
    """torchao 0.18 scores by |W| ||X||^2, the paper by |W| ||X||. It calibrates on the dense model at once: the first layer is compared."""
    theirs, mine, dense = toy(), toy(), toy()
    compress_outside(theirs, "torchao:wanda", environment=torchao, calibration=SAMPLES, sparsity=sparsity)
    compression.compress(mine, "wanda", calibration=SAMPLES, sparsity=sparsity, layers=[0])
    seen, masks, paper = inputs_of(dense, dense.model.layers[0]), pruned(theirs), pruned(mine)
    for name, inputs in seen.items():
        full = f"model.layers.0.{name}.weight"
        weight = dense.get_parameter(full).detach()
        squared = lowest(weight.abs() * inputs.square.to(weight), Structure.of(sparsity))
        same, other = (float((m == masks[full]).double().mean()) for m in (squared, paper[full]))
        print(f"torchao wanda {sparsity} {name}: masks agree in {same:.4f} with the square, {other:.4f} with the norm")
        assert same > 0.999 > other


@pytest.mark.parity
@pytest.mark.parametrize(("method", "bits", "group"), [("int8", 8, "row"), ("int4", 4, 32)])
def test_rounding_is_that_of_torchao_but_for_the_lowest_level(torchao, method, bits, group):
    """torchao: s = max|W| / (2^(b-1) - 1/2) and 2^b levels; ours 2^b - 1 levels with both ends on the grid. At most half a step of each."""
    theirs, mine, dense = toy(), toy(), toy()
    compress_outside(theirs, f"torchao:{method}", environment=torchao, group=group)
    compression.compress(mine, "round_to_nearest", bits=bits, group=group, symmetric=True)
    for name, p in dense.named_parameters():
        if p.ndim != 2 or "layers" not in name:
            continue
        parts = p.detach().reshape(-1, p.shape[1] if group == "row" else group)
        step = (parts.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)).expand_as(parts).reshape(p.shape)
        gap = (theirs.get_parameter(name) - mine.get_parameter(name)).detach().abs() / step
        assert float(gap.max()) < 1.01
        assert float((theirs.get_parameter(name) - p).detach().abs().div(step).max()) < 1.01
