"""What an edit really changed: strength at the output, and the diagonal that it amounts to."""

import pytest
import torch
from edit_subjects import logits, padded, tiny, words

from thalweg import capture
from thalweg.editing import audit, edit
from thalweg.errors import InputError


def value_of(rows, measure, **where):
    found = list(rows.where(measure=measure, **where))
    assert len(found) == 1
    return found[0].value


def outputs(model, ids, **values):
    """Output [b t d] of the attention of the first layer, edited or not."""
    found = []
    handle = model.model.layers[0].self_attn.register_forward_hook(lambda *call: found.append(call[-1][0].detach()))
    with edit(model, layers=[0], **values):
        logits(model, ids)
    handle.remove()
    return found[0].double()


@pytest.mark.parametrize(("site", "more"), [("value", {}), ("value", {"exclude_self": False}), ("attention", {})])
def test_strength_is_that_of_the_output_token_by_token(site, more):
    """The first layer sees the same input edited or not, so two passes are the oracle."""
    model, ids = tiny("llama", "eager", torch.float64), words()
    before = outputs(model, ids, site=site)
    with edit(model, site=site, layers=[0], parallel=0.0, **more):
        handle = model.model.layers[0].self_attn.register_forward_hook(lambda *call: found.append(call[-1][0].detach()))
        found: list = []
        logits(model, ids)
        handle.remove()
    rows = audit(model, {"input_ids": ids}, site=site, parallel=0.0, layers=[0], **more)
    ratios = [
        ((a - b).norm() / b.norm()).item() for a, b in zip(found[0].flatten(0, 1), before.flatten(0, 1), strict=True)
    ]
    kept = [(a.norm() / b.norm()).item() for a, b in zip(found[0].flatten(0, 1), before.flatten(0, 1), strict=True)]
    assert value_of(rows, "applied.norm_ratio") == pytest.approx(sum(ratios) / 18, rel=1e-6)
    assert value_of(rows, "applied.energy_ratio") == pytest.approx(sum(r * r for r in ratios) / 18, rel=1e-6)
    assert value_of(rows, "applied.retained") == pytest.approx(sum(kept) / 18, rel=1e-6)
    assert next(iter(rows)).n == 18


@pytest.mark.parametrize("exclude", [True, False])
def test_the_effective_diagonal_put_into_the_matrix_reproduces_the_edit(exclude):
    """A_tt + dA_tt, with everything else of the row as it was, gives the edited output: exactly, head by head."""
    model, ids = tiny("llama", "eager", torch.float64), words()
    name = "effective_diagonal.exclude_self" if exclude else "effective_diagonal.value"
    rows = audit(model, {"input_ids": ids}, site="value", parallel=-0.5, exclude_self=exclude, layers=[0])
    seen: dict = {}
    with capture.attention.attention_tap(model, lambda call: seen.setdefault("call", call) and None):
        logits(model, ids)
    call = seen["call"]
    v = call.value.repeat_interleave(2, 1).transpose(1, 2)
    own = call.own().transpose(1, 2) if exclude else 0.0
    beta = (call.output * v).sum(-1) / v.square().sum(-1) - own
    for head in range(4):
        assert value_of(rows, name, head=head) == pytest.approx(float((-1.5 * beta)[:, :, head].mean()), rel=1e-6)
    assert len(rows.where(measure=f"{name}.median")) == 4


def test_the_effective_diagonal_of_the_stream_matches_its_one_product():
    model, ids = tiny("llama", "eager", torch.float64), words()
    rows = audit(model, {"input_ids": ids}, site="attention", parallel=0.0, layers=[0])
    seen: list = []
    with capture.watch(capture.locate(model), seen.append, values=True):
        logits(model, ids)
    event = seen[0]
    message = (
        event.values.v.repeat_interleave(2, 2).flatten(2) @ model.model.layers[0].self_attn.o_proj.weight.detach().T
    )
    wanted = -(event.branch * event.state).sum(-1) / (message * event.state).sum(-1)
    assert value_of(rows, "effective_diagonal.residual") == pytest.approx(float(wanted.mean()), rel=1e-6)
    assert value_of(rows, "effective_diagonal.residual.median") == pytest.approx(
        float(wanted.flatten().median()), rel=1e-6
    )


def test_padding_does_not_count():
    model, ids = tiny("llama", "eager", torch.float64), words()
    alone = audit(model, {"input_ids": ids}, site="mlp", parallel=0.0)
    batch = padded(ids, "right")
    together = audit(model, [batch], site="mlp", parallel=0.0)
    assert len(alone) == len(together) == 9
    for a, b in zip(alone, together, strict=True):
        assert (a.measure, a.site, a.n) == (b.measure, b.site, b.n)
        assert a.value == pytest.approx(b.value, rel=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "gpt_neox", "bert"])
def test_other_families_are_audited_too(kind):
    for site in ("value", "attention", "mlp"):
        rows = audit(tiny(kind, "eager"), {"input_ids": words()}, site=site, parallel=0.0)
        assert len(rows.where(measure="applied.norm_ratio")) == 3
        assert all(row.value >= 0 for row in rows.where(measure="applied.norm_ratio"))


def test_what_has_no_single_output_is_refused():
    with pytest.raises(InputError, match="audit the sites attention and mlp"):
        audit(tiny("llama"), {"input_ids": words()}, site="block", parallel=0.0)
    with pytest.raises(InputError, match="changed nothing"):
        audit(tiny("llama"), {"input_ids": words()}, site="mlp")
