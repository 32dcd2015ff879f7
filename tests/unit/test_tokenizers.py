"""Tokenizers: exact round trips, special tokens read as text, training that repeats to the byte."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.data.tasks import austen
from thalweg.data.text import tokenizer as tk
from thalweg.data.text.bpe import train_bpe
from thalweg.data.text.source import lines
from thalweg.errors import InputError

SAMPLES = ["", "a", "Two\n\nparagraphs, \t tabs  and é, 漢字, 🙂.\r\nEnd\n", "x <|endoftext|> y", "\n\n\n", "\x00\x7f"]
any_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=80)


@pytest.fixture(scope="module")
def bpe():
    return austen.shipped_tokenizer()


@pytest.mark.parametrize("text", SAMPLES)
def test_round_trip(bpe, text):
    for tokenizer in (tk.ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.end_of_text not in ids  # also where the text spells it


@settings(max_examples=60, deadline=None)
@given(any_text)
def test_round_trip_of_any_text(text):
    for tokenizer in (tk.ByteTokenizer(), austen.shipped_tokenizer()):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(any_text)
def test_lines_lose_nothing_and_end_at_newlines(text):
    cut = lines(text)
    assert "".join(cut) == text
    assert all(piece.endswith("\n") for piece in cut[:-1]) and all(not piece.startswith("\n") for piece in cut[1:])


def test_bytes_are_the_utf8_bytes():
    tokenizer = tk.ByteTokenizer()
    assert tokenizer.encode("é\n") == [0xC3, 0xA9, 10]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.decode([72, 256, 0xC3]) == "H\ufffd"


def test_tokens_do_not_depend_on_blocks(bpe):
    text = austen.novels()["Persuasion"][:20_000]
    whole = bpe.encode(text)
    pieces = bpe.pieces(text)
    joined = [int(i) for piece in pieces for ids in bpe.encode_pieces([piece]) for i in ids]
    assert joined == whole
    assert bpe.encode("".join(pieces[:7])) + bpe.encode("".join(pieces[7:])) == whole


def test_training_repeats_to_the_byte_and_fills_the_vocabulary():
    texts = [austen.novels()["Emma"][:60_000], austen.novels()["Mansfield Park"][:60_000]]
    made = train_bpe(texts, 600)
    assert made.library_json() == train_bpe(texts, 600).library_json()
    assert made.vocab_size == 600
    other = train_bpe(texts[:1], 600)
    assert other.digest != made.digest
    assert len(made.encode(texts[0])) < len(tk.ByteTokenizer().encode(texts[0])) / 2


def test_the_shipped_tokenizer_is_what_its_function_makes(bpe):
    assert austen.train_shipped_tokenizer() == bpe.library_json()
    assert (bpe.vocab_size, bpe.end_of_text) == (austen.VOCAB_SIZE, 0)


def test_the_shipped_tokenizer_has_not_seen_the_held_out_novel(monkeypatch):
    novels = dict(austen.novels())
    made = train_bpe(
        (t[:30_000] for t in novels.values()), 400
    ).library_json()  # a training that sees it is another one
    unseen = train_bpe((t[:30_000] for n, t in novels.items() if n != austen.HELD_OUT), 400).library_json()
    assert made != unseen
    monkeypatch.setattr(austen, "novels", lambda: {n: t[:30_000] for n, t in novels.items()})
    monkeypatch.setattr(austen, "VOCAB_SIZE", 400)
    assert austen.train_shipped_tokenizer() == unseen


@pytest.mark.parametrize("size", [1, 256])
def test_a_vocabulary_without_room_for_the_bytes_is_refused(size):
    with pytest.raises(InputError, match=f"at least 257 .*got {size}"):
        train_bpe(["text"], size)


def test_a_vocabulary_of_bytes_only():
    made = train_bpe(["some text"], 257)
    assert made.vocab_size == 257 and made.decode(made.encode("é x")) == "é x"


def test_saved_tokenizers_are_read_back_equal(bpe, tmp_path):
    for tokenizer in (tk.ByteTokenizer(), bpe):
        again = tk.from_json(tokenizer.to_json())
        assert (again.digest, again.name, again.vocab_size) == (tokenizer.digest, tokenizer.name, tokenizer.vocab_size)
        assert again.encode(SAMPLES[2]) == tokenizer.encode(SAMPLES[2])
        (tmp_path / "ours.json").write_text(tokenizer.to_json())
        assert tk.read_tokenizer(tmp_path / "ours.json").digest == tokenizer.digest
    with pytest.raises(InputError):
        tk.from_json("{}")


def test_a_library_file_or_its_folder_is_read(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_text(bpe.library_json())
    from_file, from_folder = tk.read_tokenizer(tmp_path / "tokenizer.json"), tk.read_tokenizer(str(tmp_path))
    assert from_file.encode("One line.") == from_folder.encode("One line.") == bpe.encode("One line.")
    assert from_file.pieces("a\nb") == ["a\nb"]  # a foreign tokenizer gets texts whole
    assert from_file.digest != bpe.digest  # which is another encoding


def test_padding_and_truncation_of_a_foreign_file_are_switched_off(bpe, tmp_path):
    saved = json.loads(bpe.library_json())
    saved["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    saved["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = tk.read_tokenizer(tmp_path)
    assert [len(ids) for ids in tokenizer.encode_pieces(["a", "Emma Woodhouse, handsome, clever"])] == [
        len(bpe.encode("a")), len(bpe.encode("Emma Woodhouse, handsome, clever"))
    ]  # fmt: skip
    assert np.asarray(tokenizer.encode("a")).dtype == np.int64


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no tokenizer at"),
        (b"\xff\xfe", "cannot be read"),
        (b"{not json", "is not JSON"),
        (b"3", "is not JSON"),
        (b"{}", "no.*tokenizer"),
        (b"[" * 100_000, "is not JSON"),
        (b'["thalweg"]', "is not JSON of a table"),
        (b'{"thalweg": "other"}', "no tokenizer of ours"),
        (b'{"thalweg": "json"}', "no valid 'tokenizer'"),
        (b'{"thalweg": "json", "tokenizer": {}, "name": 3, "by_lines": true}', "no valid 'name'"),
        (b'{"thalweg": "json", "tokenizer": {}, "name": "a", "by_lines": 1}', "no valid 'by_lines'"),
        (b'{"thalweg": "json", "tokenizer": {}, "name": "a", "by_lines": true}', "not a tokenizer.json"),
        (b'{"model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}', "empty vocabulary"),
    ],
)
def test_files_that_hold_no_tokenizer(tmp_path, content, words):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        tk.read_tokenizer(path)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_without_the_unknown_word_is_told(tmp_path):
    saved = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "x"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(InputError, match="cannot encode this text"):
        tk.read_tokenizer(tmp_path).encode("b")
