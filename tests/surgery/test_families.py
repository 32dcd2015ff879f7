"""Every family is read as what it is: equal logits in both precisions, on every way of running it; and what is read wrongly is noticed."""

import copy

import pytest
import torch
from tiny_models import DEPTH, KINDS, LENGTH, SIZES, VOCAB, tiny
from transformers import BertConfig, BertLMHeadModel, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import thalweg.models.look as look
import thalweg.models.rotary as rotary
import thalweg.models.sublayers.attention as attention
from thalweg.errors import InputError, ProofError
from thalweg.surgery import convert, families, open_source
from thalweg.surgery.families.gemma3 import Gemma3
from thalweg.surgery.families.gpt2 import GPT2
from thalweg.surgery.families.llama import Llama
from thalweg.surgery.source import as_additive
from thalweg.surgery.text import sample


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
def test_a_model_is_equal_in_our_terms(kind, dtype, tolerance):
    before = {name: p.clone() for name, p in tiny(kind).state_dict().items()}
    model, proof = convert(tiny(kind), length=LENGTH, dtype=dtype)
    assert proof.claim == "equal" and proof.passed and proof.difference < tolerance
    assert proof.loss_before == pytest.approx(proof.loss_after, abs=1e-6)
    assert model.dtype == getattr(torch, dtype) and model.config.connection == "additive"
    assert {case.name for case in proof.cases} == {
        *(f"row {i}, {LENGTH} tokens" for i in range(2)),
        *(f"row {i}, cached" for i in range(2)),
        *(f"{n} tokens" for n in (1, 2, LENGTH // 2)),
        "padded on the left",
        "padded on the right",
    }
    for name, value in tiny(kind).state_dict().items():  # the source is as it was
        assert torch.equal(value, before[name])
    logits = tiny(kind)(torch.arange(9)[None]).logits
    assert logits.std() > 0.2  # else the comparison compares nothing


def test_the_kinds_cover_every_family():
    assert {KINDS[kind][1].model_type for kind in KINDS} == set(families.registry.names())


def test_a_bfloat16_model_is_read_in_float32():
    theirs = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    model, proof = convert(theirs, length=LENGTH)
    assert proof.passed and theirs.dtype == torch.bfloat16 and model.dtype == torch.float32


def test_float64_is_wide_all_the_way_wherever_the_model_comes_from(tmp_path):
    """transformers makes its angles in float32, also for a model that is loaded or made in float64."""
    theirs = copy.deepcopy(tiny("llama")).double()
    angles = theirs.model.rotary_emb.inv_freq.clone()
    theirs.save_pretrained(tmp_path)
    for source in (theirs, tmp_path):
        proof = convert(source, length=LENGTH, dtype="float64").proof
        assert proof.difference < 1e-12
    assert torch.equal(theirs.model.rotary_emb.inv_freq, angles)  # the caller's model is as it was


def test_rows_go_beyond_the_window():
    assert sample(None, VOCAB, 4096, window=512).ids.shape == (2, 528)
    assert sample(None, VOCAB, 520, window=512).ids.shape == (2, 520)
    assert sample(None, VOCAB, 4096, window=4096).ids.shape == (2, 256)
    notes = convert(tiny("gemma3"), length=6).proof.notes
    assert notes[0] == "no compared row is longer than the window of 6 tokens; a length of 22 would show it"
    assert len(notes) == 2 and "bytes stood for tokens" in notes[1] and "the loss on them says nothing" in notes[1]


# what our decoder has not


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"hidden_act": "relu"}, "the model has activation 'relu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ],
)  # fmt: skip
def test_a_part_that_we_do_not_have_is_named(values, says):
    with pytest.raises(InputError, match=says):
        convert(LlamaForCausalLM(LlamaConfig(**{**SIZES, **values})))


def test_a_score_cap_is_refused():
    config = Gemma3TextConfig(**SIZES, head_dim=6, attn_logit_softcapping=5.0)
    with pytest.raises(InputError, match=r"attn_logit_softcapping 5\.0"):
        convert(Gemma3ForCausalLM(config))


def test_an_unknown_family_is_named_with_those_there_are():
    theirs = BertLMHeadModel(
        BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, is_decoder=True)
    )
    with pytest.raises(InputError, match=r"called 'bert'.*known: gemma3_text, gpt2, llama, mistral, qwen2, qwen3"):
        convert(theirs)
    with pytest.raises(InputError, match="must be a decoder of transformers, a model of thalweg"):
        convert(torch.nn.Linear(2, 2))


def test_weights_that_nobody_takes_are_an_error():
    theirs = LlamaForCausalLM(LlamaConfig(**SIZES))
    theirs.model.layers[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"0 missing, 2 left over \(model\.layers\.0\.extra\.bias"):
        as_additive(open_source(theirs), torch.float32)


# mutants: each is a mistake that has been made somewhere, and the proof must see it


def untransposed(monkeypatch):
    own = GPT2.pieces

    def pieces(self, theirs, config):
        for piece in own(self, theirs, config):
            square = piece.theirs.endswith("attn.c_proj.weight")
            yield families.Piece(piece.ours, piece.theirs) if square else piece

    monkeypatch.setattr(GPT2, "pieces", pieces)


def query_and_key_swapped(monkeypatch):
    own = GPT2.pieces
    swap = {".query.": ".key.", ".key.": ".query."}

    def pieces(self, theirs, config):
        for piece in own(self, theirs, config):
            part = next((part for part in swap if part in piece.ours), None)
            ours = piece.ours if part is None else piece.ours.replace(part, swap[part])
            yield families.Piece(ours, piece.theirs, piece.change)

    monkeypatch.setattr(GPT2, "pieces", pieces)


def forgotten_one(monkeypatch):
    monkeypatch.setattr(Gemma3, "norm", lambda self, ours, theirs: families.Piece(ours, theirs))


def forgotten_norm(monkeypatch):
    monkeypatch.setattr(Llama, "site_norms", tuple(reversed(Llama.site_norms)))


def neighbours_as_pairs(monkeypatch):
    def rotate(x, cos, sin):
        first, second = x[..., 0::2], x[..., 1::2]
        cos, sin = cos[:, None], sin[:, None]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2).to(x.dtype)

    monkeypatch.setattr(attention, "rotate", rotate)


def field(name, value):
    def mutate(monkeypatch, cls):
        own = cls.config
        monkeypatch.setattr(cls, "config", lambda self, theirs: own(self, theirs).replace(**{name: value}))

    return mutate


def wider_window(monkeypatch):
    own = look.allowed
    monkeypatch.setattr(
        look,
        "allowed",
        lambda seen, segments, past, length, device, window=0, causal=True: own(
            seen, segments, past, length, device, window and window + 1, causal
        ),
    )


def scaling_forgotten(monkeypatch):
    monkeypatch.setattr(rotary.RotaryScaling, "__call__", lambda self, frequencies: frequencies)


MUTANTS = {
    "a square Conv1D not transposed": ("gpt2", untransposed),
    "query and key swapped": ("gpt2", query_and_key_swapped),
    "tanh form of gelu forgotten": ("gpt2", lambda m: field("feed_forward", "gelu")(m, GPT2)),
    "scale of the scores forgotten": ("gpt2, unscaled scores", lambda m: field("attention_scale", None)(m, GPT2)),
    "1 + weight forgotten": ("gemma3", forgotten_one),
    "factor on the embedding forgotten": ("gemma3", lambda m: field("embedding_scale", 1.0)(m, Gemma3)),
    "query scale forgotten": ("gemma3", lambda m: field("attention_scale", None)(m, Gemma3)),
    "one base for all layers": ("gemma3", lambda m: field("window_rope_base", None)(m, Gemma3)),
    "cap on the logits forgotten": ("gemma3", lambda m: field("logit_softcap", None)(m, Gemma3)),
    "a window too wide by one": ("gemma3", wider_window),
    "norms swapped": ("llama", forgotten_norm),
    "neighbours turned as pairs": ("llama", neighbours_as_pairs),
    "base of the angles": ("llama", lambda m: field("rope_base", 10000.0)(m, Llama)),
    "eps of the norms": ("llama", lambda m: field("norm_eps", 1e-6)(m, Llama)),
    "windows forgotten": ("mistral", lambda m: field("windows", ())(m, Llama)),
    "scaling of the angles forgotten": ("llama, tied, biased, scaled", scaling_forgotten),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_model_read_wrongly_fails_its_proof(mutant, monkeypatch):
    kind, mutate = MUTANTS[mutant]
    mutate(monkeypatch)
    with pytest.raises(ProofError, match=r"in float64: the map of family '\w+' is wrong for this model"):
        convert(tiny(kind), length=LENGTH, dtype="float64")


def test_the_proof_of_a_wrong_model_can_be_looked_at(monkeypatch):
    forgotten_norm(monkeypatch)
    model, proof = convert(tiny("llama"), length=LENGTH, allow_drift=True)
    assert not proof.passed and proof.difference > 1e-2 and "NOT equal" in proof.lines()[0]
    assert model.config.depth == DEPTH and model.config.vocab_size == VOCAB
