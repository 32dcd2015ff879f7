"""Our models as networks that grow: what is seen, what a change keeps, identifiers, masks, grouped keys, padding, optimisers."""

import copy
import math

import pytest
import torch

from thalweg import growth
from thalweg.errors import CheckpointError, InputError
from thalweg.growth import Growable, GrowthOptions
from thalweg.growth.drift import drift
from thalweg.growth.network import TransformerNetwork, attentions_of
from thalweg.growth.reading import look
from thalweg.models import Decoder, DecoderConfig
from thalweg.models.encoder import Encoder
from thalweg.models.encoder_config import EncoderConfig
from thalweg.models.sublayers.prototypes import dictionaries, dictionary_loss
from thalweg.surgery.carrying import carry_optimizer
from thalweg.training.optim import Optimizers, dictionary_scales, make_groups
from thalweg.training.parallel import Ranks

G = torch.Generator().manual_seed(4)
TINY = {"vocab_size": 23, "width": 16, "depth": 2, "heads": 2, "head_size": 4}


def model_of(seed=0, **changes):
    found = Decoder(DecoderConfig(**{**TINY, **changes}), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():  # norms and biases off their start, so that nothing is equal by accident
        for p in found.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=G))
    return found


def batch_of(rows=16, length=9):
    ids = torch.randint(23, (rows, length), generator=G)
    return {"input_ids": ids, "labels": ids.clone()}


def padded(rows=16, length=9):
    found = batch_of(rows, length)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[: rows // 2, length - 3 :] = 0
    labels = found["labels"].masked_fill(mask == 0, -100)
    return {**found, "labels": labels, "attention_mask": mask}


def births(network, layer, count=1, **options):
    opts = GrowthOptions(head_width=network.model.config.head_width, **options)
    reading = look(network, layer, {}, opts)
    return [
        growth.on_the_plane(
            reading.operator, reading.vectors[:, i], reading.values[i].item(), opts.head_width, noise=0.0
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_factors_are_those_of_the_scores(kv_heads):
    """Loop over query heads: x W_q W_k^T x^T, each with the keys that it reads. Keys of the wrong group would differ."""
    model = model_of(heads=4, kv_heads=kv_heads)
    network = TransformerNetwork(model, batch_of())
    attention = model.blocks[1].sublayers[0]
    w, d, group = 4, 16, 4 // (kv_heads or 4)
    heads = network.heads(1)
    assert [head.id for head in heads] == list(range(4 // group)) and isinstance(network, Growable)
    for number, head in enumerate(heads):
        want = torch.zeros(d, d)
        for query in range(number * group, (number + 1) * group):
            for i in range(w):
                q, k = attention.query.weight[query * w + i], attention.key.weight[query // group * w + i]
                want += torch.outer(q, k).detach()
        torch.testing.assert_close(head.query @ head.key.T, want)


def test_inputs_are_what_attention_reads_and_padding_is_left_out():
    model, batch = model_of(), padded()
    network = TransformerNetwork(model, batch)
    seen = []
    hook = model.blocks[1].sublayers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    with torch.no_grad():
        model(batch["input_ids"], attention_mask=batch["attention_mask"])
    hook.remove()
    want = torch.stack([seen[0][i, j] for i in range(16) for j in range(9) if batch["attention_mask"][i, j]])
    torch.testing.assert_close(network.inputs(1), want)
    assert len(want) == 16 * 9 - 8 * 3


def test_the_fit_is_the_mean_loss_per_label_with_the_loss_of_dictionaries():
    batch = padded()
    plain = TransformerNetwork(model_of(), batch)
    with torch.no_grad():
        want = plain.model(**batch).loss.item()
    assert plain.fit() == pytest.approx(want, rel=1e-6)
    model = model_of(head_prototypes=True, prototypes=3)
    network = TransformerNetwork(model, batch, dictionary_weight=0.5)
    with torch.no_grad():
        want = model(**batch).loss.item() + 0.5 * dictionary_loss(model).item()
    assert network.fit() == pytest.approx(want, rel=1e-6)


def test_looks_are_in_evaluation_mode_and_leave_no_trace():
    model = model_of().train()
    network = TransformerNetwork(model, batch_of())
    state = torch.random.get_rng_state()
    network.fit(), network.outputs(), network.inputs(0)
    assert model.training and torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_a_look_is_kept_until_something_changes():
    network = TransformerNetwork(model_of(), batch_of())
    first = network.look()
    assert network.look() is first
    with torch.no_grad():
        network.model.embedding.weight.mul_(1.5)
    assert network.look() is not first
    second = network.look()
    network.mask_head(0, 1, 0.5)
    assert network.look() is not second
    network.forget()
    assert network._seen is None


@pytest.mark.parametrize(
    "changes", [{}, {"heads": 4, "kv_heads": 2}, {"attention_gate": "head"}, {"connection": "mhc"}]
)
def test_births_change_no_output_and_bring_their_block(changes):
    network = TransformerNetwork(model_of(**changes), batch_of())
    born = births(network, 1, 2)
    before, heads = network.outputs().clone(), len(network.heads(1))
    parameters = network.parameters_count()
    ids = network.add_heads(1, born)
    assert ids == [heads, heads + 1] and len(network.heads(1)) == heads + 2
    assert drift(before, network.outputs()) < 1e-12
    assert network.parameters_count() > parameters
    for birth, head in zip(born, network.heads(1)[-2:], strict=True):
        torch.testing.assert_close((head.query @ head.key.T).double(), birth.query @ birth.key.T, rtol=1e-4, atol=1e-6)


def test_queries_of_a_new_group_differ_and_sum_to_the_birth():
    """Alike they would learn alike: their value and output maps are shared or zero."""
    network = TransformerNetwork(model_of(heads=4, kv_heads=2), batch_of())
    (born,) = births(network, 0)
    network.add_heads(0, [born])
    w = network.model.config.head_width
    first, second = attentions_of(network.model)[0].query.weight[-2 * w :].detach().split(w)
    torch.testing.assert_close((first + second).T.double(), born.query, rtol=1e-4, atol=1e-6)
    assert (first - second).norm() > 0.01 * first.norm()


def test_identifiers_are_never_used_twice():
    network = TransformerNetwork(model_of(), batch_of())
    assert network.add_heads(0, births(network, 0)) == [2]
    network.prune_heads(0, [2])
    assert network.add_heads(0, births(network, 0)) == [3]
    network.prune_heads(0, [0])
    assert [head.id for head in network.heads(0)] == [1, 3] and [head.id for head in network.heads(1)] == [0, 1]
    with pytest.raises(InputError, match="layer 0 has no head 0"):
        network.mask_head(0, 0, 0.5)


@pytest.mark.parametrize("changes", [{}, {"heads": 4, "kv_heads": 2}])
def test_a_mask_is_reversible_and_pruning_under_it_changes_nothing(changes):
    network = TransformerNetwork(model_of(**changes), batch_of())
    whole = network.outputs().clone()
    network.mask_head(1, 0, 0.5)
    assert network.heads(1)[0].mask == 0.5 and not torch.equal(network.outputs(), whole)
    network.mask_head(1, 0, 1.0)
    assert torch.equal(network.outputs(), whole)
    network.mask_head(1, 0, 0.0)
    masked = network.outputs().clone()
    network.prune_heads(1, [0])
    assert drift(masked, network.outputs()) < 1e-12 and not network.masks
    assert [head.id for head in network.heads(1)] == [1]


def test_a_new_layer_computes_the_identity_and_has_one_head():
    network = TransformerNetwork(model_of(), batch_of())
    before = network.outputs().clone()
    assert network.add_layer() == 2 and network.layers() == 3
    assert drift(before, network.outputs()) < 1e-12
    assert [head.id for head in network.heads(2)] == [0]
    assert network.add_heads(2, births(network, 2)) == [1]


def test_state_goes_on_where_it_was():
    network = TransformerNetwork(model_of(heads=4, kv_heads=2), batch_of())
    network.add_heads(0, births(network, 0))
    network.prune_heads(0, [1])
    network.mask_head(1, 0, 0.25)
    other = TransformerNetwork(model_of(heads=4, kv_heads=2), network.batch)
    again = copy.deepcopy(network.model)
    again.blocks[1].sublayers[0].head_mask = None  # as a checkpoint gives it back
    other.load_state_dict(network.state_dict(), again)
    assert torch.equal(other.outputs(), network.outputs()) and other.masks == network.masks
    born = births(network, 0)
    both = [n.add_heads(0, born) for n in (network, other)]
    assert both[0] == both[1] == [3]
    assert all(torch.equal(a, b) for a, b in zip(network.model.parameters(), other.model.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="does not fit"):
        other.load_state_dict(network.state_dict(), model_of())


def test_optimisers_follow_and_old_moments_stay():
    model = model_of(head_prototypes=True, prototypes=3)
    groups = make_groups(model.named_parameters(), model.stream.group_hints(), scales=dictionary_scales(model))
    assert {group.lr_mul for group in groups} >= {10.0, 0.1}
    optimizers = Optimizers(model, groups)
    network = TransformerNetwork(model, batch_of(), changed=lambda model, change: carry_optimizer(optimizers, change))
    network.model(**network.batch).loss.backward()
    optimizers.step(1e-2)
    old = model.blocks[0].sublayers[0].query.weight
    moment = optimizers.members["adamw"].state[old]["exp_avg"].clone()
    network.add_heads(0, births(network, 0))
    new = network.model.blocks[0].sublayers[0].query.weight
    kept = optimizers.members["adamw"].state[new]["exp_avg"]
    assert torch.equal(kept[: len(moment)], moment) and not kept[len(moment) :].any()
    held = [p for group in optimizers.members["adamw"].param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in network.model.parameters()}
    network.model(**network.batch).loss.backward()
    optimizers.step(1e-2)  # the run's own groups go on


class Half(Ranks):
    """One of two ranks whose gathered values were noted beforehand, in the order of the calls."""

    def __init__(self, rank, other=None):
        super().__init__(rank, 2)
        object.__setattr__(self, "noted", [])
        object.__setattr__(self, "other", other)

    def collect(self, value):
        self.noted.append(value)
        if self.other is None:
            return [value]
        theirs = self.other.noted[len(self.noted) - 1]
        return [theirs, value]


def test_ranks_share_the_probe_set_and_see_what_one_sees():
    model, batch = model_of(), padded()
    alone = TransformerNetwork(model, batch)
    first = Half(0)
    one = TransformerNetwork(model, batch, ranks=first)
    one.inputs(0), one.fit(), one.outputs()
    two = TransformerNetwork(model, batch, ranks=Half(1, first))
    x, fit, outputs = two.inputs(0), two.fit(), two.outputs()
    mine = alone.inputs(0)
    torch.testing.assert_close(x.T @ x, mine.T @ mine)
    assert fit == pytest.approx(alone.fit(), rel=1e-6)
    order = [*range(0, 16, 2), *range(1, 16, 2)]
    torch.testing.assert_close(outputs, alone.outputs()[order])


def test_tokens_of_dictionaries_leave_padding_out():
    network = TransformerNetwork(model_of(head_prototypes=True, prototypes=3), padded())
    found = network.dictionary_tokens()
    assert set(found) == {name for name, _ in dictionaries(network.model)}
    assert {tuple(x.shape) for x in found.values()} == {(2, 16 * 9 - 24, 4)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": ("feed_forward",)}, "layer 0 has 0"),
        ({"layers": ("attention", "attention")}, "layer 0 has 2"),
        ({"connection": "sub_ln"}, "norms all heads of a layer together"),
    ],
)
def test_models_that_cannot_grow_are_one_line(changes, words):
    with pytest.raises(InputError, match=words) as caught:
        TransformerNetwork(model_of(**changes), batch_of())
    assert "\n" not in str(caught.value)


def test_heads_of_another_width_are_one_line():
    network = TransformerNetwork(model_of(), batch_of())
    reading = look(network, 0, {}, GrowthOptions(head_width=4))
    born = growth.on_the_plane(reading.operator, reading.vectors[:, 0], reading.values[0].item(), 8)
    with pytest.raises(InputError, match="give head_width 4"):
        network.add_heads(0, [born])


def test_a_diverged_model_is_said_and_ends_growth():
    network = TransformerNetwork(model_of(), batch_of())
    controller = growth.Controller(network, GrowthOptions(head_width=4))
    controller.check(0)
    with torch.no_grad():
        network.model.embedding.weight.fill_(math.nan)
    controller.check(5)
    assert controller.status == "unstable" and "NaN" in controller.reason


def encoder_of(seed=0, **changes):
    config = EncoderConfig(**{**TINY, "classes": 2, **changes})
    return Encoder(config, generator=torch.Generator().manual_seed(seed))


def test_a_classifier_grows_on_padded_text():
    batch = {**padded(), "labels": torch.arange(16) % 2}
    network = TransformerNetwork(encoder_of(), batch)
    assert network.inputs(0).shape == (16 * 9 - 24, 16)
    with torch.no_grad():
        want = network.model(**batch).loss.item()
    assert network.fit() == pytest.approx(want, rel=1e-6)
    before = network.outputs().clone()
    assert before.shape == (16, 2)
    assert network.add_heads(1, births(network, 1)) == [2] and network.add_layer() == 2
    assert drift(before, network.outputs()) < 1e-12
    assert isinstance(network.model, Encoder)


def test_an_encoder_of_masked_tokens_is_compared_where_tokens_are_real():
    network = TransformerNetwork(encoder_of(objective="masked", classes=None), padded())
    outputs = network.outputs()
    assert outputs.shape == (16, 9, 23) and not outputs[0, -1].any() and outputs[-1, -1].any()


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_dictionaries_of_new_heads_start_from_what_reaches_them_and_old_ones_stay(kv_heads):
    """Drawn at random they would lie far outside: here the loss of the new one is no more than the spread of its tokens."""
    network = TransformerNetwork(
        model_of(heads=4, kv_heads=kv_heads, head_prototypes=True, prototypes=3), batch_of(), dictionary_weight=1.0
    )
    old = attentions_of(network.model)[0].dictionary.prototypes.detach().clone()
    before = network.outputs().clone()
    network.add_heads(0, births(network, 0))
    assert drift(before, network.outputs()) < 1e-12
    dictionary = attentions_of(network.model)[0].dictionary
    assert torch.equal(dictionary.prototypes[:4], old)
    tokens = network.dictionary_tokens()["blocks.0.sublayers.0.dictionary"]
    for head in range(4, len(tokens)):
        spread = tokens[head].var(0, correction=0).sum()
        distance = torch.cdist(dictionary.prototypes[head], tokens[head]).amin(1)
        assert (distance < 1e-3 * spread.sqrt()).all()  # k-means++ takes tokens
        assert dictionary.temperature[head] * dictionary.width <= spread * (1 + 1e-4)
