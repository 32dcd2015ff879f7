"""What an encoder takes and refuses, what it shares with a decoder, and what holds for it with any connection."""

import copy

import pytest
import torch
from small_encoders import CASES, CLASSES, VOCAB, close, config, encoder, ids, stirred
from transformers import AutoModelForSequenceClassification

from thalweg import capture
from thalweg.errors import InputError, ProofError, ShapeError, UnknownNameError
from thalweg.models import Decoder, DecoderConfig, Encoder, EncoderConfig, StreamTrace, size_of
from thalweg.models.hf import in_shell
from thalweg.models.making import kind_of, make

NAMES = list(CASES)


@pytest.mark.parametrize("case", NAMES)
def test_padding_changes_nothing_wherever_it_is(case):
    model, x = encoder(case), ids(3, 6)
    with torch.no_grad():
        bare = model(x)
        for left, right in ((0, 3), (2, 0)):
            padded = torch.nn.functional.pad(x, (left, right), value=5)
            mask = torch.nn.functional.pad(torch.ones_like(x), (left, right))
            out = model(padded, attention_mask=mask)
            close(out.logits, bare.logits)
            close(out.last_hidden_state[:, left : left + 6], bare.last_hidden_state)
            padded[mask == 0] = 7  # whatever stands there
            close(model(padded, attention_mask=mask).logits, bare.logits)


@pytest.mark.parametrize("case", NAMES)
def test_rows_do_not_meet_and_tokens_see_both_sides(case):
    model, x = encoder(case, objective="masked"), ids(4, 6)
    order = torch.tensor([2, 0, 3, 1])
    embedded = []
    model.embedding.register_forward_hook(lambda _, __, out: embedded.append(out))
    logits = model(x).logits
    close(model(x[order]).logits, logits[order])
    (gradient,) = torch.autograd.grad(logits[:, 2], embedded[0], torch.randn(4, VOCAB, dtype=torch.float64))
    assert gradient.abs().amax((0, 2)).min() > 1e-9  # the tokens before and those after


@pytest.mark.parametrize("case", NAMES)
def test_every_parameter_learns_and_it_saves_and_loads(case, tmp_path):
    model = encoder(case).train()
    model(ids(8, 6), labels=torch.arange(8) % CLASSES).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    shell = in_shell(model)
    shell.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.to_encoder() == model.config
    assert torch.equal(loaded(ids(2, 6)).logits, model.eval()(ids(2, 6)).logits)


@pytest.mark.parametrize("objective", ["classification", "masked"])
@pytest.mark.parametrize("case", NAMES)
def test_capture_proves_itself(case, objective):
    model = encoder(case, objective=objective)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = 0
    for subject in (model, in_shell(model)):
        located = capture.locate(subject)
        assert not located.causal and located.found_by == "own" and len(located.sites) == 4
        proof = capture.prove(located, {"input_ids": ids(2, 9), "attention_mask": mask})
        assert proof.worst <= 1e-10 and proof.end == "last_hidden_state"


def test_a_write_that_is_not_the_rule_is_found_out():
    model = encoder("additive")
    site = model.stream.sites[1]
    write = site.write
    located = capture.locate(model)
    x = {"input_ids": ids(2, 9)}
    assert capture.prove(located, x).worst <= 1e-10
    site.advance = lambda following, state, update, context, tokens=None: (
        (after := write(state, 1.01 * update, context)),
        *(following.read(after, tokens) if following is not None else (None, None)),
    )
    with pytest.raises(ProofError, match="is not the next state"):
        capture.prove(located, x)


FORMS = [
    {"attention_edit": "value:full:0.5"},
    {"attention_edit": "value:exclude-self:0"},
    {"attention_edit": "residual:0", "mlp_edit": "residual:0.5"},
    {"layers": ("attention", "prototypes"), "prototypes": 4},
    {"head_prototypes": True, "prototypes": 4},
    {"layers": ("attention", "moe"), "experts": 4},
    {"layers": ("parallel",)},
    {"positions": "learned"},
    {"layer_heads": (2, 4)},
    {"windows": (2, 0)},
    {"qk_norm": True, "attention_gate": "head", "bias": True, "norm": "layernorm", "feed_forward": "gelu"},
]


@pytest.mark.parametrize("objective", ["classification", "masked"])
@pytest.mark.parametrize("changes", FORMS, ids=str)
def test_what_a_decoder_offers_an_encoder_offers_too(changes, objective):
    model, x = encoder(objective=objective, **changes), ids(3, 6)
    padded = torch.nn.functional.pad(x, (0, 3))
    mask = torch.nn.functional.pad(torch.ones_like(x), (0, 3))
    with torch.no_grad():
        bare = model(x).last_hidden_state
        close(model(padded, attention_mask=mask).last_hidden_state[:, :6], bare)
        other = x.clone()
        other[:, -1] = (other[:, -1] + 1) % VOCAB
        assert (model(other).last_hidden_state[:, 0] - bare[:, 0]).abs().max() > 1e-9  # the first sees the last
    trace = StreamTrace()
    model(x, trace=trace)
    assert torch.equal(trace.left, model(x).last_hidden_state)
    assert [record.site for record in trace.records] == list(model.config.sites)


def test_an_edit_that_excludes_the_own_value_knows_whom_a_token_sees():
    """A_tt of bidirectional attention is not that of causal attention."""
    model, x = encoder(depth=1, layers=("attention",)), ids(2, 5)
    edited = model.with_edits(attention_edit="value:exclude-self:0")
    attention = edited.sublayers[0]
    with torch.no_grad():
        trace = StreamTrace()
        edited(x, trace=trace)
        read = trace.records[0].input
        from thalweg.models.rotary import angles, rotate

        cos, sin = angles(torch.arange(5)[None], 4, dtype=torch.float64)
        q, k = (rotate(attention.split(m(read)), cos, sin) for m in (attention.query, attention.key))
        v = attention.split(attention.value(read))
        weights = (q @ k.repeat_interleave(2, 1).mT / 2).softmax(-1)
        v = v.repeat_interleave(2, 1)
        own = weights.diagonal(dim1=-2, dim2=-1)[..., None] * v
        context = weights @ v - own
        across = context - (context * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v
        expected = attention.output((own + across).transpose(1, 2).flatten(2))
    close(trace.records[0].update, expected)


# Tracing looks at .grad of activations and hides torch's warning by a hook that "warnings are errors" overtakes.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_checkpointing_and_compiled_blocks_change_no_number():
    x, labels = ids(4, 6), torch.tensor([0, 1, 2, 0])
    mask = torch.ones_like(x)
    mask[1, 4:] = 0

    def gradients(model):
        loss = model(x, attention_mask=mask, labels=labels).loss
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    plain = encoder("mhc").train()
    loss, wanted = gradients(plain)
    again = encoder("mhc", gradient_checkpointing=True).train()
    torch._dynamo.reset()
    compiled = encoder("mhc").train()
    compiled.compile_blocks(backend="aot_eager")
    for model in (again, compiled):
        ours, found = gradients(model)
        close(ours, loss)
        for a, b in zip(found, wanted, strict=True):
            close(a, b)


def test_sublayers_and_embedding_of_a_seed_are_those_of_any_connection():
    one, other = (Encoder(config(case), generator=torch.Generator().manual_seed(3)) for case in ("additive", "mgt"))
    assert torch.equal(one.embedding.weight, other.embedding.weight) and torch.equal(one.head.weight, other.head.weight)
    assert torch.equal(one.sublayers[2].query.weight, other.sublayers[2].query.weight)
    assert not one.head.bias.any() and one.head.weight.std() < 0.03


@pytest.mark.parametrize("objective", ["classification", "masked"])
def test_its_size_is_known_before_it_is_built(objective):
    for tied in (True, False):
        wanted = config("mhc", objective=objective, tie_embeddings=tied)
        size = size_of(wanted, length=8)
        assert size.total_parameters == sum(p.numel() for p in Encoder(wanted).parameters())
    head = CLASSES * 16 / 8 if objective == "classification" else VOCAB * 16
    assert size.flops["unembedding"] == 2 * head and size.activation_bytes > 0


def test_a_decoder_and_an_encoder_are_two_things():
    assert kind_of(config()) == "encoder" and type(make(config())) is Encoder
    plain = DecoderConfig(vocab_size=9, width=8, depth=1, heads=2)
    assert kind_of(plain) == "decoder" and type(make(plain)) is Decoder
    with pytest.raises(InputError, match="a Decoder is made of a DecoderConfig, got EncoderConfig"):
        Decoder(config())
    with pytest.raises(InputError, match="an Encoder is made of an EncoderConfig, got DecoderConfig"):
        Encoder(plain)
    with pytest.raises(InputError, match="sees later tokens, which a decoder must not"):
        Decoder(DecoderConfig(**vars(plain) | {"connection": "orthogonal", "connection_options": {"over": "sequence"}}))
    assert isinstance(config().replace(depth=3), EncoderConfig)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes": None}, "classes must be at least 2 for a classification, got None"),
        ({"classes": 1}, "classes must be at least 2 for a classification, got 1"),
        ({"objective": "masked", "classes": 3}, "classes belongs to objective 'classification', got 3"),
        ({"objective": "masked", "pooling": "max"}, "pooling belongs to objective 'classification', got 'max'"),
        ({"pooling": "last"}, "unknown value for pooling: 'last'"),
        ({"heads": 5}, "width must be a multiple of heads"),
    ],
)
def test_a_configuration_that_cannot_be_is_one_line(changes, said):
    with pytest.raises(InputError) as error:
        config(**changes)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_calls_that_cannot_be_are_one_line():
    model, x = encoder(), ids(2, 5)
    mask = torch.ones_like(x)
    mask[1] = 0
    for call, said in (
        (lambda: model(x, attention_mask=mask), "row 1 has no real token"),
        (
            lambda: model(x, labels=torch.tensor([0, 3])),
            "labels must lie in 0..2 (classes 3) or be -100 (not scored), got 3",
        ),
        (lambda: model(x, labels=torch.zeros(2)), "labels must be integers"),
        (lambda: model(x, labels=[0, 1]), "labels must be a tensor of integers [batch]"),
        (lambda: model(x, segments=torch.zeros_like(x)), "have no class of their own"),
        (lambda: model(ids(1, 33)), "this model takes 32"),
        (lambda: model(x + VOCAB), "token ids must lie in"),
        (lambda: model(x, trace=[]), "trace must be a StreamTrace"),
    ):
        with pytest.raises(InputError) as error:
            call()
        assert said in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ShapeError, match=r"labels must be \[2\]"):
        model(x, labels=x)
    with pytest.raises(TypeError):
        model(x, cache=None)
    with pytest.raises(UnknownNameError):
        model.with_edits(attention="value:full:0")


def test_labels_of_minus_100_are_left_out_of_the_mean():
    model, x = encoder(), ids(3, 5)
    part = model(x[:2], labels=torch.tensor([1, 2])).loss
    close(model(x, labels=torch.tensor([1, 2, -100])).loss, part)
    found = model.losses(model(x).logits, torch.tensor([1, 2, -100]))
    assert found.scored.tolist() == [1, 1, 0]
    close(torch.tensor(found.mean, dtype=torch.float64), part.detach())


def test_packed_documents_of_a_masked_encoder_do_not_meet():
    model = encoder(objective="masked")
    a, b = ids(1, 4, 1), ids(1, 5, 2)
    segments = torch.tensor([[0] * 4 + [1] * 5])
    with torch.no_grad():
        packed = model(torch.cat([a, b], 1), segments=segments).logits
        close(packed, torch.cat([model(a).logits, model(b).logits], 1))


def test_it_is_copied_and_keeps_its_kind():
    model = stirred(Encoder(config()))
    assert torch.equal(copy.deepcopy(model)(ids(2, 5)).logits, model(ids(2, 5)).logits)
