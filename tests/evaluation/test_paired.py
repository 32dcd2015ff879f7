"""Edited against baseline: hand-computed differences, pairing, the no-op that must be one, and the order of runs."""

from contextlib import contextmanager

import numpy as np
import pytest
from subjects_at_hand import TEXTS, causal_tokenizer, llama

from thalweg.editing import grid, sweep
from thalweg.errors import InputError, ProofError
from thalweg.evaluation import Edit, differences, evaluate_edits, perplexity
from thalweg.evaluation.paired import drift
from thalweg.evaluation.scores import Metric, Scores

LL = np.array([-30.0, -50.0, -20.0, -80.0, -10.0])
TOKENS = np.array([10.0, 20.0, 10.0, 40.0, 5.0])


def scores(ll=LL, items="abcde", rule="r"):
    metrics = (
        Metric("loss", "nats/token", ("log_likelihood", "tokens"), lambda a, n: -a / n, "lower"),
        Metric("token_perplexity", "", ("log_likelihood", "tokens"), lambda a, n: np.exp(-a / n), "lower"),
    )
    return Scores("text", rule, tuple(items), {"log_likelihood": ll, "tokens": TOKENS}, metrics)


def test_differences_by_hand():
    worse = LL - np.array([1.0, 2.0, 1.0, 4.0, 0.5])  # a tenth of a nat a token everywhere
    loss, perplexity_ = differences(scores(worse), scores(), resamples=500)
    assert loss.value == pytest.approx(0.1)
    assert (loss.interval.low, loss.interval.high) == (pytest.approx(0.1), pytest.approx(0.1))
    assert loss.sign_flip == 2 / 2**5
    assert perplexity_.value == pytest.approx(np.exp(-worse.sum() / 85) - np.exp(190 / 85))
    assert perplexity_.interval.low < perplexity_.value < perplexity_.interval.high
    assert (loss.edited, loss.baseline) == (pytest.approx(198.5 / 85), pytest.approx(190 / 85))


def test_pairing_removes_what_documents_share():
    """Documents differ by far more than the edit does; unpaired intervals would hold zero."""
    noise = np.random.default_rng(0).normal(0, 0.05, 5)
    found = differences(scores(LL - 1 + noise), scores(), resamples=2000)[0]
    assert found.interval.low > 0
    assert scores().interval("loss", resamples=2000).high - scores().interval("loss", resamples=2000).low > 0.1


@pytest.mark.parametrize("other", [scores(items="abcdx"), scores(rule="other windows")])
def test_results_that_do_not_match_are_refused(other):
    with pytest.raises(InputError, match="need the same"):
        differences(other, scores())


def test_drift_is_relative_and_for_likelihoods():
    assert drift(scores(LL * 1.01), scores()) == pytest.approx(0.01)
    hits = Scores("t", "r", ("a",), {"recall": np.ones(1), "samples": np.ones(1)}, ())
    assert drift(hits, hits) is None


def scaled(subject, factor, entered):
    @contextmanager
    def context():
        hook = subject.model.layers[0].mlp.register_forward_hook(lambda m, a, out: out * factor)
        entered.append(factor)
        try:
            yield
        finally:
            hook.remove()

    return context


def test_every_edit_stands_beside_its_no_op_and_no_ops_are_shared():
    subject, tokenizer, entered, told = llama().double().eval(), causal_tokenizer(), [], []

    def evaluate(name, role):
        told.append((name, role))
        return {"text": perplexity(subject, tokenizer, TEXTS)}

    edits = [Edit(f"x {f}", scaled(subject, f, entered), scaled(subject, 1.0, entered), "no-op") for f in (0.0, 3.0)]
    unedited, outcomes = evaluate_edits(edits, evaluate, resamples=200)
    assert entered == [1.0, 0.0, 3.0]
    assert told == [("unedited", "unedited"), ("no-op", "no-op"), ("x 0.0", "edited"), ("x 3.0", "edited")]
    assert [o.drift for o in outcomes] == [0.0, 0.0]
    moved = [o.differences[0].value for o in outcomes]
    assert all(abs(value) > 0 for value in moved)
    assert outcomes[0].baseline.values() == unedited["text"].values()
    row = next(iter(outcomes[1].measurements(model="m").where(measure="difference.loss")))
    assert (row.arm, row.null, row.n, row.value) == ("x 3.0", 0.0, 3, moved[1])
    assert perplexity(subject, tokenizer, TEXTS).values() == unedited["text"].values()


def test_a_no_op_that_changes_the_model_stops_the_run():
    subject, tokenizer = llama().double().eval(), causal_tokenizer()

    @contextmanager
    def colder():
        hook = subject.lm_head.register_forward_hook(lambda m, a, out: out * 9)
        try:
            yield
        finally:
            hook.remove()

    edit = Edit("x", scaled(subject, 0.0, []), colder)
    with pytest.raises(ProofError, match="at scales 1 moves") as error:
        evaluate_edits([edit], lambda name, role: {"text": perplexity(subject, tokenizer, TEXTS)}, resamples=50)
    assert int(error.value.exit_code) == 5
    assert not subject.lm_head._forward_hooks


def test_scores_know_their_columns_and_names():
    with pytest.raises(InputError, match="one number for each item"):
        scores(items="abcd")
    with pytest.raises(InputError, match="Did you mean 'loss'"):
        scores().value("los")
    assert scores().rows()[1] == {"item": "b", "log_likelihood": -50.0, "tokens": 20.0}


@pytest.mark.parametrize(("given", "got"), [(3, r"int \(3\)"), ({"text": scores()}, "dict"), (None, "NoneType")])
def test_a_sweep_says_what_evaluate_must_return(given, got):
    points = grid(["value"], {"parallel": (0.0,)})
    with pytest.raises(InputError, match=rf"evaluate\('unedited'\) must return the Scores of one task, got {got}"):
        sweep(llama(), lambda role: given, points)
    with pytest.raises(InputError, match=r"evaluate\('no-op'\) must return the Scores of one task"):
        sweep(llama(), lambda role: scores() if role == "unedited" else given, points)
