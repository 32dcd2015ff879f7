"""Edits of an encoder, by its embeddings and its masked loss: what stands beside what, in whatever order the edits come."""

import pytest
import torch
from transformers import BertConfig, BertModel

from thalweg.data.tasks.austen import shipped_tokenizer
from thalweg.editing import edit
from thalweg.errors import InputError
from thalweg.evaluation.documents import Document
from thalweg.models.encoder import Encoder
from thalweg.models.encoder_config import EncoderConfig
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


LONG = tuple(Document(f"d{i}", f"{text}, and {text}. {text}" * 2) for i, text in enumerate(TEXTS))


def masked_bench(tokens=10):
    tokenizer = shipped_tokenizer().with_mask()
    config = EncoderConfig(
        vocab_size=tokenizer.mask + 1,
        width=32,
        depth=2,
        heads=2,
        max_length=32,
        objective="masked",
        connection="post_norm",
        initial_std=0.3,
    )
    model = Encoder(config, generator=torch.Generator().manual_seed(0)).eval()
    subject = OpenSubject(model, tokenizer, {}, ())
    return Bench.of(subject, Reading(LONG, tokens, {}), "masked", 4, audit=2)


@torch.no_grad()
def test_masked_tokens_are_scored_once_each_as_a_loop_scores_them():
    """Whatever the draw of the masks: every token of a document in one row, the sum of its losses as of the rows one by one."""
    made = masked_bench()
    model, tokenizer = made.subject.model, made.subject.tokenizer
    assert made.tokens == [[10]] * 4
    arm = PLAN.edits["attention-perp0"]
    unedited = made.unedited()
    row = made.edited(arm, PLAN.edits["attention-noop"], {"unedited": unedited})
    for document, text in enumerate(LONG):
        ids = tokenizer.encode(text.text)[:10]
        rows = [r for r in made.masked.rows if r.document == document]
        assert sorted(p for r in rows for p in r.places) == list(range(10))
        assert {len(r.places) for r in rows} == {1, 2}
        for found, edited in ((unedited, False), (row, True)):
            total = 0.0
            for r in rows:
                shown = [tokenizer.mask if p in r.places else i for p, i in enumerate(ids)]
                assert r.inputs == shown
                with edit(model, arm.options.as_noop() if not edited else arm.options, forced=not edited):
                    logits = model(torch.tensor([shown])).logits[0].double()
                total -= sum(logits.log_softmax(-1)[p, ids[p]].item() for p in r.places)
            assert found.columns["nats"][document] == pytest.approx([total], rel=1e-5)
    assert row.columns["nats"] != unedited.columns["nats"]
    assert all(d > 0 for d in row.layers["drift"])


def test_the_masked_no_op_moves_nothing():
    made = masked_bench()
    noop = PLAN.edits["attention-noop"]
    assert made.edited(noop, noop, {"unedited": made.unedited()}).drift < 1e-6


def test_a_masked_reading_of_what_has_no_masks_is_refused():
    made = masked_bench()
    bare = OpenSubject(made.subject.model, shipped_tokenizer(), {}, ())
    with pytest.raises(InputError, match="no mask token"):
        Bench.of(bare, made.reading, "masked", 4, 0)
    with pytest.raises(InputError, match=r"logits|head"):
        Bench.of(OpenSubject(bench().subject.model, made.subject.tokenizer, {}, ()), made.reading, "masked", 4, 0)
