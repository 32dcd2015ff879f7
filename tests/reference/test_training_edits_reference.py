"""Edits inside our decoder against loops written from the definitions, outputs and all gradients in float64; mutants that must be found out."""

import math

import pytest
import torch

import thalweg.models.along as along
import thalweg.models.sublayers.attention as attention_module
from thalweg import connections
from thalweg.connections import Requirements
from thalweg.connections.base import reference_norm
from thalweg.models import Decoder, DecoderConfig
from thalweg.models.look import look
from thalweg.models.sublayers import Attention
from thalweg.ops.value_edit import value_edit

B, T, WIDTH, HEADS, KV = 2, 4, 8, 4, 2
W = WIDTH // HEADS


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def stirred(module, seed=0, size=0.4):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


# the sublayer


def attention_of(edit, **changes):
    """Positions are learned, so that nothing is rotated and the loops below are all of it."""
    cfg = DecoderConfig(
        vocab_size=5,
        width=WIDTH,
        depth=1,
        heads=HEADS,
        kv_heads=KV,
        positions="learned",
        attention_edit=edit,
        **changes,
    )
    _, view = look(cfg, torch.float64, torch.zeros(B, T, dtype=torch.long), None, None, None, None)
    return stirred(Attention(cfg, Requirements(), 0).double()), view


def in_loops(sublayer, x, scales, *, exclude_self, group):
    """o_h = sum_s A_ts v_s; each group of heads projected as one vector on its values; the output map behind it."""
    parallel, perpendicular = scales
    size = {"head": 1, "kv": HEADS // KV, "all": HEADS}[group]
    rows = []
    for b in range(B):
        q, k, v = (
            [[layer(x[b, t])[i * W : (i + 1) * W] for i in range(count)] for t in range(T)]
            for layer, count in ((sublayer.query, HEADS), (sublayer.key, KV), (sublayer.value, KV))
        )
        for t in range(T):
            own, others, reference = [], [], []
            for h in range(HEADS):
                at = h // (HEADS // KV)
                scores = [torch.exp((q[t][h] * k[s][at]).sum() / math.sqrt(W)) for s in range(t + 1)]
                weights = [score / sum(scores) for score in scores]
                o = sum(weight * v[s][at] for s, weight in enumerate(weights))
                d = weights[t] * v[t][at] if exclude_self else torch.zeros(W, dtype=x.dtype)
                own.append(d)
                others.append(o - d)
                reference.append(v[t][at])
            out = []
            for h in range(HEADS):
                joint = range(h // size * size, (h // size + 1) * size)
                beta = sum((others[g] * reference[g]).sum() for g in joint) / sum(
                    (reference[g] ** 2).sum() for g in joint
                )
                part = beta * reference[h]
                out.append(own[h] + parallel[h] * part + perpendicular[h] * (others[h] - part))
            rows.append(sublayer.output(torch.cat(out)))
    return torch.stack(rows).view(B, T, WIDTH)


def of(scale):
    """A scale of the module, one for each head."""
    found = scale(torch.zeros(1, dtype=torch.float64))
    return [found] * HEADS if isinstance(found, float) else list(found.expand(HEADS))


EDITS = {
    "value:full:0": (False, "head"),
    "value:exclude-self:0.3": (True, "head"),
    "value:full:0.3,perpendicular=1.4,group=kv": (False, "kv"),
    "value:exclude-self:-0.5,perpendicular=0.6,group=all": (True, "all"),
    "value:exclude-self:learned,perpendicular=learned,per=head": (True, "head"),
    "value:full:learned": (False, "head"),
}


def agrees(edit):
    exclude_self, group = EDITS[edit]
    sublayer, view = attention_of(edit)
    x, names = gaussian(B, T, WIDTH, seed=3).requires_grad_(), dict(sublayer.named_parameters())
    ours = sublayer(x, view)
    scales = of(sublayer.edit.parallel), of(sublayer.edit.perpendicular)
    theirs = in_loops(sublayer, x, scales, exclude_self=exclude_self, group=group)
    cotangent = gaussian(B, T, WIDTH, seed=4)
    mine, wanted = (
        torch.autograd.grad(out, [x, *names.values()], cotangent, allow_unused=True, materialize_grads=True)
        for out in (ours, theirs)
    )
    pairs = [(ours, theirs), *zip(mine, wanted, strict=True)]
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-10) for a, b in pairs)


@pytest.mark.parametrize("edit", EDITS)
def test_attention_equals_the_loops(edit):
    assert agrees(edit)


def element_by_element(o, v, *rest, **more):
    """The bug of the first published tables: values expanded along the flat axis, not by heads."""
    wrong = v.flatten(2).repeat_interleave(o.shape[2] // v.shape[2], -1).view_as(o)
    return value_edit(o, wrong, *rest, **more)


def tiled(o, v, *rest, **more):
    return value_edit(o, v.repeat(1, 1, o.shape[2] // v.shape[2], 1), *rest, **more)


def detached(o, v, parallel, perpendicular, own, group):
    return value_edit(o, v.detach(), parallel, perpendicular, own, group)


def output_detached(o, v, parallel, perpendicular, own, group):
    return o + (value_edit(o.detach(), v, parallel, perpendicular, own, group) - o.detach())


@pytest.mark.parametrize("mutant", [element_by_element, tiled, detached, output_detached])
@pytest.mark.parametrize("edit", ["value:full:0", "value:exclude-self:0.3"])
def test_a_wrong_expansion_or_gradient_is_found_out(mutant, edit, monkeypatch):
    monkeypatch.setattr("thalweg.models.retained.value_edit", mutant)
    assert not agrees(edit)


@pytest.mark.parametrize("kernel", [True, False], ids=["with the softmax", "scores made again"])
def test_exclude_self_without_the_own_weight_is_found_out(kernel, monkeypatch):
    monkeypatch.setattr(attention_module, "can_attend", lambda *_: kernel)
    assert agrees("value:exclude-self:0.3")
    replace_own(kernel, monkeypatch, torch.zeros_like)
    assert not agrees("value:exclude-self:0.3")


@pytest.mark.parametrize("kernel", [True, False], ids=["with the softmax", "scores made again"])
def test_own_weights_without_their_gradient_are_found_out(kernel, monkeypatch):
    monkeypatch.setattr(attention_module, "can_attend", lambda *_: kernel)
    replace_own(kernel, monkeypatch, torch.Tensor.detach)
    assert not agrees("value:exclude-self:0.3")


def replace_own(kernel, monkeypatch, change):
    """Another weight of a token on itself than the one that was computed."""
    if kernel:
        both = attention_module.attention_and_own

        def changed(*given, **named):
            output, own = both(*given, **named)
            return output, change(own)

        monkeypatch.setattr(attention_module, "attention_and_own", changed)
    else:
        alone = attention_module.own_attention
        monkeypatch.setattr(attention_module, "own_attention", lambda *given, **named: change(alone(*given, **named)))


def test_an_edit_behind_the_output_map_is_found_out(monkeypatch):
    def behind(self, x, view, cache=None):
        edit, self.edit = self.edit, None
        y = plain(self, x, view, cache)
        self.edit = edit
        return edit(self.split(y).transpose(1, 2), self.split(self.value(x)).transpose(1, 2)).flatten(2)

    plain = Attention.forward
    assert agrees("value:full:0")
    monkeypatch.setattr(Attention, "forward", behind)
    assert not agrees("value:full:0")


def test_a_gate_acts_on_what_the_edit_left():
    """Qiu et al.: the gate is on the attention output; behind the gate the value is no reference any more."""
    sublayer, view = attention_of("value:full:0", attention_gate="element")
    x = gaussian(B, T, WIDTH, seed=3)
    gate = torch.sigmoid(sublayer.gate(x)).view(B, T, HEADS, W)
    bare, _ = attention_of("value:full:0")
    bare.load_state_dict({n: p for n, p in sublayer.state_dict().items() if not n.startswith("gate")})
    seen = []
    bare.output.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    bare(x, view)
    torch.testing.assert_close(sublayer(x, view), sublayer.output((seen[0].view(B, T, HEADS, W) * gate).flatten(2)))


# the stream


def stack_of(name, options, edits):
    cfg = DecoderConfig(
        vocab_size=5, width=WIDTH, depth=2, heads=HEADS, connection=name, connection_options=options, **edits
    )
    return stirred(Decoder(cfg, generator=torch.Generator().manual_seed(0)).double().stream)


def update_of(x, seed):
    weight = gaussian(WIDTH, WIDTH, seed=seed)
    return torch.tanh(x @ weight)


def edited_in_loops(u, r, parallel, perpendicular):
    out = torch.empty_like(u)
    for b in range(u.shape[0]):
        for t in range(u.shape[1]):
            along_it = (u[b, t] * r[b, t]).sum() / (r[b, t] * r[b, t]).sum() * r[b, t]
            out[b, t] = parallel * along_it + perpendicular * (u[b, t] - along_it)
    return out


def additive_in_loops(stream, x, scales):
    """x' = x + edited(norm(F(norm(x)))), along x."""
    rows = lambda norm, y: torch.stack([torch.stack([reference_norm(norm, row) for row in part]) for part in y])  # noqa: E731
    for i, site in enumerate(stream.sites):
        u = rows(site.update_norm, update_of(rows(site.input_norm, x), i))
        x = x + (u if scales[i] is None else edited_in_loops(u, x, *scales[i]))
    return rows(stream.final_norm, x)


def mhc_in_loops(stream, plain, x, scales):
    """The streams of mHC as its own verbs make them; what a site reads is the sum that goes into its norm."""
    state = plain.enter(x)
    for i, site in enumerate(plain.sites):
        read, context = site.read(state)
        raw = sum(context.read[..., n, None] * state[:, :, n] for n in range(state.shape[2]))
        u = update_of(read, i)
        state = site.write(state, u if scales[i] is None else edited_in_loops(u, raw, *scales[i]), context)
    return plain.leave(state)


SCALES = dict(
    enumerate([(0.0, 1.0), (0.4, 1.3), None, (0.4, 1.3)])
)  # of the sites; the attention of layer 1 is not edited
EDITED = {
    "attention_edit": {"space": "residual", "parallel": [0.0, 1.0]},
    "mlp_edit": {"space": "residual", "parallel": 0.4, "perpendicular": 1.3},
}
STREAMS = {
    "additive": {},
    "additive, sandwich": {"update_norm": True},
    "mhc": {"streams": 3, "mixer_options": {"iterations": 2}},
}


def stream_agrees(case):
    name, options = case.partition(",")[0], STREAMS[case]
    stream = stack_of(name, options, EDITED)
    plain = stack_of(name, options, {})
    x, names = gaussian(B, T, WIDTH, seed=5).requires_grad_(), dict(stream.named_parameters())
    ours = stream(x, [lambda y, i=i: update_of(y, i) for i in range(4)])
    if name == "mhc":
        theirs, other = mhc_in_loops(stream, plain, x, SCALES), dict(plain.named_parameters())
    else:
        theirs, other = additive_in_loops(plain, x, SCALES), dict(plain.named_parameters())
    assert names.keys() == other.keys()
    cotangent = gaussian(B, T, WIDTH, seed=6)
    mine = torch.autograd.grad(ours, [x, *names.values()], cotangent, allow_unused=True, materialize_grads=True)
    wanted = torch.autograd.grad(theirs, [x, *other.values()], cotangent, allow_unused=True, materialize_grads=True)
    pairs = [(ours, theirs), *zip(mine, wanted, strict=True)]
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-10) for a, b in pairs)


@pytest.mark.parametrize("case", STREAMS)
def test_the_stream_equals_the_loops(case):
    assert stream_agrees(case)


def normalised(self, x):
    """The reference is what the norm gave, not the raw stream."""
    self.seen = super(along.ReadNorm, self).forward(x)
    return self.seen


def reference_detached(self, x):
    self.seen = x.detach()
    return super(along.ReadNorm, self).forward(x)


def before_the_update_norm(self, x):
    if self.reference is None:
        return super(along.WriteNorm, self).forward(x)
    self.used = True
    return super(along.WriteNorm, self).forward(self.edit.along(x, self.reference))


@pytest.mark.parametrize("case", STREAMS)
@pytest.mark.parametrize("mutant", [normalised, reference_detached])
def test_another_reference_is_found_out(case, mutant, monkeypatch):
    """The normalised input has another direction where the norm has a weight, and no way for gradients to the length of the stream."""
    monkeypatch.setattr(along.ReadNorm, "forward", mutant)
    assert not stream_agrees(case)


def test_an_edit_before_the_update_norm_is_found_out(monkeypatch):
    monkeypatch.setattr(along.WriteNorm, "forward", before_the_update_norm)
    assert stream_agrees("additive") and not stream_agrees("additive, sandwich")


def test_the_edit_of_another_site_is_found_out(monkeypatch):
    monkeypatch.setitem(SCALES, 1, SCALES[2])
    monkeypatch.setitem(SCALES, 2, (0.4, 1.3))
    assert not stream_agrees("additive")


@pytest.mark.parametrize("name", connections.names())
def test_every_connection_can_be_edited_along_what_it_reads(name):
    """Removed means gone: what each site is handed on to write has no part along what the site read."""
    options = {"window": 3, "rank": 2} if name == "tangent_projector" else {}
    stream = stack_of(name, options, {"attention_edit": "residual:0", "mlp_edit": "residual:0"})
    plain = stack_of(name, options, {})
    state = stream.enter(gaussian(B, T, WIDTH, seed=5))
    for i, (site, bare) in enumerate(zip(stream.sites, plain.sites, strict=True)):
        read, context = site.read(state)
        found, inner = bare.read(state)
        torch.testing.assert_close(read, found, rtol=1e-12, atol=0)
        update = update_of(read, i)
        reference = context[1]
        left = edited_in_loops(bare.update_norm(update), reference, 0.0, 1.0)
        handle = bare.update_norm.register_forward_hook(lambda *_, left=left: left)
        after, wanted = site.write(state, update, context), bare.write(state, update, inner)
        handle.remove()
        for mine, theirs in zip(connections.base.tensors_of(after), connections.base.tensors_of(wanted), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
        assert (left * reference).sum(-1).abs().max() < 1e-10 < (update * reference).sum(-1).abs().max()
        state = after
