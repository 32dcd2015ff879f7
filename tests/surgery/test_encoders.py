"""Encoders of ours through convert and prune: proofs on masked tokens and on classified texts, scores of heads, folders, the command line."""

import json

import pytest
import torch
from growing_reference import LENGTH, VOCAB, scatter, tokens
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, BertConfig, BertModel

from thalweg import data
from thalweg.cli import main
from thalweg.data.masking import CHOSEN
from thalweg.errors import InputError, ProofError
from thalweg.models import Encoder, EncoderConfig
from thalweg.models.hf import in_shell
from thalweg.surgery import Growth, convert, grow_heads, head_scores, prune, prune_heads
from thalweg.surgery.text import Sample, labelled, sample

GROWTH = Growth(heads=2, width=32, ffn_width=90, depth=1)
RUN = ["--depth", "1", "--width", "16", "--heads", "2", "--sequence-length", "12", "--steps", "3", "--eval-every", "3"]
RUN += ["--eval-batches", "1", "--batch-size", "8", "--threads", "1", "--geometry", "false", "--vocab-size", "300"]


def encoder(objective="classification", **changes):
    """Float64, every parameter random."""
    more = {"classes": 3} if objective == "classification" else {"objective": objective}
    values = {
        "vocab_size": VOCAB,
        "width": 16,
        "depth": 2,
        "heads": 4,
        "kv_heads": 2,
        "max_length": 32,
        **more,
        **changes,
    }
    model = Encoder(EncoderConfig(**values), generator=torch.Generator().manual_seed(5)).double().eval()
    scatter(model)
    return model


def asked(objective, rows=6):
    """Padded rows with answers."""
    ids = tokens(rows)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    mask[3, :2] = 0
    labels = torch.arange(rows) % 3
    if objective == "masked":
        labels = torch.full_like(ids, -100)
        labels[:, 3] = torch.arange(rows)
    return Sample(ids, "by hand", "", "", mask, labels)


@pytest.mark.parametrize("objective", ["classification", "masked"])
@pytest.mark.parametrize("connection", ["additive", "mhc"])
def test_everything_grows_and_the_proof_says_so(objective, connection):
    model, given = encoder(objective, connection=connection), asked(objective)
    made, proof = convert(model, None, growth=GROWTH, dtype="float64", tokens=given)
    assert proof.claim == "equal" and proof.passed and proof.difference < 1e-12 and proof.kl < 1e-12
    assert proof.unit == {"masked": "nats/masked token", "classification": "nats/sequence"}[objective]
    with torch.no_grad():
        loss = [
            model(i[None], attention_mask=m[None], labels=y[None]).loss
            for i, m, y in zip(given.ids, given.mask, given.labels, strict=True)
        ]
    assert proof.loss_before == pytest.approx(sum(map(float, loss)) / 6, abs=1e-12)
    assert proof.loss_after == pytest.approx(proof.loss_before, abs=1e-12) and proof.tokens == 6 * LENGTH - 5
    names = {case.name for case in proof.cases}
    assert {"padded on the left", "padded on the right", "1 tokens"} <= names and not any("cached" in n for n in names)
    assert made.transformer.config.layer_heads == (6, 6, 6) and made.transformer.config.width == 32


@pytest.mark.parametrize("objective", ["classification", "masked"])
def test_a_growth_that_changes_a_number_fails_its_proof(objective, monkeypatch):
    def wrong(self, model, **_):
        grown = grow_heads(model, {1: 2}).model
        with torch.no_grad():
            grown.blocks[1].sublayers[0].output.weight[:, -1] += 1e-3
        return grown, True, ()

    monkeypatch.setattr(Growth, "apply", wrong)
    with pytest.raises(ProofError, match="is not the function of the model"):
        convert(encoder(objective), None, growth=GROWTH, dtype="float64", tokens=asked(objective))


def test_another_connection_and_a_warm_start():
    made, proof = convert(encoder(), "mgt", dtype="float64", tokens=asked("classification"))
    assert proof.claim == "equal" and proof.difference < 1e-12 and type(made.transformer) is Encoder
    assert made.config.connection == "mgt" and made.config.classes == 3
    made, proof = convert(encoder("masked"), "post_norm", tokens=tokens())
    assert proof.claim == "warm start" and proof.passed and proof.loss_after is None
    assert proof.lines()[1].startswith("no loss, KL ")


@pytest.mark.parametrize("objective", ["classification", "masked"])
def test_loss_is_what_the_encoder_loses(objective):
    model, given = encoder(objective), asked(objective)

    def loss(of):
        with torch.no_grad():
            return of(given.ids, attention_mask=given.mask, labels=given.labels).loss.item()

    for score in head_scores(model, given.ids, "loss", mask=given.mask, labels=given.labels):
        assert score.score == pytest.approx(
            loss(prune_heads(model, {score.layer: score.heads}).model) - loss(model), abs=1e-12
        )


@pytest.mark.parametrize("by", ["output", "energy"])
def test_padding_has_no_part_in_a_score(by):
    """Rows padded on either side against the same rows cut, whose padding is other tokens."""
    model, ids = encoder(), tokens(1)
    cut = head_scores(model, ids[:, :4], by)
    for side in (slice(4, None), slice(0, 3)):
        padded, mask = ids.clone(), torch.ones_like(ids)
        if side.start == 0:
            padded = torch.cat([tokens(1, 3, seed=1), ids[:, :4]], 1)
        padded[:, side], mask[:, side] = 0, 0
        found = head_scores(model, padded, by, mask=mask)
        assert [s.score for s in found] == pytest.approx([s.score for s in cut], rel=1e-9)
        assert [s.score for s in head_scores(model, padded, by)] != pytest.approx([s.score for s in cut], rel=1e-4)


def test_prune_scores_half_of_the_texts_and_judges_the_other():
    model, given = encoder(), asked("classification")
    made, record = prune(model, by="loss", count=2, tokens=given, dtype="float64")
    first, rest = given.rows(slice(3)), given.rows(slice(3, None))
    assert record.scores == tuple(head_scores(model, first.ids, "loss", mask=first.mask, labels=first.labels))
    assert record.loss_after == pytest.approx(made(rest.ids, attention_mask=rest.mask, labels=rest.labels).loss.item())
    assert record.unit == "nats/sequence" and record.tokens == rest.tokens and "per sequence" in record.lines()[2]
    with pytest.raises(InputError, match="needs what an encoder shall answer"):
        prune(model.float(), by="loss", count=2, tokens=tokens(4))


def test_a_text_is_hidden_in_part_where_a_mask_is_known():
    task = data.load("austen", objective="masked", tokenizer="byte")
    found = sample(task.tokenizer, task.vocab_size, 64, length=40, what="masked", rows=3)
    hidden = found.labels != -100
    assert (hidden.sum(1) == round(CHOSEN * 40)).all() and (found.ids[hidden] == task.mask).all()
    plain = sample(task.tokenizer, task.vocab_size, 64, length=40, rows=3)
    assert torch.equal(torch.where(hidden, found.labels, found.ids), plain.ids) and found.notes == ()
    bare = sample(None, 258, 64, length=40, what="masked")
    assert bare.labels is None and "no tokenizer with a mask token" in bare.notes[0]


def test_a_model_that_is_not_ours_is_told_the_truth():
    bert = BertModel(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    )
    with pytest.raises(InputError, match=r"got BertModel; surgery\.convert makes one of the families") as error:
        grow_heads(bert, {0: 1})
    assert "by surgery.convert first" not in str(error.value)
    with pytest.raises(InputError, match=r"got Linear; surgery\.convert makes one of the families"):
        grow_heads(torch.nn.Linear(2, 2), {0: 1})


def test_the_shell_of_a_classifier_keeps_its_classes():
    names = {0: "bad", 1: "fair", 2: "good"}
    shell = in_shell(encoder(), id2label=names, label2id={n: i for i, n in names.items()}, pad_token_id=3)
    for made in (grow_heads(shell, {0: 2}).model, convert(shell, "mgt", dtype="float64", tokens=tokens()).model):
        assert made.config.id2label == names and made.config.label2id["good"] == 2 and made.config.pad_token_id == 3


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    folder = tmp_path_factory.mktemp("films")
    rows = [f"film {i} is {'a fine' if i % 2 else 'no good'} one\t{i % 2}\n" for i in range(80)]
    (folder / "train.tsv").write_text("sentence\tlabel\n" + "".join(rows[:60]))
    (folder / "dev.tsv").write_text("sentence\tlabel\n" + "".join(rows[60:]))
    return f"sst2:{folder}"


@pytest.fixture(scope="module")
def run(films, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    assert main(["train", "--data", films, *RUN, "-o", str(folder), "--quiet"]) == 0
    return folder


@pytest.fixture(scope="module")
def big(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("big") / "big"
    growth = ["--grow-heads", "1", "--grow-width", "32", "--grow-depth", "1"]
    assert main(["convert", str(run), *growth, "-o", str(folder), "--quiet"]) == 0
    return folder


def call(*line, code=0):
    assert main([str(part) for part in line]) == code


def test_a_run_of_a_classifier_grows_into_a_folder(run, big, capsys):
    proof = json.loads((big / "proof.json").read_text())
    assert proof["claim"] == "equal" and proof["unit"] == "nats/sequence" and proof["text"].endswith("(validation)")
    assert proof["loss_before"] == pytest.approx(proof["loss_after"], abs=1e-6) and (big / "tokenizer.json").exists()
    shell = AutoModelForSequenceClassification.from_pretrained(big)
    assert shell.config.id2label == {0: "negative", 1: "positive"} and shell.config.layer_heads == [3, 3]


def test_a_folder_of_a_classifier_is_pruned_on_data(big, films, tmp_path, capsys):
    call("prune", big, "--by", "loss", "--count", 2, "--data", films, "-o", tmp_path / "small", "--json", "--quiet")
    found = json.loads(capsys.readouterr().out)
    assert found["loss_after"] > 0 and len(found["scores"]) == 6 and found["unit"] == "nats/sequence"
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "small").config.label2id == {
        "negative": 0,
        "positive": 1,
    }
    call("prune", big, "--by", "energy", "--count", 2, "-o", tmp_path / "text", "--length", 16)
    assert "note: the text has no classes" in capsys.readouterr().out


def test_a_run_is_pruned_on_its_own_texts(run, tmp_path, capsys):
    call("prune", run, "--heads", "0:1", "-o", tmp_path / "small")
    said = capsys.readouterr().out
    assert "nats per sequence" in said and "(validation)" in said


def test_masked_tokens_keep_their_mask(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} of a text that says {i * i} things about the number {i}" for i in range(400)))
    call("train", "--data", f"text:{text}", "--objective", "masked", *RUN, "-o", tmp_path / "run", "--quiet")
    call("convert", tmp_path / "run", "--grow-heads", 1, "-o", tmp_path / "big", "--length", 12)
    assert "nats per masked token" in capsys.readouterr().out
    tokenizer = json.loads((tmp_path / "big" / "tokenizer.json").read_text())
    assert tokenizer["added_tokens"][-1]["content"] == "[MASK]"
    line = ["--by", "loss", "--count", "1", "--length", "12", "-o", tmp_path / "small"]
    call("prune", tmp_path / "big", *line)
    assert "nats per masked token" in capsys.readouterr().out
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "small").transformer.config.heads_of(0) == 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--data", "FILMS", "--text", "a.txt"], "give one of them"),
        (["--data", "FILMS", "--length", "3"], "rows must have 4 to"),
        (["--by", "loss", "--count", "1"], "needs what an encoder shall answer"),
    ],
)
def test_what_a_classifier_cannot_be_compared_on_is_one_line(more, words, big, films, tmp_path, capsys):
    heads = [] if "--by" in more else ["--heads", "0:0"]
    call("prune", big, *heads, *[films if part == "FILMS" else part for part in more], "-o", tmp_path / "out", code=2)
    assert words in capsys.readouterr().err.strip().splitlines()[-1] and not (tmp_path / "out").exists()


def test_data_of_other_classes_or_for_a_model_without_is_refused(films):
    task = data.load(films, tokenizer="byte")
    with pytest.raises(InputError, match=r"has 2 classes and 259 tokens, the model 3 and 17"):
        labelled(encoder().config, task, rows=2)
    with pytest.raises(InputError, match="has no classes; give data of a classification"):
        labelled(encoder().config, data.load("copy:vocab=8,half=4"), rows=2)
    with pytest.raises(InputError, match="is for models that classify"):
        labelled(encoder("masked").config, task, rows=2)
