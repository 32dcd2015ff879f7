"""The driver: which maps are compressed, in which order they see what, what the record says, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from small_models import SAMPLES, fresh, logits, ours
from torch import nn

from thalweg import compression
from thalweg.capture import open_model
from thalweg.capture.linear import linear_weight
from thalweg.compression import compressors
from thalweg.compression.calibration import Inputs
from thalweg.errors import CheckpointError, InputError, ThalwegError, UnknownNameError

IDS = [list(row) for row in SAMPLES]
KINDS = ("llama", "gpt2", "gemma2", "gpt_neox", "bert")


def maps(model, within=""):
    return {n: m for n, m in model.named_modules() if within in n and linear_weight(m) is not None}


def by_hand(model, blocks, name, samples, **options):
    """Layer after layer with hooks on whole passes of the model: quadratic in depth, and nothing is replayed."""
    compressor = compressors.create(name, **options)
    for block in blocks:
        seen, hooks = {}, []
        for module_name, module in maps(model, f"{block}.").items():

            def hear(m, args, n=module_name, seen=seen):
                seen.setdefault(n, Inputs(args[0].shape[-1], args[0])).add(args[0])

            hooks.append(module.register_forward_pre_hook(hear))
        for row in samples:
            logits_or_states(model, row)
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for module_name, inputs in seen.items():
                weight = linear_weight(model.get_submodule(module_name))
                weight.copy_(compressor.one(module_name, weight.clone(), inputs).weight)


@torch.no_grad()
def logits_or_states(model, row):
    return model(torch.tensor([row]))[0]


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [("llama", "model.layers"), ("gpt2", "transformer.h"), ("bert", "encoder.layer"), ("ours", "blocks")],
)
def test_layers_see_what_the_compressed_ones_before_give(kind, blocks):
    one, other = (ours(), ours()) if kind == "ours" else (fresh(kind, torch.float64), fresh(kind, torch.float64))
    one, other = one.double(), other.double()
    made = compression.compress(one, "wanda", sparsity=0.5, calibration=IDS, batch_size=2)
    by_hand(other, [f"{blocks}.{i}" for i in range(3)], "wanda", SAMPLES, sparsity=0.5)
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert made.record.sparsity == pytest.approx(0.5, abs=0.02)
    dense = ours().double() if kind == "ours" else fresh(kind, torch.float64)
    compression.compress(other := dense, "wanda", sparsity=0.5, calibration=IDS, layers="last")
    last = maps(one, f"{blocks}.2.")
    assert any(
        not torch.equal(m.weight == 0, other.get_submodule(n).weight == 0) for n, m in last.items()
    )  # the dense ones give others


@pytest.mark.parametrize("kind", KINDS)
def test_all_maps_of_the_blocks_and_nothing_else(kind):
    model = fresh(kind)
    before = {n: p.clone() for n, p in model.named_parameters()}
    record = compression.compress(model, "round_to_nearest", bits=2, group="row").record
    changed = {n.removesuffix(".weight") for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {row.name for row in record.linears}
    assert changed == {n for n in maps(model) if any(f".{i}." in n for i in range(3))}
    assert len(record.linears) == 3 * {"llama": 7, "gemma2": 7, "gpt2": 4, "gpt_neox": 4, "bert": 6}[kind]
    assert {row.site for row in record.linears} == {"attention", "mlp"}


def test_a_conv1d_is_rounded_along_its_inputs():
    model = fresh("gpt2")
    weight = model.transformer.h[0].attn.c_attn.weight  # [in out]
    before = weight.detach().clone()
    compression.compress(model, "round_to_nearest", bits=3, group=8, layers=[0], sites="attention")
    expected = compressors.create("round_to_nearest", bits=3, group=8).one("", before.T.contiguous(), None).weight.T
    assert torch.equal(weight, expected)


def test_layers_that_are_protected_and_sites_that_are_not_chosen_stay():
    model, before = fresh(), fresh().state_dict()
    record = compression.compress(model, "magnitude", sparsity=0.5, skip="0", sites="mlp").record
    touched = {n for n, p in model.state_dict().items() if not torch.equal(p, before[n])}
    assert touched == {f"model.layers.{i}.mlp.{m}_proj.weight" for i in (1, 2) for m in ("gate", "up", "down")}
    assert (record.layers, record.skipped, record.sites) == ((1, 2), (0,), ("mlp",))


def test_maps_that_read_one_tensor_share_a_scale():
    record = compression.compress(fresh(), "awq", group=8, calibration=IDS).record
    shared = {row.name.split(".")[-1]: row.facts["shares_scale_with"] for row in record.linears if row.layer == 1}
    assert shared == {"q_proj": 2, "k_proj": 2, "v_proj": 2, "o_proj": 0, "gate_proj": 1, "up_proj": 1, "down_proj": 0}


def test_what_the_record_says():
    model = fresh()
    dense = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        seen = {}
        hook = model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(
            lambda m, a: seen.setdefault("x", []).append(a[0].flatten(0, 1))
        )
        for row in IDS:
            model(torch.tensor([row]))
        hook.remove()
    record = compression.compress(model, "round_to_nearest", bits=3, group=8, calibration=IDS, source="small").record
    row = record.linears[0]
    x, w = torch.cat(seen["x"]), dense["model.layers.0.self_attn.q_proj.weight"]
    change = model.model.layers[0].self_attn.q_proj.weight.detach() - w
    assert row.name == "model.layers.0.self_attn.q_proj"
    assert row.mean_square_error == pytest.approx(float(change.square().mean()), rel=1e-5)
    assert row.relative_error == pytest.approx(float(change.square().sum() / w.square().sum()), rel=1e-5)
    assert row.output_error == pytest.approx(float((x @ change.T).square().sum() / (x @ w.T).square().sum()), rel=1e-4)
    assert record.bits_per_weight == row.bits_per_weight == 3 + (16 + 3) / 8
    numbers = sum(r.shape[0] * r.shape[1] for r in record.linears)
    total = sum(p.numel() for p in dense.values())
    assert record.bytes_dense == 2 * total
    assert record.bytes == round(2 * (total - numbers) + numbers * record.bits_per_weight / 8)
    assert (record.method, record.source, record.kept_blocks) == ("round_to_nearest", "small", None)
    assert record.calibration["tokens"] == sum(map(len, IDS))
    assert (
        record.calibration["sha256"]
        != compression.compress(fresh(), "rtn", group=8, calibration=IDS[:2]).record.calibration["sha256"]
    )


def test_a_saved_folder_is_that_model_and_its_record(tmp_path):
    for model in (fresh(), ours()):
        made = compression.compress(model, "round_to_nearest", bits=4, group=8)
        folder = made.save(tmp_path / type(model).__name__)
        opened = open_model(folder)
        assert torch.equal(logits(opened.model, [IDS[0]]), logits(model, [IDS[0]]))
        assert compression.read_record(folder).plain() == made.record.plain()
        plain = json.loads((folder / "thalweg_compression.json").read_text())
        assert {"method", "options", "kept_blocks", "bits_per_weight", "bytes", "source"} <= set(plain)
        assert load_file(folder / "model.safetensors")
        with pytest.raises(InputError, match="not an empty folder"):
            made.save(folder)
    (folder / "thalweg_compression.json").write_text("{}")
    with pytest.raises(CheckpointError, match="compress the model anew"):
        compression.read_record(folder)
    assert compression.read_record(tmp_path) is None


def test_the_error_of_one_compression_can_be_drawn_anew(tmp_path):
    made = compression.compress(fresh(), "magnitude", sparsity=0.5, skip=[0])
    folder = made.save(tmp_path / "pruned")
    record = compression.compress(fresh(), "random", like=str(folder), skip=[0]).record
    assert [row.relative_error for row in record.linears] == pytest.approx(
        [row.relative_error for row in made.record.linears], rel=1e-4
    )
    with pytest.raises(InputError, match="choose the same layers"):
        compression.compress(fresh(), "random", like=str(folder))
    with pytest.raises(InputError, match="holds no record"):
        compression.compress(fresh(), "random", like=str(tmp_path))


def test_experts_of_ours_are_compressed_each_by_what_it_sees():
    model = ours(layers=("attention", "moe"), experts=4)
    record = compression.compress(model, "wanda", sparsity=0.5, calibration=IDS).record
    experts = [row for row in record.linears if ".gate." in row.name]
    assert len({row.name for row in experts}) == 3 * 4
    assert all(row.sparsity == pytest.approx(0.5, abs=0.05) for row in experts if "left_dense" not in row.facts)
    assert "blocks.0.sublayers.1.router.linear.weight" in record.left_dense
    whole = compression.compress(ours(layers=("attention", "moe"), experts=4), "magnitude", sparsity=0.5).record
    assert not any("router" in row.name for row in whole.linears)


def test_an_expert_that_no_token_reaches_stays_as_it_is():
    model = ours(layers=("attention", "moe"), experts=4, shared_experts=0, active_experts=1)
    with torch.no_grad():
        for block in model.blocks:
            block.sublayers[1].router.linear.weight.zero_()  # all tokens go to one expert
    before = model.blocks[0].sublayers[1].gate.weight.detach().clone()
    record = compression.compress(model, "wanda", sparsity=0.5, calibration=IDS).record
    after = model.blocks[0].sublayers[1].gate.weight
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)].count(False) == 1
    assert "no token of the calibration reached it" in record.notes[0]


def test_the_plan_comes_before_the_first_change():
    model, told = fresh(), []
    dense = model.model.layers[0].mlp.up_proj.weight.detach().clone()

    def progress(done, plan):
        told.append(done)
        if done == 0:
            assert torch.equal(model.model.layers[0].mlp.up_proj.weight, dense)
            assert plan.tokens == sum(map(len, IDS))
            assert plan.block_passes == 2 * 3 - 1
            assert plan.states == 2 * plan.tokens * 24 * 4
            assert all(part in " ".join(plan.lines) for part in ("21 matrices", "3 samples", "runs of one block"))

    compression.compress(model, "wanda", calibration=IDS, progress=progress)
    assert told == [0, 1, 2, 3]


def test_the_blocks_are_run_as_often_as_the_plan_says():
    model, plans, counts = fresh(), [], []
    hooks = [block.register_forward_hook(lambda *_: counts.append(1)) for block in model.model.layers]
    compression.compress(model, "wanda", calibration=IDS, progress=lambda done, plan: plans.append(plan))
    for hook in hooks:
        hook.remove()
    assert len(counts) == len(IDS) * (3 + plans[0].block_passes)


def test_the_model_keeps_its_mode_and_its_hooks():
    model = fresh().train()
    compression.compress(model, "awq", group=8, calibration=IDS)
    assert model.training
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


class Packed(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        del self._parameters["weight"]
        self.weight = torch.zeros(8, dtype=torch.uint8)


def spoiled(how):
    model = fresh()
    block = model.model.layers[1]
    if how == "nan":
        with torch.no_grad():
            block.mlp.up_proj.weight[0, 0] = torch.nan
    if how == "packed":
        block.mlp.up_proj = Packed()
    if how == "shared":
        block.mlp.up_proj.weight = block.mlp.gate_proj.weight
    if how == "compiled":
        block._compiled_call_impl = lambda *a: None
    return model


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("nan", r"llama: model\.layers\.1\.mlp\.up_proj\.weight holds 1 value that is NaN or infinite"),
        ("packed", "packed already"),
        ("shared", "share one weight"),
        ("compiled", "compiled"),
    ],
)
def test_models_that_cannot_be_compressed_are_left_alone(how, says):
    model = spoiled(how)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ThalwegError, match=says):
        compression.compress(model, "magnitude")
    assert all(torch.equal(p.nan_to_num(), before[n].nan_to_num()) for n, p in model.named_parameters())


REFUSED = [
    ({"method": "wanda"}, "wanda needs to see text"),
    ({"method": "magnitude", "layers": [3]}, "layers are numbers from 0 to 2"),
    ({"method": "magnitude", "layers": "0", "skip": "0"}, "no layer is left to compress"),
    ({"method": "magnitude", "sites": "head"}, "unknown site to compress"),
    ({"method": "magnitude", "calibration": "text"}, "list of lists of token numbers"),
    ({"method": "magnitude", "calibration": []}, "holds no sample"),
    ({"method": "magnitude", "calibration": [[1, -2]]}, "must be a list of at least one token number"),
    ({"method": "magnitude", "calibration": [[1, 61]]}, "the model knows 0 to 60"),
    ({"method": "wanda", "calibration": [[1, 2], [1] * 65]}, "has 65 tokens, this model takes 64 at most"),
    ({"method": "layer_drop", "count": 1, "calibration": [[1] * 65]}, "has 65 tokens, this model takes 64 at most"),
    ({"method": "magnitude", "calibration": [[1, 2]], "batch_size": 0}, "batch_size must be a whole number"),
    ({"method": "rtn"}, "group 128 does not divide the 24 inputs"),
    ({"method": "wanda", "calibration": [[1, 2]], "sparsity": "3:16"}, "needs a multiple of 16 inputs"),
    ({"method": "layer_drop", "drop": "0", "skip": "1"}, "leave layers, skip and sites out"),
    ({"method": "layer_drop", "drop": "0-2"}, "leave at least one"),
    ({"method": "layer_drop", "count": 3, "calibration": [[1, 2, 3]]}, "below the 3 layers"),
]


@pytest.mark.parametrize(("values", "says"), REFUSED)
def test_what_cannot_be_is_one_line_before_anything_changes(values, says):
    model, before = fresh(), fresh().state_dict()
    with pytest.raises(InputError) as raised:
        compression.compress(model, **values)
    assert says in str(raised.value) and "\n" not in str(raised.value)
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())


def test_a_library_is_no_method_of_ours():
    with pytest.raises(UnknownNameError, match="unknown compressor 'llmcompressor:wanda'"):
        compression.compress(fresh(), "llmcompressor:wanda")


def test_windows_of_texts():
    found = compression.calibration_of(
        ["abcdefg", "hij", "klmnop"], lambda text: [ord(c) for c in text], samples=3, length=3
    )
    assert ["".join(map(chr, row)) for row in found.samples] == ["abc", "def", "hij"]
    with pytest.raises(InputError, match="the longest has 7"):
        compression.calibration_of(["abcdefg"], lambda text: [ord(c) for c in text], samples=1, length=8)
