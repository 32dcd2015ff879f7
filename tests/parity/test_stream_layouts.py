"""The converter between layouts: there and back at random values, the equations of both conventions, and what it refuses."""

import numpy as np
import pytest
import torch
from agreement import gaussian

from thalweg import connections
from thalweg.connections import Site
from thalweg.connections.layouts import LAYOUTS, from_layout, load_layout, names, to_layout
from thalweg.errors import InputError, ShapeError, UnknownNameError

WIDTH = 5


def stream_of(layout, n=4, **options):
    """Any stream that the layout holds, at random values."""
    name = "hyper_connections" if layout == "hyper_connections" else "mhc"
    options = {"streams": n, "coefficients": LAYOUTS[layout].coefficients, **options}
    stream = connections.create(name, width=WIDTH, sites=Site.decoder(1), **options).double()
    with torch.no_grad():
        for k, parameter in enumerate(stream.parameters()):
            parameter.copy_(gaussian(*parameter.shape, seed=k))
        if layout == "hyper_connections" and stream.options.dynamic:
            for site in stream.sites:  # one scale for both, over there
                site.logits.mix.alpha.copy_(site.logits.read.alpha)
    return stream


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ours_there_and_back(layout, dynamic, n):
    site = stream_of(layout, n, dynamic=dynamic).sites[1]
    own = {name: p for name, p in site.named_parameters() if name.startswith("logits")}
    given = to_layout(site, layout)
    assert {name: tuple(value.shape) for name, value in given.items()} == LAYOUTS[layout].shapes(n, WIDTH)
    back = from_layout(site, given, layout)
    assert set(back) == set(own)
    assert all(torch.equal(back[name], own[name]) for name in own)


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_theirs_there_and_back(layout, n):
    site = stream_of(layout, n).sites[0]
    theirs = {
        name: gaussian(*shape, seed=k) for k, (name, shape) in enumerate(LAYOUTS[layout].shapes(n, WIDTH).items())
    }
    load_layout(site, theirs, layout)
    back = to_layout(site, layout)
    gain = 1 + theirs.pop("norm.gamma", torch.zeros(()))
    assert not back.pop("norm.gamma", torch.zeros(())).any()  # folded into what it multiplies
    for name, value in theirs.items():
        folded = value.movedim(-2, -1) * gain if name == "dynamic_alpha_fn" else value
        if name == "dynamic_beta_fn":
            folded = (value.flatten() * gain).reshape(value.shape)
        if name == "dynamic_alpha_fn":
            folded = folded.movedim(-2, -1)
        torch.testing.assert_close(back[name], folded, rtol=0, atol=0)


def test_the_head_there_and_back():
    stream = stream_of("deepseek_v4", 3, contraction="head")
    theirs = {
        name: gaussian(*shape, seed=k)
        for k, (name, shape) in enumerate(LAYOUTS["deepseek_v4"].head_shapes(3, WIDTH).items())
    }
    load_layout(stream, theirs, "deepseek_v4")
    back = to_layout(stream, "deepseek_v4")
    assert set(back) == set(theirs) and all(torch.equal(back[name], theirs[name]) for name in theirs)
    assert set(from_layout(stream, theirs, "deepseek_v4")) == {
        name for name, _ in stream.named_parameters() if "head" in name
    }


def test_gradients_pass_through():
    site = stream_of("deepseek_v4").sites[0]
    cotangents = {name: gaussian(*value.shape, seed=9) for name, value in to_layout(site, "deepseek_v4").items()}
    total = sum((to_layout(site, "deepseek_v4")[name] * c).sum() for name, c in cotangents.items())
    gradients = torch.autograd.grad(total, list(site.logits.parameters()))
    back = from_layout(site, cotangents, "deepseek_v4")
    for (name, _), gradient in zip(site.logits.named_parameters(), gradients, strict=True):
        assert torch.equal(gradient, back[f"logits.{name}"])


# the equations, in numpy


def normalise(m, axis):
    return m / m.sum(axis, keepdims=True)


def sigma(z):
    return 1 / (1 + np.exp(-z))


def paper(p, x, n):
    """Eq. 7-9 and 3: columns then rows, H x."""
    flat = x.reshape(-1)
    h = flat @ p["phi"] / np.sqrt((flat**2).mean() + 1e-6)
    read = sigma(p["alpha_pre"] * h[:n] + p["b"][:n])
    write = 2 * sigma(p["alpha_post"] * h[n : 2 * n] + p["b"][n : 2 * n])
    m = np.exp(p["alpha_res"] * h[2 * n :].reshape(n, n) + p["b"][2 * n :].reshape(n, n))
    for _ in range(20):
        m = normalise(normalise(m, 0), 1)
    return read, write, m @ x


def code(p, x, n):
    """DeepSeek's: rows then columns, contracting the first index; without its eps."""
    flat = x.reshape(-1)
    h = p["fn"] @ flat / np.sqrt((flat**2).mean() + 1e-6)
    read = sigma(p["scale"][0] * h[:n] + p["base"][:n])
    write = 2 * sigma(p["scale"][1] * h[n : 2 * n] + p["base"][n : 2 * n])
    comb = np.exp(p["scale"][2] * h[2 * n :].reshape(n, n) + p["base"][2 * n :].reshape(n, n))
    for _ in range(20):
        comb = normalise(normalise(comb, 1), 0)
    return read, write, np.einsum("mn,mc->nc", comb, x)


@pytest.mark.parametrize("n", [3, 4])  # of two streams every doubly stochastic matrix is symmetric
@pytest.mark.parametrize(("layout", "equations"), [("paper", paper), ("deepseek_v4", code)])
def test_both_conventions_are_one_function(layout, equations, n):
    site = stream_of(layout, n, input_norm=False).sites[0]
    state = gaussian(1, 1, n, WIDTH, seed=1)
    with torch.no_grad():
        context = site.read(state)[1]
        mixed = site.write(state, torch.zeros(1, 1, WIDTH, dtype=torch.float64), context)[0, 0].numpy()
    p = {name: value.detach().numpy() for name, value in to_layout(site, layout).items()}
    read, write, expected = equations(p, state[0, 0].numpy(), n)
    np.testing.assert_allclose(context.read[0, 0].numpy(), read, rtol=1e-13)
    np.testing.assert_allclose(context.write[0, 0].numpy(), write, rtol=1e-13)
    np.testing.assert_allclose(mixed, expected, rtol=1e-12, atol=1e-13)
    other = to_layout(site, "deepseek_v4" if layout == "paper" else "paper")
    block = other["base" if layout == "paper" else "b"].detach().numpy()
    mine = p["b" if layout == "paper" else "base"]
    assert np.abs(block[2 * n :] - mine[2 * n :]).max() > 0.1, "the layouts differ in the order of the mixing logits"
    p["b" if layout == "paper" else "base"] = block  # the mutant: a mixing matrix in the other order
    assert np.abs(equations(p, state[0, 0].numpy(), n)[2] - mixed).max() > 1e-3


# refusals


def test_names():
    assert names() == sorted(LAYOUTS)
    with pytest.raises(UnknownNameError, match="Did you mean 'deepseek_v4'"):
        to_layout(stream_of("paper").sites[0], "deepseek")


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("mhc", {"mixer": "identity"}, "holds the logits read, write and mix, this site has read, write"),
        ("mhc", {"mixer": "permutation"}, "one logit for every entry of the mixing matrix, mixer 'permutation' has 24"),
        ("mhc", {"read": "mean"}, "this site has write, mix"),
        ("mhc", {"coefficients": "per_stream"}, "has coefficients='concatenated', the site 'per_stream'"),
        ("mhc_delta", {}, "this site has read, write, mix, erase"),
    ],
)
def test_sites_without_a_place(name, options, line):
    site = connections.create(name, width=WIDTH, sites=Site.decoder(1), **options).sites[0]
    with pytest.raises(InputError, match=line):
        to_layout(site, "paper")


def test_heads_without_a_place():
    with pytest.raises(InputError, match="holds sites only"):
        to_layout(stream_of("paper", contraction="head"), "paper")
    with pytest.raises(InputError, match="use contraction='head'"):
        to_layout(stream_of("paper"), "deepseek_v4")


def test_tensors_that_do_not_fit():
    site = stream_of("paper").sites[0]
    theirs = to_layout(site, "paper")
    with pytest.raises(
        InputError, match=r"holds alpha_post, alpha_pre, alpha_res, b, phi; got alpha_post, alpha_pre, alpha_res, b$"
    ):
        from_layout(site, {name: value for name, value in theirs.items() if name != "phi"}, "paper")
    with pytest.raises(ShapeError, match=r"phi of layout 'paper' has shape \[20, 24\], got \[24, 20\]"):
        from_layout(site, theirs | {"phi": theirs["phi"].mT}, "paper")


def test_what_a_static_site_or_a_shared_scale_cannot_hold():
    theirs = to_layout(stream_of("paper").sites[0], "paper")
    with pytest.raises(InputError, match=r"dynamic part \(read.projection, write.projection, mix.projection\)"):
        from_layout(stream_of("paper", dynamic=False).sites[0], theirs, "paper")
    site = stream_of("hyper_connections").sites[0]
    with torch.no_grad():
        site.logits.mix.alpha.add_(1)
    with pytest.raises(InputError, match="one scale for read and mix"):
        to_layout(site, "hyper_connections")
