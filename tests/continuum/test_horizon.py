"""The horizon of a head: golden numbers, the law against drawn logits, the needle's place, sinks, the probe."""

import math

import probe_subjects as subjects
import pytest
import torch

from thalweg.continuum import findings
from thalweg.continuum.needles import needles_of
from thalweg.data.tasks.austen import shipped_tokenizer
from thalweg.data.text.tokenizer import token_ids
from thalweg.errors import InputError
from thalweg.evaluation import ruler
from thalweg.geometry.retention import frozen, horizon, offset_of, retention, shape_of

ONE = torch.tensor(1.0)


@pytest.mark.parametrize(("keys", "told"), [(64, 0.9663), (1024, 0.6386), (16384, 0.0994)])
def test_golden_retention_and_drawn_logits(keys, told):
    found = float(retention(8 * ONE, ONE, keys))
    assert found == pytest.approx(told, abs=1e-4)
    others = torch.randn(400, keys - 1, generator=torch.Generator().manual_seed(0))
    drawn = (math.exp(8) / (math.exp(8) + others.exp().sum(-1))).mean()
    assert float(drawn) == pytest.approx(found, rel=0.01)


def test_the_horizon_is_the_inverse_and_grows_with_the_margin():
    margin, spread = torch.tensor([2.0, 8.0]), torch.tensor([0.5, 1.0])
    for share in (0.1, 0.5, 0.9):
        kept = retention(margin, spread, horizon(margin, spread, share))
        torch.testing.assert_close(kept, torch.full((2,), share, dtype=torch.float64))
    told = offset_of(retention(margin, spread, 100), torch.tensor(100))
    torch.testing.assert_close(told, margin.double() - spread.double() ** 2 / 2)
    assert frozen(torch.tensor([1.0, 5.0]), 1000).tolist() == [False, True]
    with pytest.raises(InputError, match="between 0 and 1"):
        horizon(ONE, ONE, 1.0)


def test_the_shape_of_normal_and_of_other_numbers():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert [abs(float(v)) < 0.05 for v in shape_of(x)] == [True, True]
    skew, kurtosis = shape_of(x.exp())
    assert skew > 2 and kurtosis > 10
    assert shape_of(torch.ones(5)) == (0, 0)


def test_the_place_of_the_needle():
    """Catches: places in characters, special tokens forgotten, the question taken for the needle."""
    tokenizer = shipped_tokenizer()
    samples = ruler.samples("single", tokenizer, 300, 3, seed=0)
    for sample, needle in zip(samples, needles_of(samples, tokenizer, None), strict=True):
        found = tokenizer.decode(needle.ids[0, needle.start : needle.end].tolist())
        assert sample.answers[0] in found and len(found) <= len(sample.answers[0]) + 3
        assert needle.ids.shape[1] >= len(token_ids(tokenizer, sample.prompt)) > needle.end + 10
    with pytest.raises(InputError, match="has 5 tokens"):
        next(needles_of(samples, tokenizer, 5))


@pytest.fixture(scope="module")
def decoder():
    tokenizer = shipped_tokenizer()
    return subjects.ours(vocab_size=tokenizer.vocab_size, max_length=400), tokenizer


def test_an_untrained_decoder_has_no_horizon(decoder):
    """The null: no head of random weights keeps more of a needle than of as many other keys; nothing is retrieved."""
    model, tokenizer = decoder
    options = {"horizon": {"lengths": [160, 320], "samples": 4, "heads": 2}}
    documents = [[i % 300 + 5 for i in range(j, j + 40)] for j in range(10)]
    (_, one) = findings(model, documents, ["horizon"], tokenizer=tokenizer, length=32, options=options)
    assert not one.failed, one.failed
    rows = one.rows
    for row in rows.where(measure="horizon.retained"):
        assert row.value < 3 * row.null + 0.02
    assert max(row.value for row in rows.where(measure="horizon.length")) < 30
    assert [row.value for row in rows.where(measure="horizon.recall")] == [0, 0]
    for row in rows.where(measure="horizon.sink_share"):
        assert row.value == pytest.approx(row.null, rel=0.25)


def test_prompts_too_short_for_a_needle_have_one_reason(decoder):
    """Not that windows of attention are short, which nothing has shown."""
    model, tokenizer = decoder
    documents = [[i % 300 + 5 for i in range(j, j + 40)] for j in range(4)]
    options = {"horizon": {"lengths": [16, 24], "samples": 2}}
    (_, one) = findings(model, documents, ["horizon"], tokenizer=tokenizer, length=32, options=options)
    assert not one.failed and sum("too few for a needle task" in line for line in one.caveats) == 2
    assert not any("windows of attention" in line for line in one.caveats)
    assert one.summary.startswith("no needle could be hidden; first token")


def test_a_sink_is_found_and_counted_by_hand():
    """Catches: the first query counted (it sees itself alone), keys in place of queries, padding counted."""
    model = subjects.llama(attention_bias=True)
    documents = subjects.texts(10, 21)
    for ids in documents:
        ids[0] = 7
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.linspace(-3, 3, 32)
        k = model.model.layers[0].self_attn.k_proj
        k.weight.zero_()
        k.weight[:, -1] = 4.0
        model.model.layers[0].self_attn.q_proj.bias.fill_(2.0)
    model.set_attn_implementation("eager")
    (_, one) = findings(model, documents, ["horizon"], length=25)
    found = {row.head: row.value for row in one.rows.where(measure="horizon.sink_share", layer=0)}
    sums = torch.zeros(4)
    count = 0
    for ids in documents:
        for start in range(0, len(ids), 25):
            part = ids[start : start + 25]
            if len(part) > 1:
                weights = model(torch.tensor([part]), output_attentions=True).attentions[0][0]
                sums, count = sums + weights[:, 1:, 0].sum(-1).detach(), count + len(part) - 1
    assert [found[h] for h in range(4)] == pytest.approx((sums / count).tolist(), rel=1e-4)
    assert "no tokenizer" in " ".join(one.caveats)


def test_encoders_have_no_horizon():
    (_, one) = findings(subjects.bert(), subjects.texts(), ["horizon"], length=16)
    assert "no causal decoder" in one.not_applicable
