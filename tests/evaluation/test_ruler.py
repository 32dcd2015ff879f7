"""Long-context tasks: the same for everybody, within their budget and full, solvable from the prompt alone, scored by recall."""

import hashlib
import itertools
import re
from collections import Counter

import numpy as np
import pytest
import torch
from subjects_at_hand import CAUSAL, causal_tokenizer, encoder_tokenizer, model
from transformers import PreTrainedTokenizerFast

from thalweg.data.text.tokenizer import ByteTokenizer, token_ids
from thalweg.errors import InputError, UnknownNameError
from thalweg.evaluation import ruler
from thalweg.evaluation.ruler import needles, words
from thalweg.evaluation.ruler.counting import TOP, counts
from thalweg.evaluation.ruler.run import answer
from thalweg.evaluation.ruler.sample import fitted
from thalweg.evaluation.scores import Scores
from thalweg.models import Decoder, DecoderConfig

TASKS = [*ruler.TASKS]
BYTES = ByteTokenizer()
GOLDEN = {
    "single": "5a47f484e33450b0",
    "single_2": "cfad96f7e6730dfb",
    "single_3": "fc32be6ccba7fc82",
    "multikey_1": "a570f13fb5593ffd",
    "multikey_2": "e15c2e167e7c69ae",
    "multikey_3": "c1abda20289fd365",
    "multivalue": "b237298b2200721e",
    "multiquery": "f4fb5b0eff5d19f6",
    "vt": "57e98a604320ae57",
    "cwe": "6abccfd136ebd3f9",
    "fwe": "59fdbf3901a31803",
}


def made(task, length=6000, count=2, tokenizer=BYTES, **options):
    return ruler.samples(task, tokenizer, length, count, **options)


# oracles: each reads the prompt alone


def needle_oracle(prompt):
    body, question = prompt.rsplit("\n\nQuestion: ", 1)
    found = dict.fromkeys([])
    keys = re.search(r"of (.+) in the text\?", question)[1].replace(" and ", ", ").split(", ")
    held = re.findall(r"The secret (?:number|identifier) of (\S+) is (\S+?)\.(?:\s|$)", body)
    for key in keys:
        found |= dict.fromkeys(value for name, value in held if name == key)
    return list(found)


def chain_oracle(prompt):
    body, question = prompt.rsplit("\n\nQuestion: ", 1)
    value = re.search(r"value (\d+)", question)[1]
    held = {}
    for name, given in re.findall(r"LET (\w+) = (\w+)\.", body.rsplit("Follow the assignments", 1)[1]):
        held[name] = held.get(given, given)
    return [name for name, given in held.items() if given == value]


def common_oracle(prompt):
    body = prompt.rsplit("\n\nQuestion: ", 1)[0].rsplit("Below is a numbered list", 1)[1]
    return [word for word, _ in Counter(re.findall(r"\d+\. (\w+)", body)).most_common(10)]


def frequent_oracle(prompt):
    body = prompt.rsplit("\n\nQuestion: ", 1)[0].split("come up.\n\n", 1)[1]
    return [word for word, _ in Counter(body.split()).most_common(TOP + 1)][1:]


ORACLES = {"vt": chain_oracle, "cwe": common_oracle, "fwe": frequent_oracle}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [4000, 12_000])
def test_an_oracle_finds_the_answers(task, length):
    for sample in made(task, length, 3):
        found = ORACLES.get(task, needle_oracle)(sample.prompt)
        assert sorted(found) == sorted(sample.answers), task
        assert ruler.recall(", ".join(found), sample.answers) == 1


@pytest.mark.parametrize("haystack", ["noise", "needles", "text"])
@pytest.mark.parametrize("task", ["single", "multikey_1", "multivalue", "multiquery"])
def test_every_haystack_hides_every_needle(task, haystack):
    for sample in made(task, 4000, 2, haystack=haystack):
        assert sorted(needle_oracle(sample.prompt)) == sorted(sample.answers)


@pytest.mark.parametrize("task", TASKS)
def test_the_content_is_the_same_for_everybody(task):
    text = "\0".join(s.prompt + "\1" + "\1".join(s.answers) for s in made(task, 5000, 2, seed=1))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == GOLDEN[task]


@pytest.mark.parametrize("task", TASKS)
def test_seeds_and_samples_differ_and_repeat(task):
    one, again, other = (made(task, seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert one[0].prompt != other[0].prompt
    assert one[0].answers != one[1].answers


@pytest.mark.parametrize("task", TASKS)
def test_a_longer_budget_keeps_the_question(task):
    short, long = (made(task, length, 1)[0] for length in (5000, 12_000))
    assert short.answers == long.answers or task in ("fwe",)
    assert long.units > short.units
    assert long.tokens > short.tokens


@pytest.mark.parametrize("tokenizer", [BYTES, causal_tokenizer(), encoder_tokenizer()], ids=["bytes", "bpe", "special"])
@pytest.mark.parametrize("task", TASKS)
def test_the_budget_is_kept_and_used(task, tokenizer):
    for length in (6000, 6001, 6500):
        (sample,) = made(task, length, 1, tokenizer)
        special = int(isinstance(tokenizer, PreTrainedTokenizerFast) and tokenizer.cls_token is not None)
        assert sample.tokens == len(token_ids(tokenizer, sample.prompt)) + special
        assert sample.tokens + sample.generate <= length
        assert len(token_ids(tokenizer, ", ".join(sample.answers))) < sample.generate


@pytest.mark.parametrize("task", TASKS)
def test_one_unit_more_would_not_fit(task):
    from random import Random

    text = needles.sentences("One two three. " * 30)
    for length in (3500, 3777):
        draft = ruler.TASKS[task](Random(4), length, None, text)
        sample = fitted(draft, BYTES, length, task, 0)
        assert len(draft.render(sample.units + 1).encode()) + sample.generate > length


@pytest.mark.parametrize("task", TASKS)
def test_too_short_a_budget_is_one_line(task):
    need = 150
    while True:  # the vocabulary of fwe grows with the budget, so what it needs does too
        try:
            sample = made(task, need, 1)[0]
            break
        except InputError as error:
            assert "\n" not in str(error)
            least = int(re.search(r"needs at least (\d+)", str(error))[1])
            assert least > need
            need = least
    assert need > 150
    assert sample.tokens + sample.generate <= need


def test_needles_stand_at_their_depths():
    units = [f"u{i}" for i in range(40)]
    found = needles.insert(units, ["a", "b", "c"], [0, 39, 20])
    assert found[0] == "a"
    assert found[-1] == "b"
    assert found.index("c") == 21
    assert [u for u in found if u in set(units)] == units
    depths = {s.prompt.index("The secret") * 10 // len(s.prompt) for s in made("single", 4000, 40)}
    assert len(depths) >= 7


def test_counts_fall_strictly_where_it_matters():
    for units in (24, 60, 500, 10_000):
        for vocabulary in (6, 40, 300):
            found = counts(units, vocabulary)
            assert all(a > b for a, b in itertools.pairwise(found[: TOP + 2]))
            assert min(found) >= 1


def test_words_are_different_and_enough():
    from random import Random

    rng = Random(0)
    for listed in (words.ADJECTIVES, words.NOUNS):
        assert len(set(listed)) == len(listed)
    assert len(set(words.keys(rng, 5000))) == 5000
    assert len(set(words.single(rng, 9000))) == 9000
    assert len(set(words.identifiers(rng, 500))) == 500
    with pytest.raises(InputError):
        words.keys(rng, words.KEYS + 1)


def test_names():
    assert ruler.names_of("single_1, vt,vt") == ["single", "vt"]
    assert ruler.names_of("all") == TASKS
    assert set(ruler.names_of("offline")) < set(TASKS)
    assert sum(len(members) for members in ruler.FAMILIES.values()) == len(TASKS)
    with pytest.raises(UnknownNameError, match="Did you mean 'single'"):
        ruler.names_of("singel")
    with pytest.raises(UnknownNameError):
        made("single", haystack="hay")
    with pytest.raises(InputError, match="vt takes"):
        made("vt", haystack="needles")
    with pytest.raises(InputError, match="at least 20 sentences"):
        made("single_2", text="One. Two.")


def test_a_text_of_ones_own():
    text = " ".join(f"This is the sentence with the number {i} in it." for i in range(50))
    (sample,) = made("single_2", 3000, 1, text=text)
    assert "This is the sentence with the number" in sample.prompt
    assert needle_oracle(sample.prompt) == list(sample.answers)


# scores


def test_recall():
    assert ruler.recall("It is 1234567, and Owl", ("1234567", "OWL", "x", "9")) == 0.5
    assert ruler.recall("", ("a",)) == 0


def small():
    return Decoder(DecoderConfig(vocab_size=257, width=8, depth=1, heads=1, max_length=3000)).double().eval()


def test_a_decoder_of_ours_answers_as_its_shell_does():
    from thalweg.models import ThalwegConfig, ThalwegForCausalLM

    config = DecoderConfig(vocab_size=257, width=8, depth=1, heads=1, max_length=3000)
    shell = ThalwegForCausalLM(ThalwegConfig.of(config)).double().eval()
    samples = [*made("single", 700, 2), *made("vt", 900, 1)]
    ours = answer(shell.decoder, BYTES, samples)
    assert ours == answer(shell, BYTES, samples)
    assert ours == [answer(shell, BYTES, [sample])[0] for sample in samples]  # left padding changes nothing


def test_a_run_with_its_null_and_its_means(monkeypatch):
    """A model that copies what the oracle finds: full recall, and the null is what others' answers give."""
    from thalweg.evaluation.ruler import run as module  # the function has the name of its module

    samples = {task: made(task, 3000, 3) for task in ("single", "multikey_2", "vt")}

    def oracle(subject, tokenizer, batch):
        return [", ".join(ORACLES.get(s.task, needle_oracle)(s.prompt)) if s.index else "no" for s in batch]

    monkeypatch.setitem(module.__globals__, "answer", oracle)
    rows, steps = [], []
    found = ruler.run(
        small(), BYTES, samples, length=3000, batch_size=2, on_row=rows.append, on_sample=lambda *s: steps.append(s)
    )
    assert [*found] == ["single", "multikey_2", "vt", "ruler"]
    assert found["single"].value("recall") == pytest.approx(2 / 3)
    assert found["single"].metric("recall").null == 0
    assert found["single"].facts["candidate_guess"] == 1
    assert found["multikey_2"].facts["candidate_guess"] < 0.05
    assert len(rows) == 9
    assert rows[1]["output"] == rows[1]["answers"][0]
    assert steps[-1] == (9, 9)


def scores_of(**recalls):
    return {
        task: Scores(
            task,
            "r",
            tuple(f"{task} {i}" for i in range(len(values))),
            {"recall": np.array(values), "samples": np.ones(len(values))},
            (_recall_metric(),),
        )
        for task, values in recalls.items()
    }


def _recall_metric():
    from thalweg.evaluation.scores import share

    return share(("recall", "samples"), "recall", null=0.25, null_kind="n")


def test_the_two_means_by_hand():
    found = ruler.aggregate(scores_of(single=[1.0, 1.0], multikey_2=[1.0, 0.0], vt=[0.2, 0.2, 0.2, 0.2]))
    assert found.value("mean_of_tasks") == pytest.approx((1 + 0.5 + 0.2) / 3)
    assert found.value("family_macro") == pytest.approx((0.75 + 0.2) / 2)
    assert found.rule.startswith("mean of 3 of 13 tasks; macro over 2 of 5 families")
    assert found.metric("family_macro").null == 0.25
    for name in ("mean_of_tasks", "family_macro"):
        assert found.columns[name].sum() == pytest.approx(found.value(name))
        interval = found.interval(name, resamples=500)
        assert interval.low <= interval.estimate <= interval.high


@pytest.mark.parametrize("kind", CAUSAL)
@torch.no_grad()
def test_answers_are_greedy_and_end_with_the_text_or_the_room(kind):
    subject, tokenizer = model(kind), causal_tokenizer()
    sample = ruler.Sample("single", 0, "She said that", ("x",), 5, 12, 1, 1)
    ids = token_ids(tokenizer, sample.prompt)
    start = len(ids)
    while len(ids) < start + sample.generate and ids[-1] != tokenizer.eos_token_id:  # no cache, one pass for each token
        ids.append(int(subject(torch.tensor([ids])).logits[0, -1].argmax()))
    assert answer(subject, tokenizer, [sample]) == [tokenizer.decode(ids[start:], skip_special_tokens=True)]
    other = ruler.Sample("single", 1, "It was a", ("x",), 5, 3, 1, 1)
    together = answer(subject, tokenizer, [sample, other])
    assert together == [*answer(subject, tokenizer, [sample]), *answer(subject, tokenizer, [other])]


def test_refuses():
    samples = {"single": made("single", 900, 1)}
    with pytest.raises(InputError, match="is an encoder"):
        ruler.run(model("bert"), encoder_tokenizer(), samples, length=60)
    with pytest.raises(InputError, match="3000 tokens at most"):
        ruler.run(small(), BYTES, samples, length=3001)
    with pytest.raises(InputError, match="no tokenizer"):
        ruler.run(small(), None, samples, length=900)
    assert torch.is_grad_enabled()
