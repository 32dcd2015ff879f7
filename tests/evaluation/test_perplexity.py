"""Perplexity against transformers' own loss, against loops, under padding, by its names, and what is refused."""

import math

import numpy as np
import pytest
import torch
from subjects_at_hand import CAUSAL, LENGTH, TEXTS, VOCAB, causal_tokenizer, encoder_tokenizer, model
from transformers import PreTrainedTokenizerFast

from thalweg.capture.limits import longest_of, vocabulary_of
from thalweg.data.text.tokenizer import ByteTokenizer, token_ids
from thalweg.errors import InputError
from thalweg.evaluation import perplexity
from thalweg.evaluation.scoring import likelihood, score
from thalweg.evaluation.subjects import is_causal
from thalweg.evaluation.windows import Window, Windows


@torch.no_grad()
def by_loop(subject, ids, rule):
    """The log likelihood of a text, one token at a time, each from its own call."""
    total = 0.0
    for window in rule.cut(ids):
        for i, target in enumerate(window.targets):
            seen = window.inputs[: len(window.inputs) - len(window.targets) + i + 1]
            logits = subject(torch.tensor([seen])).logits[0, -1].double()
            total += (logits[target] - math.log(sum(math.exp(x) for x in logits.tolist()))).item()
    return total


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("stride", [None, 5])
def test_sums_equal_a_loop_over_tokens(kind, stride):
    subject, tokenizer = model(kind), causal_tokenizer()
    found = perplexity(subject, tokenizer, TEXTS[:2], window=9, stride=stride)
    for i, text in enumerate(TEXTS[:2]):
        ids = token_ids(tokenizer, text)
        wanted = by_loop(subject, ids, Windows(9, stride, tokenizer.eos_token_id))
        assert found.columns["log_likelihood"][i] == pytest.approx(wanted, rel=1e-12)
        assert found.columns["tokens"][i] == len(ids)
        assert found.columns["bytes"][i] == len(text.encode())
    assert found.columns["words"].tolist() == [16, 5]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "shell"])
def test_one_window_is_the_loss_of_transformers(kind):
    subject, tokenizer = model(kind), causal_tokenizer()
    ids = torch.tensor([token_ids(tokenizer, TEXTS[0])])
    with torch.no_grad():
        theirs = subject(ids, labels=ids).loss.item()
    found = perplexity(subject, tokenizer, TEXTS[:1], bos=False)
    assert found.loss == pytest.approx(theirs, rel=1e-6)  # transformers takes its loss in float32
    assert found.columns["tokens"][0] == ids.shape[1] - 1


@pytest.mark.parametrize("kind", CAUSAL)
def test_batches_and_both_paddings_change_nothing(kind):
    subject, tokenizer = model(kind), causal_tokenizer()
    alone = perplexity(subject, tokenizer, TEXTS, window=20)
    for padding in ("right", "left"):
        together = perplexity(subject, tokenizer, TEXTS, window=20, batch_size=3, padding=padding)
        np.testing.assert_allclose(
            together.columns["log_likelihood"], alone.columns["log_likelihood"], rtol=1e-10, err_msg=padding
        )


def test_the_names_are_not_mixed():
    found = perplexity(model("llama"), causal_tokenizer(), TEXTS)
    sums = {name: column.sum() for name, column in found.columns.items()}
    ll = sums["log_likelihood"]
    assert found.token_perplexity == pytest.approx(math.exp(-ll / sums["tokens"]))
    assert found.word_perplexity == pytest.approx(math.exp(-ll / sums["words"]))
    assert found.byte_perplexity == pytest.approx(math.exp(-ll / sums["bytes"]))
    assert found.bits_per_byte == pytest.approx(math.log2(found.byte_perplexity))
    assert found.loss == pytest.approx(math.log(found.token_perplexity))
    assert len({found.token_perplexity, found.word_perplexity, found.byte_perplexity}) == 3
    assert found.metric("loss").null == math.log(VOCAB)
    assert (
        found.rule
        == f"disjoint windows of {LENGTH} tokens, first token scored after token {causal_tokenizer().eos_token_id}"
    )


def test_measurements_carry_interval_count_and_null():
    rows = perplexity(model("llama"), causal_tokenizer(), TEXTS).measurements(
        options={"resamples": 200, "method": "percentile"}, model="m"
    )
    row = next(iter(rows.where(measure="token_perplexity")))
    assert row.n == 3
    assert row.low < row.value < row.high
    assert "200 resamples" in row.interval
    assert row.null == VOCAB
    assert row.model == "m"


def test_what_is_told_on_the_way():
    windows, documents = [], []
    found = perplexity(
        model("llama"),
        causal_tokenizer(),
        TEXTS,
        window=16,
        on_window=lambda done, of: windows.append((done, of)),
        on_document=documents.append,
    )
    assert windows == [(i + 1, len(windows)) for i in range(len(windows))]
    assert [row["item"] for row in documents] == list(found.items)
    assert [row["log_likelihood"] for row in documents] == found.columns["log_likelihood"].tolist()


def test_the_mode_of_the_model_comes_back_and_dropout_is_off():
    from subjects_at_hand import gpt2

    subject = gpt2().train()
    subject.transformer.h[1].eval()
    first = perplexity(subject, causal_tokenizer(), TEXTS[:1]).loss
    assert perplexity(subject, causal_tokenizer(), TEXTS[:1]).loss == first
    assert subject.training
    assert not subject.transformer.h[1].training


def test_a_tokenizer_of_ours_and_its_end_of_text():
    from thalweg.models import Decoder, DecoderConfig

    subject = Decoder(DecoderConfig(vocab_size=257, width=8, depth=1, heads=1, max_length=64))
    found = perplexity(subject, ByteTokenizer(), ["some bytes"])
    assert found.columns["tokens"][0] == found.columns["bytes"][0] == 10
    assert "after token 256" in found.rule


def test_log_probabilities_are_widened():
    logits = torch.randn(600, 50, generator=torch.Generator().manual_seed(0)).mul(8).bfloat16()
    targets = torch.arange(600) % 50
    wanted = torch.log_softmax(logits.double(), -1)[range(600), targets].sum().item()
    assert likelihood(logits, targets).log_likelihood == pytest.approx(wanted, rel=1e-6)
    best = logits[:3].argmax(-1)
    assert likelihood(logits[:3], best).greedy
    assert not likelihood(logits[:3], (best + 1) % 50).greedy


@pytest.mark.parametrize("kind", CAUSAL)
def test_causality_is_tried_and_not_read(kind):
    assert is_causal(model(kind))
    assert is_causal(model(kind, torch.float32))


def test_an_encoder_is_noticed_whatever_its_class_is_called():
    from transformers import BertConfig, BertLMHeadModel

    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    looks_causal = BertLMHeadModel(BertConfig(vocab_size=VOCAB, **config))
    for subject in (model("bert"), looks_causal):
        assert not is_causal(subject)
        with pytest.raises(InputError, match="is an encoder") as error:
            perplexity(subject, encoder_tokenizer(), TEXTS)
        assert "\n" not in str(error.value)


def test_lengths_and_vocabularies_of_every_kind():
    assert {longest_of(model(kind)) for kind in (*CAUSAL, "bert")} == {LENGTH}
    assert {vocabulary_of(model(kind)) for kind in (*CAUSAL, "bert")} == {VOCAB}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"tokenizer": None}, "no tokenizer"),
        ({"texts": []}, "no document"),
        ({"texts": [""]}, "holds no token"),
        ({"texts": ["a"], "bos": False}, "one token"),
        ({"window": LENGTH + 1}, f"{LENGTH} tokens at most"),
        ({"window": 1}, "at least 2"),
        ({"stride": 0}, "stride"),
        ({"batch_size": 0}, "batch_size"),
        ({"padding": "both"}, "right or left"),
        ({"bos": True}, "bos=ID"),
        ({"subject": "headless"}, "no logits"),
        ({"tokenizer": "large"}, "give the tokenizer that it was trained with"),
    ],
)
def test_what_is_refused_in_one_line(call, says):
    subject, tokenizer, texts = model("llama"), causal_tokenizer(), TEXTS
    if call.pop("subject", None):
        subject = subject.model
    if "tokenizer" in call:
        tokenizer = call.pop("tokenizer")
    texts = call.pop("texts", texts)
    if tokenizer == "large":
        tokenizer = _large()
    with pytest.raises(InputError, match=says) as error:
        perplexity(subject, tokenizer, texts, **call)
    assert "\n" not in str(error.value)


def _large() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"<e>": 0, "She": VOCAB + 5, "?": 1}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>")


def test_a_cache_is_neither_made_nor_needed():
    calls = []
    subject = model("llama")
    hook = subject.register_forward_hook(lambda m, a, k, out: calls.append(out.past_key_values), with_kwargs=True)
    try:
        list(score(subject, [Window([1, 2, 3], [2, 3, 4])]))
    finally:
        hook.remove()
    assert calls == [None]
