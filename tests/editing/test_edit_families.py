"""Every family that capture knows is edited, at every site that it has."""

import pytest
import torch
from tiny_families import FAMILIES, batch, tiny

from thalweg import capture
from thalweg.editing import edit, matched_noop
from thalweg.errors import InputError


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("site", ["attention", "mlp", "block"])
def test_updates_are_edited_along_what_they_are_added_to(kind, site):
    model, given = tiny(kind), batch(kind, "right")
    assert matched_noop(model, given, site=site).worst < 1e-9
    located = capture.locate(model)
    seen: list = []
    with edit(model, site=site, parallel=0.0), capture.watch(located, seen.append), torch.no_grad():
        model(**given)
    part = {"attention": ("attention",), "mlp": ("feed_forward",), "block": ()}[site]
    assert len(seen) == len(located.sites)
    for event in (e for e in seen if e.place.kind in part):
        along = (event.branch * event.state).sum(-1)[event.real]
        assert along.abs().max() < 1e-9 * max(1.0, float(event.state.norm() * event.branch.norm()))
        assert event.branch.norm() > 1e-6


@pytest.mark.parametrize("kind", FAMILIES)
def test_values_are_edited_where_there_are_heads_and_refused_elsewhere(kind):
    model, given = tiny(kind), batch(kind, "right")
    located = capture.locate(model)
    if any(place.heads is None for place in located.attention):
        reason = next(place.no_heads for place in located.attention if place.heads is None)
        with pytest.raises(InputError, match="values cannot be edited in layers") as refused, edit(model, parallel=0.0):
            pass
        assert reason in str(refused.value) and "\n" not in str(refused.value)
        return
    assert matched_noop(model, given, site="value").worst < 1e-9
    outputs = []
    for route in ("tap", "hooks"):
        with edit(model, site="value", exclude_self=False, parallel=0.0, route=route), torch.no_grad():
            found = model(**given)
        outputs.append(getattr(found, "logits", found[0])[given["attention_mask"].bool()])
    torch.testing.assert_close(*outputs, atol=1e-6, rtol=1e-5)
