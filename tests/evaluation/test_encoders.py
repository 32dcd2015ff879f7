"""Encoders: masked loss and pseudo-perplexity against loops, embeddings against loops, what an edit of embeddings shows."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from subjects_at_hand import LENGTH, TEXTS, VOCAB, bert, causal_tokenizer, encoder_tokenizer, model

from thalweg.errors import InputError, ShapeError
from thalweg.evaluation import embed, embedding_similarity, masked_loss, pseudo_perplexity
from thalweg.evaluation.masked import masked_plan
from thalweg.evaluation.subjects import around


def test_special_tokens_round_a_text():
    assert around(encoder_tokenizer()) == ([VOCAB - 3], [VOCAB - 2])
    assert around(causal_tokenizer()) == ([], [])


@torch.no_grad()
def test_pseudo_perplexity_equals_a_loop():
    subject, tokenizer = model("bert"), encoder_tokenizer()
    found = pseudo_perplexity(subject, tokenizer, TEXTS[:2], batch_size=3)
    for i, text in enumerate(TEXTS[:2]):
        ids, total = tokenizer(text)["input_ids"], 0.0
        for place in range(1, len(ids) - 1):
            masked = list(ids)
            masked[place] = tokenizer.mask_token_id
            logits = subject(torch.tensor([masked])).logits[0, place]
            total += torch.log_softmax(logits.double(), -1)[ids[place]].item()
        assert found.columns["log_likelihood"][i] == pytest.approx(total, rel=1e-10)
        assert found.columns["masked_tokens"][i] == len(ids) - 2
    assert found.value("pseudo_perplexity") == pytest.approx(math.exp(found.value("pseudo_loss")))


@torch.no_grad()
def test_masked_loss_equals_that_of_transformers_on_its_masks():
    subject, tokenizer = model("bert"), encoder_tokenizer()
    plan = masked_plan(subject, tokenizer, TEXTS, window=20, seed=3)
    found = masked_loss(subject, tokenizer, TEXTS, window=20, seed=3)
    total = count = 0
    for row in plan.rows:
        assert len(row.inputs) <= 20
        assert [row.inputs[place] for place in row.places] == [tokenizer.mask_token_id] * len(row.places)
        assert len(row.places) == max(1, round(0.15 * (len(row.inputs) - 2)))
        labels = torch.full((1, len(row.inputs)), -100)
        labels[0, row.places] = torch.tensor(row.targets)
        total += subject(torch.tensor([row.inputs]), labels=labels).loss.item() * len(row.places)
        count += len(row.places)
    assert found.value("masked_loss") == pytest.approx(total / count, rel=1e-6)
    assert found.metric("masked_loss").null == math.log(VOCAB)


def test_masks_hang_on_the_seed_alone():
    subject, tokenizer = model("bert"), encoder_tokenizer()
    one, again, other = (masked_plan(subject, tokenizer, TEXTS, seed=seed).rows for seed in (0, 0, 1))
    assert one == again
    assert one != other


def test_covering_masks_every_token_once():
    subject, tokenizer = model("bert"), encoder_tokenizer()
    plan = masked_plan(subject, tokenizer, TEXTS, window=30, cover=True, seed=2)
    found = masked_loss(subject, tokenizer, TEXTS, window=30, cover=True, seed=2)
    sizes = [len(tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS]
    assert found.columns["masked_tokens"].tolist() == sizes
    room, wanted = 28, []
    for i, text in enumerate(TEXTS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        wanted += [(i, token) for token in ids]
        for row in (r for r in plan.rows if r.document == i):
            assert len(row.inputs) <= room + 2
            assert len(row.places) <= -(-(len(row.inputs) - 2) // 7)  # 7 = round(1 / 0.15)
    assert sorted((r.document, t) for r in plan.rows for t in r.targets) == sorted(wanted)
    assert plan.rows != masked_plan(subject, tokenizer, TEXTS, window=30, cover=True, seed=3).rows
    whole = masked_plan(subject, tokenizer, TEXTS[:1], window=30, share=1.0, cover=True)
    assert [len(row.places) for row in whole.rows] == [len(row.inputs) - 2 for row in whole.rows]


def test_padding_of_masked_rows_changes_nothing():
    subject, tokenizer = model("bert"), encoder_tokenizer()
    alone, together = (masked_loss(subject, tokenizer, TEXTS, window=24, batch_size=n) for n in (1, 4))
    np.testing.assert_allclose(together.columns["log_likelihood"], alone.columns["log_likelihood"], rtol=1e-9)


@pytest.mark.parametrize(
    ("subject", "tokenizer", "call", "says"),
    [
        ("llama", "encoder", {}, "is causal"),
        ("bert", "causal", {}, "no mask token"),
        ("bert", None, {}, "no tokenizer"),
        ("bert", "encoder", {"share": 0}, "share"),
        ("bert", "encoder", {"window": 2}, "no room"),
    ],
)
def test_masked_loss_refuses(subject, tokenizer, call, says):
    chosen = {"encoder": encoder_tokenizer, "causal": causal_tokenizer, None: lambda: None}[tokenizer]()
    with pytest.raises(InputError, match=says):
        masked_loss(model(subject), chosen, TEXTS, **call)


# embeddings

SHORT = ["The sea was calm.", "A letter came at noon and was read aloud.", "Nobody spoke.", "They walked home late."]


@torch.no_grad()
def test_embeddings_are_means_over_real_tokens():
    subject, tokenizer = model("bert"), encoder_tokenizer()
    for batch_size in (1, 3):
        found = embed(subject, tokenizer, SHORT, batch_size=batch_size)
        for text, embedding in zip(SHORT, found, strict=True):
            states = subject.bert(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            torch.testing.assert_close(embedding, states.mean(0), rtol=1e-10, atol=1e-12)


def test_a_text_beyond_the_window_is_refused_not_cut():
    with pytest.raises(InputError, match="a window holds"):
        embed(model("bert"), encoder_tokenizer(), [TEXTS[2] * 3])


def test_similarity_by_loop():
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    after = before + 0.4 * torch.randn(7, 5, generator=generator, dtype=torch.float64)
    found = embedding_similarity(before, after, resamples=200)
    cosine = torch.nn.functional.cosine_similarity
    wanted = [cosine(a, b, 0).item() for a, b in zip(before, after, strict=True)]
    np.testing.assert_allclose(found.kept.columns["cosine"], wanted)
    pairs = [(i, j) for i in range(7) for j in range(i)]
    mine, theirs = ([cosine(x[i], x[j], 0).item() for i, j in pairs] for x in (before, after))
    assert found.pairs.estimate == pytest.approx(stats.spearmanr(mine, theirs).statistic)
    assert found.kept.metric("embedding_cosine").null == pytest.approx(np.mean(mine))
    assert found.pairs.low <= found.pairs.estimate <= found.pairs.high
    rows = {row.measure: row for row in found.measurements()}
    assert rows["pair_similarity_spearman"].null == 0


def test_similarity_of_nothing_changed_and_of_noise():
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, 64, generator=generator) for _ in range(2))
    same, other = (embedding_similarity(x, z, resamples=100) for z in (3 * x, y))
    assert same.kept.value("embedding_cosine") == pytest.approx(1)
    assert same.pairs.estimate == pytest.approx(1)
    assert abs(other.kept.value("embedding_cosine")) < 0.2
    assert abs(other.pairs.estimate) < 0.5


def test_the_order_of_few_texts_has_no_interval_and_no_warning():
    generator = torch.Generator().manual_seed(2)
    for n in (3, 4, 5):
        x, y = (torch.randn(n, 8, generator=generator) for _ in range(2))
        found = embedding_similarity(x, y, resamples=200).pairs
        assert np.isfinite(found.estimate)
        assert np.isfinite([found.low, found.high]).all() == (n == 5)
    same = torch.ones(6, 8)
    assert np.isnan(embedding_similarity(same, same, resamples=50).pairs.low)


def test_similarity_refuses():
    with pytest.raises(ShapeError):
        embedding_similarity(torch.zeros(4, 2), torch.zeros(4, 3))
    with pytest.raises(InputError):
        embedding_similarity(torch.zeros(2, 2), torch.zeros(2, 2))


def test_the_body_of_a_model_with_a_head_is_read():
    subject = bert().double().eval()
    torch.testing.assert_close(
        embed(subject, encoder_tokenizer(), SHORT), embed(subject.bert, encoder_tokenizer(), SHORT)
    )
    assert LENGTH == 64
