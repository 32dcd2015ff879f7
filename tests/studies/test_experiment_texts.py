"""The documents of experiments on models: which piece a seed reads, and how many tokens there are."""

import itertools

import pytest
import torch

from thalweg.errors import InputError
from thalweg.studies.experiments import subjects
from thalweg.studies.experiments.base import registry


@pytest.fixture(scope="module")
def pieces():
    return subjects._pieces()


def places(pieces, texts):
    return [pieces.index(text) for text in texts]


@pytest.mark.parametrize("seed", [0, 5, 15])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_few_documents_are_those_of_the_records(pieces, seed, count):
    assert places(pieces, subjects.texts_of(seed, count)) == [7 * seed + 3 * i for i in range(count)]
    assert [subjects.documents_for(tokens) for tokens in (64, 128, 512, 384)] == [2, 2, 3, 3]


@pytest.mark.parametrize(("count", "seeds"), [(2, 34), (7, 33), (8, 30), (20, 12), (28, 8)])
def test_no_two_seeds_share_a_document(pieces, count, seeds):
    """Catches: seed 3 reading what seed 0 did, from eight documents on; and seeds beyond the end that begin again."""
    read = list(itertools.chain.from_iterable(places(pieces, subjects.texts_of(seed, count)) for seed in range(seeds)))
    assert len(set(read)) == len(read) == count * seeds


def test_a_text_without_documents_for_a_seed_says_so():
    with pytest.raises(
        InputError, match=r"244 pieces, of which seeds up to 7 can have 28 each .*, got seed 8; read fewer"
    ):
        subjects.texts_of(8, 28)
    with pytest.raises(InputError, match="seeds up to 33 can have 3 each"):
        subjects.texts_of(100, 3)
    with pytest.raises(InputError, match="no seed can have 245 each"):
        subjects.texts_of(0, 245)


def test_the_largest_scales_that_are_shipped_have_their_documents():
    """8,192 tokens of eight seeds (continuum-claims), 4,096 of sixteen (growth-claims)."""
    assert all(subjects.texts_of(seed, subjects.documents_for(8192)) for seed in range(8))
    assert all(subjects.texts_of(seed, subjects.documents_for(4096)) for seed in range(16))


def test_an_experiment_with_records_keeps_its_documents(pieces):
    for seed in (0, 3, 11):
        assert places(pieces, subjects.neighbouring_texts(seed, 4096)) == [7 * seed + 3 * i for i in range(22)]
    with pytest.raises(InputError, match="read fewer tokens"):
        subjects.neighbouring_texts(0, 10**6)


@pytest.fixture
def encoder(monkeypatch):
    """A small encoder whose tokenizer gives every word an id, and all texts that it was given."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=50, hidden_size=8, **sizes)).eval()
    given = []

    class Words:
        def __call__(self, text, truncation=False, max_length=None, **_):
            given.append(text)
            ids = [len(word) % 40 + 2 for word in text.split()]
            ids = torch.tensor([[1, *(ids[: max_length - 2] if truncation else ids), 0]])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    monkeypatch.setattr(subjects, "_opened", lambda name: subjects.Subject(model, Words(), name))
    return given


def test_a_few_tokens_are_the_first_windows_of_the_documents_of_the_records(encoder):
    found = subjects.layer_states("made", 1, 0, 384)
    assert found.inputs.shape == (384, 8) and encoder == subjects.texts_of(1, 7)


@pytest.mark.parametrize("tokens", [435, 2000])
def test_more_tokens_are_all_there_on_documents_of_this_seed_alone(encoder, tokens):
    """Catches: 744 tokens, in silence, whatever was asked."""
    assert subjects.layer_states("made", 0, 0, tokens).inputs.shape == (tokens, 8)
    first = set(encoder)
    encoder.clear()
    subjects.layer_states("made", 3, 0, tokens)
    assert not first & set(encoder)


def test_documents_that_hold_too_few_tokens_are_refused(encoder, monkeypatch):
    monkeypatch.setattr(subjects, "A_TOKEN", 1)
    with pytest.raises(InputError, match=r"have \d+ tokens for made, the plan reads 4000; read fewer tokens"):
        subjects.layer_states("made", 0, 0, 4000)


def test_a_probe_does_not_read_fewer_tokens_than_the_plan_says(monkeypatch):
    monkeypatch.setattr(subjects, "documents_for", lambda tokens: 1)
    train = {"data": "austen", "depth": 1, "width": 16, "heads": 2, "steps": 1, "sequence_length": 16, "threads": 1}
    train |= {"batch_size": 2, "eval_batches": 1, "geometry": False}
    entry = registry["torsion"]
    with pytest.raises(InputError, match=r"1 documents of seed 0 have \d+ tokens for own seed 0, the plan reads 5000"):
        entry.rows("torsion", entry.options({"train": train, "tokens": 5000, "length": 16}), 0, lambda line: None)
