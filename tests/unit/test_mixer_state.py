"""Whose logits a state dict holds: equal shapes do not make equal matrices, and what is huge stays what was claimed."""

import io
import re
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load, save

from thalweg import connections, mixers
from thalweg.connections import Site
from thalweg.errors import CheckpointError, InputError
from thalweg.mixers.base import Claims, Mixer
from thalweg.models import Decoder, DecoderConfig


def stream_of(mixer="sinkhorn", streams=3, name="mhc", **mixer_options):
    torch.manual_seed(0)
    options = {"mixer": mixer, "mixer_options": mixer_options, "streams": streams}
    return connections.create(name, width=6, sites=Site.decoder(2), **options)


SQUARE = [name for name in mixers.names() if mixers.create(name, streams=3).generators == 9]


@pytest.mark.parametrize("other", [name for name in SQUARE if name != "sinkhorn"])
def test_logits_of_another_mixer_are_refused_though_they_fit(other):
    mine, theirs = stream_of(), stream_of(other)
    shapes = {name: value.shape for name, value in theirs.state_dict().items()}
    assert shapes == {name: value.shape for name, value in mine.state_dict().items()}
    says = f"the state dict was made with mixer '{other}', sites.0.mixer has mixer 'sinkhorn'"
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=re.escape(says)) as caught:
            mine.load_state_dict(theirs.state_dict(), strict=strict)
        assert "\n" not in str(caught.value)


def test_no_number_is_changed_where_the_first_site_is_refused():
    mine, before = stream_of(), deepcopy(stream_of().state_dict())
    with pytest.raises(CheckpointError):
        mine.load_state_dict(stream_of("bounded").state_dict())
    assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items() if "logits" in name)


@pytest.mark.parametrize(
    ("made", "read", "says"),
    [
        ({"iterations": 3}, {}, "made with iterations 3, sites.0.mixer has iterations 20"),
        ({"exact": "columns"}, {"eps": 1e-6}, "made with eps 0.0, exact 'columns', sites.0.mixer has eps 1e-06, exact 'rows'"),
        ({"streams": 2}, {}, "made with streams 2, sites.0.mixer has streams 3"),
    ],
)  # fmt: skip
def test_options_and_streams_belong_to_it(made, read, says):
    with pytest.raises(CheckpointError, match=re.escape(says)):
        stream_of(**read).load_state_dict(stream_of(**made).state_dict())


def test_the_same_mixer_loads_by_any_of_its_names_and_through_a_file():
    saved = io.BytesIO()
    torch.save(stream_of("newton").state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    assert stream_of("birkhoff_projection").load_state_dict(state).missing_keys == []
    with pytest.raises(CheckpointError, match="made with mixer 'birkhoff_projection'"):
        stream_of("sinkhorn").load_state_dict(state)


def test_what_says_nothing_of_its_mixer_loads_as_before():
    """Safetensors, state dicts of earlier versions and those that are rebuilt hold names and numbers; the configuration decides."""
    theirs, mine = stream_of("bounded"), stream_of()
    assert set(theirs.state_dict()) == {
        name for name, _ in theirs.named_parameters()
    }  # nothing but tensors to be saved
    for state in (load(save(theirs.state_dict())), dict(theirs.state_dict()), deepcopy(theirs.state_dict().copy())):
        mine.load_state_dict(state, strict=True)


@pytest.mark.parametrize("wrap", [lambda m: m, torch.nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_a_decoder_and_its_wrappers_refuse_with_one_line(wrap):
    sizes = {"vocab_size": 12, "width": 8, "depth": 1, "heads": 1, "connection": "mhc"}
    one, other = (
        wrap(Decoder(DecoderConfig(**sizes, connection_options={"mixer": name}))) for name in ("sinkhorn", "bounded")
    )
    one.load_state_dict(one.state_dict())
    with pytest.raises(CheckpointError, match=r"made with mixer 'bounded', \S*stream\.sites\.0\.mixer has mixer 'sink"):
        one.load_state_dict(other.state_dict())


def test_an_option_that_came_later_is_no_difference():
    state = stream_of().state_dict()
    for told in state._metadata.values():
        if "mixer" in told:
            del told["mixer"]["exact"]
    stream_of().load_state_dict(state)


def test_messages_name_a_mixer_as_it_is_registered():
    with pytest.raises(InputError, match="mixer permutation does not serve 9 streams"):
        mixers.create("mhc_lite", streams=9)
    with pytest.raises(InputError, match=r"mixer orthostochastic of 2 streams takes logits \[\.\.\. 6\]"):
        mixers.create("orthostochastic", streams=2)(torch.zeros(5))

    class Own(Mixer):
        claims = Claims()

    with pytest.raises(NotImplementedError, match="mixer Own makes no matrix"):
        Own(2, Own.Options())(torch.zeros(1))


def test_streams_are_the_second_argument():
    assert mixers.create("sinkhorn", 4).streams == 4
    with pytest.raises(InputError, match="streams must be a whole number of at least 1, got 'four'"):
        mixers.create("sinkhorn", "four")


@pytest.mark.parametrize("name", ["orthogonal", "orthostochastic", "birkhoff_projection", "spectral_sphere"])
@pytest.mark.parametrize("size", [1e12, 1e30, 1e300])
def test_claims_hold_at_logits_of_every_size(name, size):
    """Odd sizes too, where the skew matrix of a rotation is singular; large ones alone and beside small ones."""
    for n in (3, 4, 7):
        mixer = mixers.create(name, streams=n).double()
        drawn = torch.randn(32, mixer.generators, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        both = torch.where(drawn.roll(1, -1) > 0, size * drawn, drawn)
        for logits in (size * drawn, size * drawn.sign(), both):
            mix, claims = mixer(logits).detach(), mixer.claims
            assert mix.isfinite().all()
            if claims.orthogonal:
                assert (mix.mT @ mix - torch.eye(n)).abs().max() < 1e-12
            if claims.rows == claims.columns == "exact":
                assert max((mix.sum(axis) - 1).abs().max() for axis in (-1, -2)) < 1e-9
            if claims.spectral:
                assert torch.linalg.matrix_norm(mix, 2).max() < 1 + 1e-9


def test_a_moderate_rotation_beside_a_huge_one_is_itself():
    """Scaling the whole matrix down would make the small pair stand still."""
    logits = torch.tensor([1e20, 0, 0, 0, 0, 0.5], dtype=torch.float64)  # pairs 01 and 23
    mix = mixers.create("orthogonal", streams=4)(logits)
    alone = mixers.create("orthogonal", streams=2)(logits[-1:])
    torch.testing.assert_close(mix[2:, 2:], alone, atol=1e-14, rtol=0)
    torch.testing.assert_close(mix[:2, :2], -torch.eye(2, dtype=torch.float64), atol=1e-9, rtol=0)


def test_the_gradient_of_a_huge_skew_matrix_is_that_of_the_loops():
    mixer = mixers.create("orthogonal", streams=3).double()
    logits = torch.tensor([3e4, -7e4, 2e4], dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (got,) = torch.autograd.grad(mixer(logits), logits, cotangent)
    (want,) = torch.autograd.grad(mixer.reference(logits), logits, cotangent)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-3)


@pytest.mark.parametrize("n", [4, 22, 23, 32, 64])
@pytest.mark.parametrize("name", ["sinkhorn", "birkhoff_projection"])
def test_the_start_of_the_paper_is_near_the_identity_for_few_streams(name, n):
    mixer = mixers.create(name, streams=n).double()
    off = (mixer(mixer.start().double()) - torch.eye(n)).abs().max().item()
    assert mixer.claims.identity == (off <= 0.05) == (n <= 22)


@pytest.mark.parametrize("eps", [1e-6, 1e-3, 0.02, 0.5])
@pytest.mark.parametrize(("n", "iterations"), [(1, 20), (4, 1), (4, 20), (21, 20)])
def test_so_is_that_with_eps_as_far_as_eps_lets_it(eps, n, iterations):
    mixer = mixers.create("sinkhorn", n, eps=eps, iterations=iterations).double()
    off = (mixer(mixer.start().double()) - torch.eye(n)).abs().max().item()
    assert mixer.claims.identity == (off <= 0.05), off


@pytest.mark.parametrize("name", mixers.names())
def test_no_parameter_is_without_an_axis_which_fsdp_refuses(name):
    assert all(p.ndim for p in mixers.create(name, streams=4).parameters())


def test_gammas_that_were_saved_without_an_axis_load():
    mine = stream_of("spectral_sphere")
    saved = {name: value.reshape(()) * 2 if ".gamma_" in name else value for name, value in mine.state_dict().items()}
    mine.load_state_dict(saved)
    assert mine.sites[0].mixer.gamma_u.tolist() == [2.0] and mine.sites[1].mixer.gamma_v.tolist() == [2.0]
