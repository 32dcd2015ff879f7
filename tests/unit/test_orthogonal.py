"""Orthogonal updates: lengths, zeros, the form for encoders; the battery holds the rest."""

import pytest
import torch

from thalweg import connections
from thalweg.connections import Site, Tokens
from thalweg.errors import InputError
from thalweg.models import Decoder, DecoderConfig

B, T, WIDTH = 2, 4, 6


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def stream(**options):
    return connections.create("orthogonal", width=WIDTH, sites=Site.decoder(1), **options).double()


def written(made, state, update, tokens=None):
    site = made.sites[0]
    return site.write(state, update, site.read(state, tokens)[1])


def test_the_stream_is_turned_and_lengthened_by_pythagoras_alone():
    made, x, u = stream(eps=0.0), gaussian(B, T, WIDTH), gaussian(B, T, WIDTH, seed=1)
    before = made.enter(x)
    after = written(made, before, u)
    step = after - before
    assert (step * before).sum(-1).abs().max() < 1e-12
    torch.testing.assert_close(after.square().sum(-1), before.square().sum(-1) + step.square().sum(-1))
    assert (u * x).sum(-1).abs().min() > 1e-3  # there was something to remove
    kept = written(stream(eps=0.0, retained=0.25), before, u)
    part = ((u * x).sum(-1) / x.square().sum(-1)).unsqueeze(-1) * x
    torch.testing.assert_close(kept.squeeze(2), x + u - 0.75 * part)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("over", ["feature", "global", "sequence"])
def test_a_stream_of_zeros_takes_all_of_the_update(over, eps):
    made = stream(eps=eps, over=over, input_norm=False)
    state = torch.zeros(B, T, 1, WIDTH, dtype=torch.float64, requires_grad=True)
    u = gaussian(B, T, WIDTH).requires_grad_()
    after = written(made, state, u)
    assert torch.equal(after.squeeze(2), u)
    for gradient in torch.autograd.grad(after, [state, u], gaussian(*after.shape, seed=2)):
        assert gradient.isfinite().all()


def over_the_sequence(x, u, real, eps):
    out = torch.empty_like(x)
    for b in range(B):
        dot = sum((x[b, t] * u[b, t]).sum() for t in range(T) if real[b, t])
        square = sum((x[b, t] * x[b, t]).sum() for t in range(T) if real[b, t])
        for t in range(T):
            out[b, t] = x[b, t] + u[b, t] - dot / (square + eps) * x[b, t]
    return out


def test_over_the_sequence_is_one_vector_a_row_without_its_padding():
    made, x, u = stream(over="sequence"), gaussian(B, T, WIDTH), gaussian(B, T, WIDTH, seed=1)
    real = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    inputs = [x.requires_grad_(), u.requires_grad_()]
    ours = written(made, made.enter(x), u, Tokens(mask=real)).squeeze(2)
    theirs = over_the_sequence(x, u, real, 1e-6)
    torch.testing.assert_close(ours, theirs)
    cotangent = gaussian(B, T, WIDTH, seed=3)
    for mine, wanted in zip(
        torch.autograd.grad(ours, inputs, cotangent), torch.autograd.grad(theirs, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, wanted)
    everything = written(made, made.enter(x), u).squeeze(2)
    torch.testing.assert_close(everything, over_the_sequence(x, u, torch.ones_like(real), 1e-6))


def test_a_decoder_refuses_what_sees_later_tokens():
    with pytest.raises(InputError, match="sees later tokens, which a decoder must not"):
        Decoder(
            DecoderConfig(
                vocab_size=5,
                width=8,
                depth=1,
                heads=2,
                connection="orthogonal",
                connection_options={"over": "sequence"},
            )
        )


def test_with_one_stream_global_is_feature():
    x, u = gaussian(B, T, WIDTH), gaussian(B, T, WIDTH, seed=1)
    one, other = (written(made, made.enter(x), u) for made in (stream(), stream(over="global")))
    torch.testing.assert_close(one, other)


def test_several_streams_are_projected_together_or_apart():
    x, u = gaussian(B, T, 3, WIDTH), gaussian(B, T, WIDTH, seed=1)
    for over, axes in (("feature", (-1,)), ("global", (-2, -1))):
        step = written(stream(streams=3, over=over, eps=0.0), x, u) - x
        assert (step * x).sum(axes).abs().max() < 1e-12
    assert (step * x).sum(-1).abs().max() > 1e-2  # together, not each


@pytest.mark.parametrize(
    ("options", "said"),
    [({"retained": float("nan")}, "retained must be a finite number"), ({"eps": -1.0}, "eps must be")],
)
def test_what_cannot_be(options, said):
    with pytest.raises(InputError, match=said):
        stream(**options)
