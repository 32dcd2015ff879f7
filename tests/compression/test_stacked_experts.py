"""Experts that transformers holds in one tensor: each is compressed by the tokens that reach it, which a loop over tokens finds too."""

import copy

import pytest
import torch
from small_models import SAMPLES
from tiny_families import tiny

from thalweg import compression
from thalweg.capture.locating import locate
from thalweg.compression.replay import Replay
from thalweg.compression.targets import targets_of
from thalweg.errors import InputError

IDS = [list(sample) for sample in SAMPLES]


def fresh(kind):
    """A copy that may be changed; experts one by one, as other ways know no float64."""
    model = copy.deepcopy(tiny(kind)).double()
    model.config._experts_implementation = "eager"
    return model


def by_loop(model):
    """(layer, parameter, expert) -> inputs [n in], token by token, from what the experts of every layer are called with."""
    found = {}

    def watch(layer):
        def hook(module, args):
            x, chosen, _ = args
            for row, experts in zip(x, chosen.tolist(), strict=True):
                for e in experts:
                    first = module.gate_up_proj[e].T if module.is_transposed else module.gate_up_proj[e]
                    y = first @ row
                    if module.has_bias:
                        y = y + module.gate_up_proj_bias[e]
                    found.setdefault((layer, "gate_up_proj", e), []).append(row)
                    found.setdefault((layer, "down_proj", e), []).append(module._apply_gate(y[None])[0])

        return hook

    hooks = [
        layer.mlp.experts.register_forward_pre_hook(watch(i))
        for i, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "experts")
    ]
    with torch.no_grad():
        for ids in IDS:
            model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return {key: torch.stack(rows) for key, rows in found.items()}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_every_expert_hears_its_own_tokens(kind):
    model = fresh(kind)
    located, wanted = locate(model), by_loop(model)
    at = len(model.model.layers) - 1  # the first one of Qwen3 here is dense
    targets = [t for t in targets_of(located, [at], ("mlp",)) if t.stacked]
    experts = model.model.layers[at].mlp.experts
    assert {t.parameter for t in targets} == {"gate_up_proj", "down_proj"}
    replay = Replay(located, [torch.tensor([ids]) for ids in IDS], targets)
    was = model.config._experts_implementation
    with torch.no_grad():
        groups = replay.groups(targets)
        for layer in range(at):
            replay.advance(layer)
        heard = replay.gather(at, groups)
    assert model.config._experts_implementation == was and all(len(group) == 1 for group in groups)
    for (target,), inputs in zip(groups, heard, strict=True):
        rows = wanted.get((at, target.parameter, target.expert))
        assert inputs.tokens == (0 if rows is None else len(rows))
        if rows is not None:
            torch.testing.assert_close(inputs.products, rows.T @ rows)
    assert sum(inputs.tokens for inputs in heard) == 2 * sum(map(len, IDS)) * experts.config.num_experts_per_tok


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_wanda_prunes_each_expert_by_its_own_norms(kind):
    model, dense = fresh(kind), fresh(kind)
    wanted = by_loop(dense)
    record = compression.compress(model, "wanda", sparsity=0.5, calibration=IDS, layers=[0], sites="mlp").record
    experts, before = model.model.layers[0].mlp.experts, dense.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        for e in range(len(getattr(experts, name))):
            after, weight = (
                getattr(one, name)[e].T if one.is_transposed else getattr(one, name)[e] for one in (experts, before)
            )
            rows = wanted.get((0, name, e))
            if rows is None:
                assert torch.equal(after, weight)
                continue
            score = weight.abs() * rows.norm(dim=0)
            kept = score.argsort(dim=1, stable=True)[:, weight.shape[1] // 2 :]
            mask = torch.zeros_like(weight, dtype=torch.bool).scatter_(1, kept, True)
            assert torch.equal(after, weight * mask)
    assert {row.name.rsplit(".", 2)[-2] for row in record.linears} >= {"gate_up_proj", "down_proj"}
    assert not any("gate_up_proj" in name or "down_proj" in name for name in record.left_dense)


def test_methods_without_a_text_take_them_too_and_the_folder_opens(tmp_path):
    for kind in ("mixtral", "gpt_oss"):
        model = fresh(kind)
        made = compression.compress(model, "magnitude", sparsity=0.5)
        assert made.record.sparsity == pytest.approx(0.5, abs=0.03)
        made.save(tmp_path / kind)
        again = type(model).from_pretrained(tmp_path / kind, dtype=torch.float64, experts_implementation="eager")
        with torch.no_grad():
            torch.testing.assert_close(again(torch.tensor(IDS[:1])).logits, model(torch.tensor(IDS[:1])).logits)


def test_a_class_that_does_not_say_how_its_experts_lie_is_refused():
    model = fresh("mixtral")
    for layer in model.model.layers:
        del layer.mlp.experts.is_transposed
    with pytest.raises(
        InputError, match=r"holds all experts in one tensor .* and does not say how; say sites='attention'"
    ):
        compression.compress(model, "magnitude")
    assert compression.compress(model, "wanda", calibration=IDS, sites="attention").record.linears
