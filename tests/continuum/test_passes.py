"""One pass for several probes: the same numbers as each alone, one reading of the text, and none that takes another with it."""

import copy

import probe_subjects as subjects
import pytest
import torch
from tiny_families import tiny

from thalweg import connections
from thalweg.capture import locate
from thalweg.capture.windows import cut
from thalweg.continuum import depth_flow, findings, horizon, registry, rmsnorm, splitting
from thalweg.continuum.passes import Collector, read

SHARING = ["depth_flow", "horizon", "rmsnorm", "splitting"]
OPTIONS = {"splitting": {"refine_tokens": 0}, "horizon": {"lengths": [16]}}


def probed(model, only=SHARING, **more):
    return findings(
        model, subjects.texts(4, 20), only, length=16, options={k: OPTIONS[k] for k in OPTIONS if k in only}, **more
    )


def plain(finding):
    return (finding.failed, finding.not_applicable, finding.summary, finding.caveats, finding.rows.to_rows())


def passes(model):
    """Counts the tokens that a model reads."""
    seen = []
    handle = model.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append((args[0] if args else kwargs["input_ids"]).numel()), with_kwargs=True
    )
    return seen, handle


@pytest.mark.parametrize("make", [lambda: subjects.llama().bfloat16(), subjects.bert, subjects.ours])
def test_together_is_alone_bit_by_bit(make):
    """Would catch a hook that sees the calls that fields make, and a collector that reads what another changed."""
    model = make()
    together = probed(model)[1:]
    for one in together:
        assert plain(one) == plain(probed(model, [one.probe])[-1])
    assert any(len(one.rows) for one in together)


@pytest.mark.parametrize("connection", connections.names())
def test_every_connection_of_ours(connection):
    """All that look at one pass, and the bridge; ``reaction`` has a test of its own for every connection, ``rotary`` knows of none."""
    model = subjects.ours(connection)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = findings(model, subjects.texts(4, 20), ["bridge", *SHARING], length=16, options=OPTIONS)
    assert [one.failed for one in found] == [""] * len(found)
    for one in found[1:]:
        assert bool(one.rows) != bool(one.not_applicable), one.probe
    assert {one.probe for one in found if one.rows} >= {"capture", "bridge", "depth_flow", "horizon"}
    flow = next(one.rows for one in found if one.probe == "depth_flow")
    assert len(flow.where(measure="depth.speed")) == 2 and len(flow.where(measure="depth.energy")) == 3
    assert all(x.equal(model.state_dict()[name]) for name, x in before.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_text_is_read_once():
    model = subjects.llama()
    seen, handle = passes(model)
    probed(model, ["rmsnorm"])
    alone, seen[:] = sum(seen), []
    told = []
    probed(
        model,
        ["depth_flow", "rmsnorm", "splitting"],
        listen=lambda name, one: told.append(name) if one is None else None,
    )
    handle.remove()
    assert sum(seen) == alone
    assert told == ["one pass over the text for depth_flow, rmsnorm, splitting", "depth_flow", "rmsnorm", "splitting"]


def test_another_size_of_batch_is_another_pass():
    options = {"rmsnorm": {"batch_size": 2}, "splitting": {"refine_tokens": 0}}
    model = subjects.llama()
    found = findings(model, subjects.texts(4, 20), ["depth_flow", "rmsnorm", "splitting"], length=16, options=options)
    again = findings(model, subjects.texts(4, 20), ["rmsnorm"], length=16, options={"rmsnorm": {"batch_size": 2}})
    assert plain(found[2]) == plain(again[-1])


@pytest.mark.parametrize("method", ["begin", "site", "end"])
def test_a_collector_that_raises_leaves_the_others(method, monkeypatch):
    def wrong(self, *_):
        raise ValueError("not this one")

    wanted = [plain(one) for one in probed(subjects.llama())]
    monkeypatch.setattr(depth_flow._Paths, method, wrong)
    found = probed(subjects.llama())
    assert found[1].failed == "ValueError: not this one"
    assert [plain(one) for one in found[2:]] == wanted[2:]


def test_a_field_that_is_none_ends_the_probe_of_fields_alone():
    model = copy.deepcopy(tiny("llama"))
    calls = []
    model.model.layers[0].mlp.register_forward_hook(
        lambda m, args, out: out * (1 + len(calls)) if not calls.append(1) else None
    )
    found = findings(
        model,
        subjects.texts(4, 20),
        ["depth_flow", "splitting"],
        length=16,
        options={"splitting": {"refine_tokens": 0}},
    )
    assert len(found[1].rows) and "no function of the stream" in found[2].failed


def test_a_pass_that_fails_is_made_for_each_alone(monkeypatch):
    from thalweg.continuum import running

    def wrong(*_, **__):
        raise RuntimeError("the pass")

    wanted = [plain(one) for one in probed(subjects.llama())]
    monkeypatch.setattr(running, "read", wrong)
    assert [plain(one) for one in probed(subjects.llama())] == wanted


def test_seconds_add_up_to_what_it_took():
    import time

    began = time.perf_counter()
    found = probed(subjects.llama())
    assert 0 < sum(one.seconds for one in found[1:]) <= time.perf_counter() - began


def test_a_collector_of_a_third_party():
    class Sizes(Collector):
        needs = frozenset({"sites", "inputs"})
        modules = ("model.norm",)
        sites, given_to, begun, ended = 0, 0, 0, 0

        def begin(self, batch):
            self.begun += 1

        def site(self, event):
            self.sites += 1

        def given(self, module, x):
            self.given_to += module == "model.norm"

        def end(self, batch):
            self.ended += 1

    model, one = subjects.llama(), Sizes()
    text = cut(subjects.texts(6), None, 16, None)
    result = read(locate(model), text, {"sizes": one}, 4)
    batches = -(-len(text.windows) // 4)
    assert (one.begun, one.ended, one.given_to, one.sites) == (batches, batches, batches, 4 * batches)
    assert not result.failed and result.seconds["sizes"] > 0 and result.rest > 0


def test_shipped_probes_say_what_they_need():
    assert rmsnorm._Inputs.needs == {"inputs"} and horizon._Sinks.needs == {"attention"}
    assert depth_flow._Paths.needs == {"sites"} and splitting._Torsion.needs == {"layers"}
    with torch.no_grad():  # a probe that makes passes of its own shares none
        assert registry["bridge"].run is not registry["rmsnorm"].run
