"""Streams side by side: published initial values, parameter counts, options, sizes and shapes that break careless code."""

import pytest
import torch

from thalweg import connections, mixers
from thalweg.connections import Site
from thalweg.errors import InputError, ShapeError
from thalweg.testing import check_connection
from thalweg.testing.subjects import scramble
from thalweg.training.optim import make_groups


def stream_of(name="mhc", *, width=8, depth=2, **options):
    torch.manual_seed(0)
    return connections.create(name, width=width, sites=Site.decoder(depth), **options).double()


def sublayers(stream, seed=1):
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.randn(stream.width, stream.width, generator=generator, dtype=torch.float64) * stream.width**-0.5
        for _ in stream.sites
    ]
    return [lambda x, w=w: torch.tanh(x.to(w.dtype) @ w).to(x.dtype) for w in weights]


def embedding_of(width=8, batch=2, length=5):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize(("width", "count"), [(1280, 122_907), (1920, 184_347), (2560, 245_787), (4096, 393_243)])
def test_parameters_of_a_site_are_those_of_the_paper(width, count):
    """n C (n^2 + 2n) + (n^2 + 2n) + 3 at n = 4."""
    with torch.device("meta"):
        site = connections.registry["mhc"](width, Site.decoder(1), connections.make_options("mhc", {})).sites[0]
    assert sum(p.numel() for p in site.logits.parameters()) == count


def test_initial_values_are_those_of_the_appendix():
    """A.6: read sigma(+-3) with the home stream at +3, write 1, mix diagonal 0.9926."""
    stream = stream_of(depth=3)
    for index, site in enumerate(stream.sites):
        state = stream.enter(embedding_of())
        found = site.read(state)[1]
        read = found.read[0, 0]
        assert read.argmax() == index % 4
        assert read.sum().item() == pytest.approx(1.094852, abs=1e-6)
        assert read.max().item() == pytest.approx(0.952574, abs=1e-6)
        assert torch.equal(found.write, torch.ones_like(found.write))
        assert found.mix[0, 0].diagonal().mean().item() == pytest.approx(0.992618633, abs=1e-9)
        assert found.mix[0, 0, 0, 1].item() == pytest.approx(0.002460456, abs=1e-9)
        assert [family.alpha.tolist() for family in site.logits.values()] == [[pytest.approx(0.01)]] * 3


def test_hyper_connections_start_with_one_hot_reads_and_the_identity():
    stream = stream_of("hyper_connections", depth=3)
    for index, site in enumerate(stream.sites):
        found = site.read(stream.enter(embedding_of()))[1]
        assert found.read[0, 0].tolist() == [float(i == index % 4) for i in range(4)]
        assert found.write[0, 0].tolist() == [1.0] * 4
        assert torch.equal(found.mix[0, 0], torch.eye(4, dtype=torch.float64))


def rows_sum_to_one_at_start(name):
    mixer = mixers.create(name, streams=4).double()
    return bool(((mixer(mixer.start().double()).sum(-1) - 1).abs() < 1e-9).all())


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("mixer", mixers.names())
def test_the_untrained_network_is_the_pre_norm_network(mixer, dynamic):
    """With every mixer whose rows sum to one at the start, at A.6 initial values; a mixer that does not says so."""
    stream = stream_of(mixer=mixer, depth=6, dynamic=dynamic)
    claim = stream.equals_at_start()
    assert (claim is not None) == rows_sum_to_one_at_start(mixer)
    twin = stream_of("additive", depth=6)
    x, layers = embedding_of(), sublayers(stream)
    difference = (stream(x, layers) - twin(x, layers)).abs().max().item()
    assert difference < (1e-5 if claim else 1.0)
    assert claim or difference > 1e-4


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("width", [7, 12])
@pytest.mark.parametrize("name", ["mhc", "hyper_connections", "mhc_delta"])
def test_any_number_of_streams_and_odd_widths(name, n, width):
    stream = stream_of(name, width=width, streams=n, depth=1)
    scramble(stream, seed=3)
    out = stream(embedding_of(width).requires_grad_(), sublayers(stream))
    assert out.shape == (2, 5, width)
    assert out.isfinite().all()
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=out.dtype)
    gradients = torch.autograd.grad(out, list(stream.parameters()), cotangent, allow_unused=True)
    assert all(g is not None and g.isfinite().all() for g in gradients)
    assert any(g.abs().max() > 1e-6 for g in gradients if g is not None)


@pytest.mark.parametrize("name", ["mhc", "hyper_connections", "mhc_delta", "denseformer", "attention_residuals"])
def test_no_tokens_and_strided_input(name):
    stream = stream_of(name, width=6)
    for shape in ((2, 0, 6), (0, 5, 6)):
        leaf = embedding_of(6, batch=shape[0], length=shape[1]).requires_grad_()
        out = stream(leaf, sublayers(stream))
        assert out.shape == shape
        gradients = torch.autograd.grad(out.sum(), [leaf, *stream.parameters()], allow_unused=True)
        assert not any(g.abs().sum() for g in gradients if g is not None)
    strided = embedding_of(6).transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert torch.allclose(stream(strided, sublayers(stream)), stream(embedding_of(6), sublayers(stream)), atol=1e-14)


def test_batch_entries_have_their_own_coefficients():
    stream = stream_of()
    scramble(stream, seed=4)
    found = stream.sites[1].read(torch.randn(3, 5, 4, 8, dtype=torch.float64))[1]
    assert all((part[0] - part[1]).abs().max() > 1e-3 for part in found)


def test_what_is_switched_off_has_no_parameters():
    bare = stream_of(read="mean", write="ones", mixer="identity")
    assert not [name for name, _ in bare.named_parameters() if "logits" in name]
    found = bare.sites[0].read(bare.enter(embedding_of()))[1]
    assert torch.equal(found.read, torch.full_like(found.read, 0.25))
    static = stream_of(dynamic=False)
    assert {name.split(".")[-1] for name, _ in static.named_parameters() if "logits" in name} == {"bias"}


def test_static_coefficients_are_the_same_at_every_token():
    stream = stream_of(dynamic=False)
    scramble(stream, seed=5)
    found = stream.sites[0].read(torch.randn(2, 3, 4, 8, dtype=torch.float64))[1]
    assert all((part - part[:1, :1]).abs().max() == 0 for part in found)


@pytest.mark.parametrize("contraction", ["mean", "sum", "head"])
def test_contraction(contraction):
    stream = stream_of(contraction=contraction, final_norm=False)
    state = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    want = {"mean": state.mean(2), "sum": state.sum(2), "head": 0.5 * state.sum(2)}[contraction]
    assert torch.allclose(stream.leave(state), want)


def test_mean_of_entered_streams_is_the_embedding():
    stream = stream_of(final_norm=False)
    assert torch.allclose(stream.leave(stream.enter(embedding_of())), embedding_of())


def test_erasure_at_zero_strength_is_mhc():
    """mhc_delta with a gate held shut equals mHC; at strength 1 nothing is held along the update before it is written."""
    plain, erasing = stream_of(), stream_of("mhc_delta")
    x, layers = embedding_of(), sublayers(plain)
    with torch.no_grad():
        for site in erasing.sites:
            site.logits["erase"].bias.fill_(-60.0)
    assert torch.allclose(erasing(x, layers), plain(x, layers), atol=1e-12)
    with torch.no_grad():
        for site in erasing.sites:
            site.logits["erase"].bias.fill_(0.0)
            site.logits["erase"].alpha.zero_()
            site.logits["write"].bias.fill_(-800.0)
    state = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    update = torch.randn(2, 3, 8, dtype=torch.float64)
    _, context = erasing.sites[0].read(state)
    after = erasing.sites[0].write(state, update, context)
    held = torch.einsum("btnd,btd->btn", after, update / update.norm(dim=-1, keepdim=True))
    assert held.abs().max() < 1e-9


def test_the_dynamic_part_ignores_the_size_of_the_streams():
    """The norm over all streams makes the coefficients a function of the direction of the concatenated vector."""
    stream = stream_of(coefficient_eps=0.0)
    scramble(stream, seed=6)
    state = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    for one, other in zip(stream.sites[0].read(state)[1], stream.sites[0].read(1e3 * state)[1], strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_per_stream_coefficients_see_the_size_of_no_stream_but_concatenated_ones_do():
    state = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    louder = state * torch.tensor([1.0, 5.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    for source, same in (("per_stream", True), ("concatenated", False)):
        stream = stream_of(coefficients=source, coefficient_eps=0.0)
        scramble(stream, seed=7)
        found, other = (stream.sites[0].coefficients(x, stream.sites[0].all_logits(x)) for x in (state, louder))
        assert torch.allclose(found.mix, other.mix, atol=1e-12) == same


@pytest.mark.parametrize("eps", [0.0, 1e-46, 1e-30])
@pytest.mark.parametrize("source", ["per_stream", "concatenated"])
def test_a_token_of_zeros_has_finite_coefficients_and_gradients_at_every_eps(source, eps):
    site = stream_of(coefficients=source, coefficient_eps=eps).float()
    scramble(site, seed=8)
    state = torch.randn(1, 3, 4, 8)
    state[:, 1] = 0
    state.requires_grad_()
    seen, context = site.sites[0].read(state)
    written = site.sites[0].write(state, torch.ones(1, 3, 8), context)
    (seen.sum() + written.sum()).backward()
    assert written.isfinite().all() and state.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in site.sites[0].logits.parameters())


@pytest.mark.parametrize("shape", [(), (4,), (3, 3), (2, 4, 3)])
def test_a_forced_matrix_of_another_shape_is_refused(shape):
    with pytest.raises(
        ShapeError, match=r"a forced mixing matrix of 4 streams is \[\.\.\. 4 4\] \(to, from\), got shape"
    ):
        stream_of().sites[0].force_mix(torch.ones(shape))


@pytest.mark.parametrize("mixer", ["spectral_sphere", "permutation"])
def test_what_the_erasure_leaves_frozen_is_declared(mixer):
    assert check_connection("mhc_delta", options={"mixer": mixer}, only=["moves"]).passed
    reasons = connections.create("mhc_delta", width=8, sites=Site.decoder(1), mixer=mixer).frozen()
    assert "as far as they erase unequally" in reasons["sites.1.logits.mix.*"]


def test_biases_and_scales_do_not_decay_and_projections_do():
    stream = stream_of()
    names = {
        name: group.weight_decay
        for group in make_groups(
            [(f"stream.{name}", p) for name, p in stream.named_parameters()], stream.group_hints(), weight_decay=0.1
        )
        for name in group.names
    }
    assert {names[n] for n in names if n.endswith((".bias", ".alpha"))} == {0.0}
    assert {names[n] for n in names if n.endswith(".projection")} == {0.1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streams": 0}, "streams must lie between 1 and 64, got 0"),
        ({"mixer": "permutation", "streams": 8}, "does not serve 8 streams"),
        ({"mixer": "permutation", "coefficients": "per_stream"}, "use coefficients='concatenated'"),
        ({"mixer_options": {"iterations": 0}}, "iterations must lie between 1 and"),
        ({"mixer_options": {"steps": 3}}, "sinkhorn.steps"),
        ({"mixer": "sinkorn"}, "Did you mean 'sinkhorn'"),
        ({"coefficient_eps": -1.0}, "coefficient_eps must be a finite number of at least 0"),
        ({"home_logit": float("nan")}, "home_logit must be finite"),
        ({"contraction": "max"}, "contraction"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        stream_of(**options)


def test_forced_mixing_is_released():
    stream = stream_of()
    site, state = stream.sites[0], torch.randn(1, 2, 4, 8, dtype=torch.float64)
    before = site.read(state)[1].mix
    site.force_mix(torch.eye(4))
    assert torch.equal(site.read(state)[1].mix[0, 0], torch.eye(4, dtype=torch.float64))
    site.force_mix(None)
    assert torch.equal(site.read(state)[1].mix, before)
