"""What is measured of a model: mixing replaced and put back, gradients by depth, whether coefficients moved."""

import math

import pytest
import torch

from thalweg import connections, mixers
from thalweg.connections import Site
from thalweg.models import Decoder, DecoderConfig
from thalweg.models.trace import StreamTrace
from thalweg.training.diagnostics import Movement
from thalweg.training.geometry import mixing_of
from thalweg.training.gradients import entering, gradient_rows
from thalweg.training.replacing import losses_of, replacements

VOCAB, DEPTH, N = 13, 3, 3


def model_of(connection="mhc", seed=0, **options):
    single = connection in ("additive", "denseformer", "attention_residuals")
    options = options if single else {"streams": N, "projection_std": 0.5, **options}
    config = DecoderConfig(
        vocab_size=VOCAB,
        width=16,
        depth=DEPTH,
        heads=2,
        connection=connection,
        connection_options=options,
        tie_embeddings=False,
    )
    model = Decoder(config, generator=torch.Generator().manual_seed(seed)).double().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():  # away from the start, where streams are nearly copies
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def batches_of(count=2, rows=3, length=7):
    generator = torch.Generator().manual_seed(9)
    made = []
    for _ in range(count):
        ids = torch.randint(VOCAB, (rows, length), generator=generator)
        labels = ids.clone()
        labels[:, :3] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def only(rows, **fields):
    found = list(rows.where(**fields))
    assert len(found) == 1, (fields, len(found))
    return found[0]


def test_losses_by_sequence_are_the_loss_of_the_model():
    model, batches = model_of(), batches_of()
    found = losses_of(model, batches)
    whole = {name: torch.cat([b[name] for b in batches]) for name in ("input_ids", "labels")}
    expected = model(whole["input_ids"], labels=whole["labels"]).loss.item()
    assert found.mean == pytest.approx(expected, rel=1e-12)
    assert found.scored.tolist() == [4] * 6


@pytest.mark.parametrize("connection", ["mhc", "hyper_connections", "mhc_delta"])
def test_replacing_is_what_a_forced_matrix_does_and_is_undone(connection):
    model, batches = model_of(connection), batches_of()
    before = losses_of(model, batches)
    rows, plain = replacements(model, batches)
    assert torch.equal(plain.nats, before.nats) and torch.equal(plain.scored, before.scored)
    assert torch.equal(losses_of(model, batches).nats, before.nats)
    eye = torch.eye(N, dtype=torch.float64)
    for chosen, place in (
        ([2], "layers.1.attention"),
        ([0, 1], "first third (layers 0-0)"),
        ([4, 5], "last third (layers 2-2)"),
    ):
        for index in chosen:
            model.stream.sites[index].force_mix(eye)
        after = losses_of(model, batches)
        for index in chosen:
            model.stream.sites[index].force_mix(None)
        row = only(rows, measure="mixer_replaced.identity", site=place)
        assert row.value == pytest.approx(after.mean - before.mean, rel=1e-5) and abs(row.value) > 1e-6
        assert row.n == 6 and row.null == 0 and row.unit == "nats/token" and row.low < row.value < row.high
        assert (row.layer is None) == (len(chosen) > 1)
    assert only(rows, measure="mixer_replaced.identity", site=f"all layers (0-{DEPTH - 1})").layer is None
    assert len(rows) == 2 * (2 * DEPTH + 3)


def test_the_token_mean_is_that_of_the_unchanged_pass_over_all_tokens():
    model, batches = model_of(), batches_of()
    mixes = []
    for batch in batches:
        trace = StreamTrace()
        with torch.no_grad():
            model(batch["input_ids"], trace=trace)
        mixes.append(mixing_of(model, trace.records[3]).mix)
    assert torch.cat(mixes).flatten(0, 1).std(0).max() > 1e-3  # else there is nothing to average
    before = losses_of(model, batches)
    model.stream.sites[3].force_mix(torch.cat(mixes).mean((0, 1)))
    after = losses_of(model, batches)
    model.stream.sites[3].force_mix(None)
    row = only(replacements(model, batches).rows, measure="mixer_replaced.token_mean", site="layers.1.feed_forward")
    assert row.value == pytest.approx(after.mean - before.mean, rel=1e-4) and abs(row.value) > 1e-6


def test_static_mixing_is_its_own_mean_and_the_identity_its_own_identity():
    for kind, options in (("token_mean", {"dynamic": False}), ("identity", {"mixer": "identity"})):
        rows = replacements(model_of(**options), batches_of(1)).rows
        assert max(abs(row.value) for row in rows.where(measure=f"mixer_replaced.{kind}")) < 1e-6


def test_passes_are_told_and_single_streams_have_none():
    told = []
    replacements(model_of(), batches_of(1), lambda done, of: told.append((done, of)))
    assert told == [(i, 18) for i in range(1, 19)]
    for model in (model_of("additive"), model_of(streams=1)):
        found = replacements(model, batches_of(1))
        assert not len(found.rows) and found.plain.mean == losses_of(model, batches_of(1)).mean


@pytest.mark.parametrize("connection", ["additive", "mhc"])
def test_gradient_rows_are_slopes_of_the_loss(connection):
    model, batch = model_of(connection), batches_of(1)[0]
    rows = gradient_rows(model, batch["input_ids"], batch["labels"])
    assert all(p.grad is None for p in model.parameters())
    assert len(rows.where(measure="gradient_norm").to_rows()) == 2 * DEPTH
    assert bool(rows.where(measure="gradient_norm.common").to_rows()) == (connection == "mhc")
    embedding = model.embedding.weight
    loss = model(batch["input_ids"], labels=batch["labels"]).loss
    (by_token,) = torch.autograd.grad(loss, embedding)
    trace = StreamTrace()
    loss = model(batch["input_ids"], labels=batch["labels"], trace=trace).loss
    (gradient,) = torch.autograd.grad(loss, trace.records[0].state_before)
    row = only(rows, measure="gradient_norm", site="layers.0.attention")
    assert row.value == pytest.approx(gradient.norm().item(), rel=1e-12)
    summed = gradient if connection == "additive" else gradient.sum(2)
    rebuilt = torch.zeros_like(embedding).index_add_(0, batch["input_ids"].flatten(), summed.flatten(0, 1))
    assert torch.allclose(
        rebuilt, by_token, atol=1e-12
    )  # a copy in every stream: the common gradient is the embedding's
    if connection == "mhc":
        common = only(rows, measure="gradient_norm.common", site="layers.0.attention")
        assert common.value == pytest.approx(summed.norm().item(), rel=1e-12)
    assert only(rows, measure="gradient_norm.slope").n == 2 * DEPTH


@pytest.mark.parametrize(
    ("connection", "options"),
    [("denseformer", {}), ("denseformer", {"period": 2}), ("attention_residuals", {}), ("attention_residuals", {"block_size": 2})],
)  # fmt: skip
def test_states_that_hold_earlier_ones_have_a_gradient_for_each(connection, options):
    """At the first site they add up to that of the embedding; at every site each is the slope of what follows, with the others held."""
    model, batch = model_of(connection, **options), batches_of(1)[0]
    rows = gradient_rows(model, batch["input_ids"], batch["labels"])
    assert all(p.grad is None for p in model.parameters())
    assert not any({"read", "write"} & set(vars(site)) for site in model.stream.sites)
    newest = {row.site: row.value for row in rows.where(measure="gradient_norm")}
    kept = {(row.site, row.stream): row.value for row in rows.where(measure="gradient_norm.history")}
    assert len(newest) == 2 * DEPTH and only(rows, measure="gradient_norm.slope").n == 2 * DEPTH
    counts = [sum(site == place for site, _ in kept) for place in newest]
    block = options.get("block_size", 1)
    assert counts == (
        [1 + i // 2 for i in range(6)] if connection == "denseformer" else [-(-i // block) for i in range(6)]
    )
    loss, entered = entering(model, batch["input_ids"], batch["labels"])
    assert loss.item() == pytest.approx(losses_of(model, [batch]).mean, rel=1e-12)
    first = [entered[0].newest, *entered[0].history]
    gradients = torch.autograd.grad(loss, first, retain_graph=True, allow_unused=True)
    total = sum(g for g in gradients if g is not None).flatten(0, 1)
    embedding = model.embedding.weight
    (by_token,) = torch.autograd.grad(
        model(batch["input_ids"], labels=batch["labels"]).loss, embedding, retain_graph=True
    )
    rebuilt = torch.zeros_like(embedding).index_add_(0, batch["input_ids"].flatten(), total)
    assert torch.allclose(rebuilt, by_token, atol=1e-12)
    index, site = 3, model.stream.sites[3]
    asked = [entered[index].newest, *entered[index].history]
    found = torch.autograd.grad(loss, asked, allow_unused=True)
    step = 1e-6 * torch.randn(asked[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for part, gradient in enumerate(found):
        up, down = (moved_loss(model, batch, site, part, sign * step) for sign in (1, -1))
        expected = 0.0 if gradient is None else (gradient * step).sum().item()
        assert (up - down) / 2 == pytest.approx(expected, rel=1e-4, abs=1e-13)
        name = f"layers.{site.site.layer}.{site.site.kind}"
        value = newest[name] if part == 0 else kept[name, part - 1]
        assert value == pytest.approx(0.0 if gradient is None else gradient.norm().item(), rel=1e-9)


def moved_loss(model, batch, site, part, step):
    """The loss when one tensor of the state that enters ``site`` is moved, and the others are not."""
    read, write, seen = site.read, site.write, []

    def place(state):
        newest, history = site.parts(state)
        wanted = newest if part == 0 else history[part - 1]
        return next(i for i, x in enumerate(state) if x is wanted)

    def reading(state, tokens=None):
        own = tuple(x.view_as(x) for x in state)
        at = place(own)
        seen.append((*own[:at], own[at] + step, *own[at + 1 :]))
        return read(seen[-1], tokens)

    site.read, site.write = reading, lambda state, update, context: write(seen[-1], update, context)
    try:
        with torch.no_grad():
            return model(batch["input_ids"], labels=batch["labels"]).loss.item()
    finally:
        del site.read, site.write


def test_movement_of_each_kind_of_coefficient():
    model, batch = model_of(), batches_of(1)[0]
    movement = Movement(model)
    site = model.stream.sites[2]
    with torch.no_grad():
        site.logits["mix"].bias += 0.5
        model.stream.sites[3].logits["mix"].bias -= 0.25
    model(batch["input_ids"], labels=batch["labels"]).loss.backward()
    found = movement.by_coefficient(model, step=7, scale=0.5)
    at = {(row.measure, row.layer, row.branch): row for row in found}
    assert {row.step for row in found} == {7}
    assert {kind for _, _, kind in at} == {
        f"{f}.{p}" for f in ("read", "write", "mix") for p in ("bias", "alpha", "projection")
    }
    distance = at["coefficient_distance", 1, "mix.bias"].value
    assert distance == pytest.approx(math.sqrt(N * N * (0.5**2 + 0.25**2)))
    size = math.sqrt(sum(movement.start[f"stream.sites.{i}.logits.mix.bias"].square().sum().item() for i in (2, 3)))
    assert at["coefficient_distance.relative", 1, "mix.bias"].value == pytest.approx(distance / size)
    assert at["coefficient_distance", 0, "mix.bias"].value == at["coefficient_distance", 1, "read.bias"].value == 0
    gradient = math.sqrt(sum(model.stream.sites[i].logits["read"].bias.grad.square().sum().item() for i in (2, 3)))
    assert at["coefficient_gradient_norm", 1, "read.bias"].value == pytest.approx(gradient / 0.5)
    assert Movement(model_of("additive")).by_coefficient(model_of("additive"), 1) == []


@pytest.mark.parametrize("name", connections.names())
def test_sites_that_mix_say_how_and_others_do_not(name):
    stream = connections.create(name, width=8, sites=Site.decoder(1)).double()
    site = stream.sites[0]
    state = stream.enter(torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    _, context = site.read(state)
    mixing = site.mixing(state, context)
    assert (mixing is not None) == site.mixes
    if mixing is None:
        with pytest.raises(NotImplementedError):
            site.force_mix(torch.eye(2))
        return
    n = stream.observe(state).shape[2]
    assert mixing.mix.shape == (2, 5, n, n) and mixing.read.shape == (2, 5, n)
    site.force_mix(torch.full((n, n), 0.5, dtype=torch.float64))
    assert torch.equal(site.mixing(state, site.read(state)[1]).mix, torch.full((2, 5, n, n), 0.5, dtype=torch.float64))


def test_logits_are_those_behind_the_matrix():
    model = model_of()
    trace = StreamTrace()
    with torch.no_grad():
        model(batches_of(1)[0]["input_ids"], trace=trace)
    mixing = mixing_of(model, trace.records[1])
    mixer = mixers.create("sinkhorn", streams=N)
    assert torch.allclose(mixer(mixing.logits), mixing.mix, atol=1e-12)
