"""Edits of an encoder, by its embeddings: what stands beside what, in whatever order the edits come."""

import pytest
import torch
from transformers import BertConfig, BertModel

from thalweg.data.tasks.austen import shipped_tokenizer
from thalweg.errors import InputError
from thalweg.evaluation.documents import Document
from thalweg.studies.edits.measuring import Bench
from thalweg.studies.edits.plan import parse_edits
from thalweg.studies.edits.subjects import OpenSubject
from thalweg.studies.edits.texts import Reading

PLAN = parse_edits(
    {
        "schema": 1,
        "name": "e",
        "title": "",
        "question": "",
        "source": "",
        "subject": {"encoder": {"model": "minilm"}},
        "text": {"evaluation": "embedding"},
        "scale": {"smoke": {"kind": "demo", "documents": 4, "tokens": 8}},
        "arms": {"attention": {"edit": {"site": "attention"}, "parallel": [0.0, 0.5], "perpendicular": [0.0]}},
        "hypotheses": [
            {
                "id": "A",
                "statement": "",
                "measure": "embedding_change",
                "contrast": {"attention-par0": 1},
                "direction": "greater",
                "margin": 0.0,
                "expected": 0.1,
                "sd": 0.1,
                "sd_source": "",
            }
        ],
    }
)
TEXTS = (
    "It is a truth",
    "She had been forced into prudence in her youth",
    "universally acknowledged",
    "a man of fortune must want a wife",
)


def bench():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "initializer_range": 0.2,
    }
    model = BertModel(BertConfig(vocab_size=2048, **sizes), add_pooling_layer=False).eval()
    reading = Reading(tuple(Document(f"d{i}", text) for i, text in enumerate(TEXTS)), 8, {})
    return Bench.of(OpenSubject(model, shipped_tokenizer(), {}, ()), reading, "embedding", 4, audit=2)


def measured(*names):
    made = bench()
    unedited = made.unedited()
    noop = PLAN.edits["attention-noop"]
    return {name: made.edited(PLAN.edits[name], noop, {"unedited": unedited}) for name in names}


def test_every_edit_stands_beside_the_no_op_in_any_order():
    one = measured("attention-noop", "attention-par0", "attention-perp0")
    other = measured("attention-perp0", "attention-par0")
    assert one["attention-noop"].drift < 1e-6
    for name in ("attention-par0", "attention-perp0"):
        assert one[name].columns == other[name].columns
        assert all(1e-7 < 1 - row[0] < 1 for row in one[name].columns["cosine"])
    assert one["attention-perp0"].columns["cosine"] < one["attention-par0"].columns["cosine"]


def test_an_audit_counts_real_tokens_only():
    """The strength of removing what is across the stream, with the padding of the shorter text or without it."""
    both = measured("attention-perp0")["attention-perp0"].layers
    lone = bench()
    shares = []
    for text in TEXTS[:2]:
        lone.reading = Reading((Document("d", text),), 8, {})
        lone.__dict__.pop("plain", None)
        length = len(shipped_tokenizer().encode(text))
        found = lone._audit(PLAN.edits["attention-perp0"])
        shares.append((length, found["applied"][1], found["drift"][1]))
    total = sum(length for length, _, _ in shares)
    assert both["applied"][1] == pytest.approx(sum(n * a for n, a, _ in shares) / total, rel=1e-4)
    assert both["drift"][1] == pytest.approx(sum(n * d for n, _, d in shares) / total, rel=1e-4)


def test_a_causal_reading_of_an_encoder_is_refused():
    made = bench()
    with pytest.raises(InputError):
        Bench.of(made.subject, made.reading, "likelihood", 4, 0)
