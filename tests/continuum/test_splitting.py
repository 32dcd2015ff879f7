"""The probe of splitting on tiny models: what it finds, what it must not find, what it refuses, and that it leaves nothing behind."""

import copy
import math

import pytest
import torch
from tiny_families import VOCAB, tiny

from thalweg import connections
from thalweg.continuum import findings, splitting
from thalweg.errors import InputError
from thalweg.geometry.bracket import order_swap, swap_of
from thalweg.models import Decoder, DecoderConfig

TEXTS = [torch.randint(5, VOCAB, (40,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(12)]


def found(model, **options):
    return findings(model, TEXTS, ["splitting"], length=20, options={"splitting": options})[-1]


def decoder(connection="additive", **more):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(vocab_size=VOCAB, width=32, depth=2, heads=4, connection=connection, **more))
        for p in model.parameters():
            p.data += 0.2 * torch.randn_like(p)
    return model.double()


@pytest.fixture(scope="module")
def llama():
    return found(tiny("llama"))


def value(finding, measure, **where):
    (row,) = finding.rows.where(measure=measure, **where)
    return row.value


def test_the_swap_of_a_model_is_that_of_its_own_layers(llama):
    """By hand, from the modules of the model: catches norms left out, the two sublayers exchanged, and the sink not masked."""
    model = tiny("llama")
    ids = torch.tensor([text[start : start + 20] for text in TEXTS for start in (0, 20)])
    layer, calls = model.model.layers[1], []
    handle = layer.register_forward_pre_hook(lambda m, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
        handle.remove()
        args, kwargs = calls[0]
        call = {k: v for k, v in kwargs.items() if k != "hidden_states"}

        def attention(x):
            return layer.self_attn(hidden_states=layer.input_layernorm(x), **call)[0]

        def feed_forward(x):
            return layer.mlp(layer.post_attention_layernorm(x))

        x, e = (
            args[0],
            1e-4,
        )  # by differences (its norms are in float32): no derivative is shared with the code under test
        t, r = attention(x), feed_forward(x)
        push = (attention(x + e * r) - attention(x - e * r)) / (2 * e)
        pull = (feed_forward(x + e * t) - feed_forward(x - e * t)) / (2 * e)
        swap = t + feed_forward(x + t) - r - attention(x + r)
        cosines = torch.cosine_similarity(swap, pull - push, dim=-1)[:, 1:]
    assert value(llama, "splitting.cosine", layer=1) == pytest.approx(cosines.mean().item(), abs=1e-4)


def test_what_is_found_stands_above_every_null(llama):
    assert value(llama, "splitting.found") == 1
    for layer in (0, 1):
        cosine = value(llama, "splitting.cosine", layer=layer)
        assert cosine > 0.5 > abs(value(llama, "splitting.cosine.other_tokens", layer=layer))
    assert abs(value(llama, "splitting.cosine.other_layer", layer=1)) < 0.3
    assert not llama.rows.where(measure="splitting.cosine.other_layer", layer=0)


@pytest.mark.parametrize("shuffled", ["tokens", "layers"])
def test_no_torsion_is_found_in_what_is_shuffled(shuffled, monkeypatch):
    """A probe that finds torsion where the prediction belongs to another token, or to another layer, fails here."""
    kept = []

    def wrong(first, second, x, t=None, after=None):
        swap = swap_of(first, second, x, t, after)
        kept.append(swap.bracket)
        other = (
            swap.bracket.roll((1, 3), (0, 1))
            if shuffled == "tokens"
            else kept[-2]
            if len(kept) > 1
            else swap.bracket.flip(-1)
        )
        return swap._replace(bracket=other)

    monkeypatch.setattr(splitting, "swap_of", wrong)
    finding = found(tiny("llama"), refine_tokens=0)
    assert value(finding, "splitting.found") == 0


def test_layers_that_add_nothing_have_no_torsion():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        still = Decoder(DecoderConfig(vocab_size=VOCAB, width=32, depth=2, heads=4, connection="rezero"))
    finding = found(still)
    assert finding.summary.startswith("nothing to compare; attention or feed-forward adds nothing in 2 layers")
    assert not finding.rows.where(measure="splitting.found") and not finding.rows.where(measure="splitting.error_order")
    assert any("no error by step" in line for line in finding.caveats)
    assert all(math.isfinite(row.value) for row in finding.rows)
    assert value(finding, "refinement.state", branch="strang", step=4) == 0


def test_layers_that_add_nothing_are_left_out_of_the_count():
    model = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    finding = found(model)
    assert "follows the bracket in 1 of 1 layers" in finding.summary and "adds nothing in 1 layers" in finding.summary
    assert f"mean cosine {value(finding, 'splitting.cosine', layer=1):+.3f}" in finding.summary
    assert value(finding, "splitting.found") == 1
    assert {row.n for row in finding.rows.where(measure="splitting.error")} == {1}
    assert all(math.isfinite(row.value) for row in finding.rows)


def test_one_window_has_no_interval_and_says_so():
    """Not that nothing follows the bracket."""
    one = findings(tiny("llama"), TEXTS[:1], ["splitting"], length=40, options={"splitting": {"refine_tokens": 0}})[-1]
    assert "no interval to hold against a null: needs 3 windows, got 1" in one.summary
    assert "follows" not in one.summary and not one.rows.where(measure="splitting.found")
    assert len(one.rows.where(measure="splitting.cosine")) == 2


def test_experts_of_the_grouped_kernel_are_not_applicable_until_they_are_eager():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = MixtralConfig(vocab_size=VOCAB, num_key_value_heads=2, num_local_experts=4, **sizes)
        model = MixtralForCausalLM(config).eval()
    model.set_experts_implementation("grouped_mm")
    assert 'model.set_experts_implementation("eager")' in found(model, refine_tokens=0).not_applicable
    model.set_experts_implementation("eager")
    assert not found(model, refine_tokens=0).not_applicable
    assert found(model, refine_tokens=0).rows


@pytest.mark.parametrize("tokens", [1, -5])
def test_finer_steps_need_two_tokens(tokens):
    with pytest.raises(InputError, match=f"refine_tokens of splitting must be at least 2, .* got {tokens}"):
        found(tiny("llama"), refine_tokens=tokens)
    with pytest.raises(InputError, match="batch_size of splitting must be at least 0, got -1"):
        found(tiny("llama"), batch_size=-1)


def test_finer_steps(llama):
    assert value(llama, "refinement.state", branch="lie", step=1) < 1e-12
    assert value(llama, "refinement.agreement", branch="lie", step=1) == 1
    coarse, fine = (value(llama, "refinement.limit", branch="lie", step=n) for n in (4, 8))
    assert 1.4 < coarse / fine < 2.6
    assert value(llama, "refinement.limit", branch="strang", step=2) < value(
        llama, "refinement.limit", branch="lie", step=8
    )
    errors = [row.value for row in llama.rows.where(measure="splitting.error")]
    assert errors == sorted(errors, reverse=True)
    assert value(llama, "splitting.error_order") == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "olmo2", "granite", "mixtral", "modernbert"])
def test_families_with_two_updates_in_a_row(kind):
    finding = found(tiny(kind), refine_tokens=16)
    assert not finding.failed
    layers = len(finding.rows.where(measure="splitting.cosine"))
    assert layers == 2
    assert bool(finding.rows.where(measure="refinement.kl")) == (kind != "modernbert")


@pytest.mark.parametrize(
    ("kind", "words"), [("bert", "post-norm"), ("gpt_neox", "side by side"), ("cohere", "side by side")]
)
def test_what_does_not_apply_says_why(kind, words):
    finding = found(tiny(kind))
    assert words in finding.not_applicable
    assert not finding.rows


@pytest.mark.parametrize("connection", connections.names())
def test_every_connection_of_ours_is_probed_or_refused_with_a_reason(connection):
    finding = found(decoder(connection), refine_tokens=16)
    assert not finding.failed
    assert bool(finding.rows) != bool(finding.not_applicable)
    if connection in ("additive", "ln_scaling", "layerscale", "highway", "post_norm", "deepnorm", "sub_ln"):
        assert finding.rows


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sixteen_bits_are_widened(kind):
    """Would catch a residual taken in bfloat16, which is all rounding."""
    narrow = copy.deepcopy(tiny(kind)).bfloat16()
    exact, got = found(copy.deepcopy(narrow).float(), refine_tokens=0), found(narrow, refine_tokens=0)
    for layer in (0, 1):
        wanted = value(exact, "splitting.cosine", layer=layer)
        assert value(got, "splitting.cosine", layer=layer) == pytest.approx(wanted, abs=0.03)
        size = value(
            exact, "splitting.size", layer=layer
        )  # over the update of the layer, not over both fields at its state
        assert value(got, "splitting.size", layer=layer) == pytest.approx(size, rel=5e-3)


def test_nothing_is_left_behind():
    model = tiny("llama").train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model.eval()


def test_a_field_that_is_none_is_refused():
    """A sublayer with a memory of its own is no function of the stream."""
    model = copy.deepcopy(tiny("llama"))
    calls = []
    model.model.layers[0].mlp.register_forward_hook(
        lambda m, args, out: out * (1 + len(calls)) if not calls.append(1) else None
    )
    finding = found(model)
    assert "no function of the stream" in finding.failed
    assert "\n" not in finding.failed


def test_the_bracket_of_a_model_is_the_limit_of_its_swap():
    """On the fields that the probe is given: 1/h^2 times the swap tends to the bracket in float64."""
    from thalweg.capture import locate
    from thalweg.continuum.fields import differentiable, watch_layers
    from thalweg.continuum.passes import states_only

    model, errors = tiny("llama"), []

    def see(layer):
        with differentiable():
            swap = swap_of(layer.attention, layer.feed_forward, layer.before)
            for h in (1e-2, 1e-3):
                got = order_swap(layer.attention, layer.feed_forward, layer.before, h) / h**2
                errors.append(((got + swap.bracket).norm() / swap.bracket.norm()).item())

    with torch.no_grad(), watch_layers(locate(model), see, prove=True):
        model(torch.tensor([TEXTS[0][:12]]), **states_only(model))
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.2)
    assert errors[1] < 0.02
