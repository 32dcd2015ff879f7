"""The edits written out: explicit attention matrices, sums over tokens in loops, golden numbers."""

import dataclasses

import pytest
import torch
from edit_subjects import DECODERS, EXACT, captured, explicit, logits, padded, tiny, words

from thalweg import capture
from thalweg.editing import edit

# What the edit of values must be, from the matrix itself.


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize(("parallel", "perpendicular"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.25), (0.5, 1.5)])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_the_edit_of_values_is_the_sum_over_tokens_written_out(kind, exclude, parallel, perpendicular):
    model, ids = tiny(kind, "eager", torch.float64), words()
    matrix, values = explicit(model, ids)
    wanted = torch.zeros(2, 9, 4, 6, dtype=torch.float64)
    for b in range(2):
        for h in range(4):
            for t in range(9):
                own = values[b, h, t]
                others = sum(
                    (matrix[b, h, t, s] * values[b, h, s] for s in range(t + 1) if s != t or not exclude),
                    torch.zeros(6).double(),
                )
                along = (others @ own) / (own @ own) * own
                kept = matrix[b, h, t, t] * own if exclude else torch.zeros(6).double()
                wanted[b, t, h] = kept + parallel * along + perpendicular * (others - along)
    found = captured(model, ids, site="value", exclude_self=exclude, parallel=parallel, perpendicular=perpendicular)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)  # the model's own softmax runs in float32


def test_values_of_grouped_heads_are_projected_jointly():
    model, ids = tiny("llama", "eager", torch.float64), words()
    matrix, values = explicit(model, ids)
    own_weight = matrix.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    others = matrix @ values - own_weight * values
    for group, heads in (("kv", [[0, 1], [2, 3]]), ("kv:2", [[0, 1, 2, 3]]), ("all", [[0, 1, 2, 3]])):
        wanted = torch.empty_like(others)
        for together in heads:
            joint = sum((others[:, h] * values[:, h]).sum(-1) for h in together)
            size = sum(values[:, h].square().sum(-1) for h in together)
            for h in together:
                wanted[:, h] = (
                    own_weight[:, h] * values[:, h] + others[:, h] - (joint / size).unsqueeze(-1) * values[:, h]
                )
        found = captured(model, ids, site="value", parallel=0.0, group=group)
        torch.testing.assert_close(found, wanted.transpose(1, 2), atol=1e-7, rtol=1e-6)


def test_repeating_values_element_by_element_is_another_edit():
    """The bug of a published revision: v0 v0 v1 v1 in place of heads 0 0 1 1 makes the reference almost orthogonal."""
    model, ids = tiny("llama", "eager", torch.float64), words()
    matrix, values = explicit(model, ids)
    wrong = values[:, ::2].transpose(1, 2).flatten(2).repeat_interleave(2, -1).unflatten(-1, (4, 6)).transpose(1, 2)
    o = matrix @ values
    wrongly = o - ((o * wrong).sum(-1) / wrong.square().sum(-1)).unsqueeze(-1) * wrong
    rightly = o - ((o * values).sum(-1) / values.square().sum(-1)).unsqueeze(-1) * values
    found = captured(model, ids, site="value", parallel=0.0, exclude_self=False).transpose(1, 2)
    torch.testing.assert_close(found, rightly, atol=1e-7, rtol=1e-6)
    assert (found - wrongly).norm() > 0.3 * found.norm()


@pytest.mark.parametrize("kind", DECODERS)
def test_excluding_self_leaves_the_first_token_alone(kind):
    model = tiny(kind, "eager")
    ids = words()
    plain = logits(model, ids)
    with edit(model, site="value", parallel=-1.0, perpendicular=0.0):
        edited = logits(model, ids)
    torch.testing.assert_close(edited[:, 0], plain[:, 0], atol=1e-4, rtol=1e-4)
    assert (edited[:, 1:] - plain[:, 1:]).abs().max() > 1e-2
    with edit(model, site="value", parallel=0.0, exclude_self=False) as facts:
        assert (logits(model, ids)[:, 0] - plain[:, 0]).abs().max() > 1e-2
        assert "first token" in facts.notes[-1]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "gpt_neox", "granite", "bert"])
def test_hooks_and_tap_give_the_same_full_aggregate(kind):
    model, ids = tiny(kind, "eager"), words()
    found = []
    for route in ("tap", "hooks"):
        with edit(model, site="value", parallel=0.2, perpendicular=1.3, exclude_self=False, route=route) as facts:
            assert facts.route == route
            found.append(logits(model, ids))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert (found[0] - logits(model, ids)).abs().max() > 1e-2


# What the edit of the stream must be.


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize(("site", "part"), [("attention", "attention"), ("mlp", "feed_forward")])
def test_removal_leaves_an_update_that_is_perpendicular_to_the_stream(kind, site, part):
    """(z + y) . z = |z|^2, with z and y as a watch sees them: raw stream, what is really added."""
    model = tiny(kind, "eager", torch.float64)
    seen = []
    with edit(model, site=site, parallel=0.0), capture.watch(capture.locate(model), seen.append):
        logits(model, words())
    chosen = [event for event in seen if event.place.kind == part]
    assert len(chosen) == 3
    for event in chosen:
        z, y = event.state, event.branch
        torch.testing.assert_close(((z + y) * z).sum(-1), z.square().sum(-1), atol=1e-9, rtol=1e-9)
        assert float(y.norm()) > 0.1
        if not event.place.parallel:
            torch.testing.assert_close(event.following, z + y, atol=1e-9, rtol=1e-9)
    others = [event for event in seen if event.place.kind != part]
    assert max(float((e.branch * e.state).sum(-1).abs().max()) for e in others) > 1e-2


@pytest.mark.parametrize("kind", EXACT)
def test_scales_reach_the_update_in_loops(kind):
    """The first sublayer of the first layer sees the unedited stream, so its update can be compared token by token."""
    model = tiny(kind, "eager", torch.float64)
    site = "attention"
    events: dict[str, list] = {"plain": [], "edited": []}
    with capture.watch(capture.locate(model), events["plain"].append):
        logits(model, words())
    with (
        edit(model, site=site, parallel=-0.5, perpendicular=1.7),
        capture.watch(capture.locate(model), events["edited"].append),
    ):
        logits(model, words())
    before, after = events["plain"][0], events["edited"][0]
    assert torch.equal(before.state, after.state)
    for b in range(2):
        for t in range(9):
            z, y = before.state[b, t], before.branch[b, t]
            along = sum(float(p * q) for p, q in zip(z, y, strict=True)) / sum(float(p * p) for p in z) * z
            torch.testing.assert_close(after.branch[b, t], -0.5 * along + 1.7 * (y - along), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", EXACT)
def test_a_block_is_edited_as_the_sum_of_its_updates_and_dropped_whole(kind):
    model, ids = tiny(kind, "eager", torch.float64), words()
    located = capture.locate(model)
    plain: list = []
    with capture.watch(located, plain.append):
        logits(model, ids)
    first = [event for event in plain if event.place.layer == 0]
    z, total = first[0].state, sum(event.branch for event in first)
    alpha = ((total * z).sum(-1) / z.square().sum(-1)).unsqueeze(-1)
    seen: list = []
    with edit(model, site="block", parallel=0.3, perpendicular=0.8, layers=[0]), capture.watch(located, seen.append):
        logits(model, ids)
    torch.testing.assert_close(seen[2].state, z + 0.3 * alpha * z + 0.8 * (total - alpha * z), atol=1e-9, rtol=1e-9)
    seen.clear()
    with edit(model, site="block", parallel=0.0, perpendicular=0.0, layers=[0]), capture.watch(located, seen.append):
        logits(model, ids)
    assert torch.equal(seen[2].state, z)


def test_the_reference_may_be_the_input_of_the_block():
    model, ids = tiny("llama", "eager", torch.float64), words()
    events: list = []
    with (
        edit(model, site="mlp", parallel=0.0, reference="block_input"),
        capture.watch(capture.locate(model), events.append),
    ):
        logits(model, ids)
    for attention, mlp in zip(events[::2], events[1::2], strict=True):
        assert (mlp.branch * attention.state).sum(-1).abs().max() < 1e-9
        assert (mlp.branch * mlp.state).sum(-1).abs().max() > 1e-3


def test_golden_numbers_of_the_stream():
    from thalweg.editing.arithmetic import Change
    from thalweg.editing.passes import Pass

    now = Pass(None, torch.zeros(1, 1, dtype=torch.long), False)
    z, y = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[2.0, 1.0]]])
    torch.testing.assert_close(Change(0, parallel=0.0).residual(z, y, now), torch.tensor([[[0.8, -0.6]]]))
    torch.testing.assert_close(Change(0, perpendicular=0.0).residual(z, y, now), torch.tensor([[[1.2, 1.6]]]))
    once = Change(0, parallel=0.5, perpendicular=2.0)
    twice = once.residual(z, once.residual(z, y, now), now)
    torch.testing.assert_close(twice, Change(0, parallel=0.25, perpendicular=4.0).residual(z, y, now))
    zero = torch.zeros_like(z)
    torch.testing.assert_close(Change(0, parallel=0.0).residual(zero, y, now), y)  # no direction, nothing along it


def test_golden_numbers_of_values():
    from thalweg.editing.arithmetic import Change
    from thalweg.editing.passes import Pass

    now = Pass(None, torch.zeros(1, 1, dtype=torch.long), False)
    o, v, own = torch.tensor([[[[1.0, 0.75]]]]), torch.tensor([[[[1.0, 1.0]]]]), torch.tensor([[[0.75]]])
    torch.testing.assert_close(Change(0, parallel=0.0).value(o, v, own, now).flatten(), torch.tensor([0.875, 0.625]))
    torch.testing.assert_close(Change(0, parallel=0.0).value(o, v, None, now).flatten(), torch.tensor([0.125, -0.125]))


# Controls.


def test_random_scales_are_drawn_by_layer_within_their_range():
    found = []
    for control in ("random", "random_normal"):
        with edit(tiny("llama"), site="value", control=control, seed=7) as facts:
            found.append([scale for scale, _ in facts.scales.values()])
        with edit(tiny("llama"), site="value", control=control, seed=7, layers="last") as facts:
            assert facts.scales[2][0] == found[-1][2]  # of a layer, whatever others are edited
        assert all(0 <= scale <= 2 for scale in found[-1]) and len(set(found[-1])) == 3
    assert found[0] != found[1]


@pytest.mark.parametrize("site", ["value", "attention"])
def test_a_random_direction_has_the_size_of_the_edit(site):
    model, ids = tiny("llama", "eager", torch.float64), words()
    events: dict[str, list] = {}
    for name, values in {
        "plain": {"parallel": 1.0},
        "edit": {"parallel": 0.0},
        "control": {"parallel": 0.0, "control": "random_direction"},
    }.items():
        events[name] = []
        with (
            edit(model, site=site, layers=[0], **values),
            capture.watch(capture.locate(model), events[name].append, values=True),
        ):
            logits(model, ids)
    of = (lambda e: e[0].values.o) if site == "value" else (lambda e: e[0].branch)
    plain, edited, control = (of(events[name]) for name in ("plain", "edit", "control"))
    torch.testing.assert_close((control - plain).norm(dim=-1), (edited - plain).norm(dim=-1), atol=1e-7, rtol=1e-6)
    cosine = torch.cosine_similarity(control[:, 1:] - plain[:, 1:], edited[:, 1:] - plain[:, 1:], dim=-1)
    assert cosine.abs().mean() < 0.6


def test_the_diagonal_control_removes_what_a_token_reads_of_itself():
    model, ids = tiny("llama", "eager", torch.float64), words()
    matrix, values = explicit(model, ids)
    own = torch.eye(9, dtype=torch.bool)
    others = matrix.masked_fill(own, 0.0)
    others[..., 0, 0] = 1.0  # the first token keeps itself
    wanted = (others / others.sum(-1, keepdim=True)) @ values
    torch.testing.assert_close(captured(model, ids, control="diagonal"), wanted.transpose(1, 2), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("site", ["attention", "value"])
def test_coefficients_are_replaced_by_the_mean_of_the_layer_or_another_token(site):
    model, ids = tiny("llama", "eager", torch.float64), words()
    located = capture.locate(model)
    plain: list = []
    with capture.watch(located, plain.append, values=True):
        logits(model, ids)

    def coefficients(event):
        if site == "attention":
            return (event.branch * event.state).sum(-1) / event.state.square().sum(-1)
        v = event.values.v.repeat_interleave(2, 2)
        return (event.values.o * v).sum(-1) / v.square().sum(-1)

    wanted = coefficients(plain[0])
    options = {"site": site, "layers": [0], **({"exclude_self": False} if site == "value" else {})}
    for name in ("layer_mean", "other_token"):
        seen: list = []
        with (
            edit(model, coefficient=name, calibration={"input_ids": ids}, **options),
            capture.watch(located, seen.append, values=True),
        ):
            logits(model, ids)
        found = coefficients(seen[0])
        if name == "layer_mean":
            torch.testing.assert_close(found, wanted.flatten(0, 1).mean(0).expand_as(found), atol=1e-6, rtol=1e-6)
        else:  # those that were measured, given to other tokens
            known = wanted.flatten(0, 1).flatten().sort().values
            gap = (found.flatten()[:, None] - known[None]).abs().amin(-1)
            assert gap.max() < 1e-6 and not torch.allclose(found, wanted, atol=1e-3)
        rest = (
            (lambda e: e.branch - coefficients(e).unsqueeze(-1) * e.state)
            if site == "attention"
            else (lambda e: e.values.o - coefficients(e).unsqueeze(-1) * e.values.v.repeat_interleave(2, 2))
        )
        torch.testing.assert_close(rest(seen[0]), rest(plain[0]), atol=1e-6, rtol=1e-6)


def test_the_sum_of_updates_is_edited_alike_where_a_block_has_no_step_of_its_own(monkeypatch):
    """With a multiplier on the updates: as the sum of branches, and as what the block's output has more than its input."""
    model, ids = tiny("granite", "eager", torch.float64), words()
    located = capture.locate(model)
    found = []
    for streams in (1, 2):  # of several streams the sum is taken
        monkeypatch.setattr(
            "thalweg.editing.editor.locate", lambda *_, n=streams: dataclasses.replace(located, streams=n)
        )
        with edit(model, site="block", parallel=0.3, perpendicular=0.8):
            found.append(logits(model, ids))
    torch.testing.assert_close(*found, atol=1e-9, rtol=1e-9)
    assert (found[0] - logits(model, ids)).abs().max() > 1e-2


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("site", ["value", "attention", "mlp", "block"])
def test_what_padding_adds_is_not_touched(site, side):
    """In the first layer nothing else differs, so what is added at padded places is what it was, bit by bit."""
    model, batch = tiny("llama"), padded(words(), side)
    ids, padding = batch.pop("input_ids"), ~batch["attention_mask"].bool()
    found: dict[bool, list] = {True: [], False: []}
    for edited in (True, False):
        scales = {"parallel": -2.0, "perpendicular": 0.5} if edited else {}
        with edit(model, site=site, layers=[0], **scales), capture.watch(capture.locate(model), found[edited].append):
            logits(model, ids, **batch)
    before, after = (found[edited][1 if site == "mlp" else 0] for edited in (False, True))
    if site == "block":
        assert torch.equal(found[True][2].state[padding], found[False][2].state[padding])
        return
    assert torch.equal(after.branch[padding], before.branch[padding])
    assert not torch.equal(after.branch[~padding], before.branch[~padding])
