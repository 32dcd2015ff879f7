"""Windows against a loop that knows nothing of them; documents by their rules."""

import gzip
import json
import re

import pytest

from thalweg.errors import InputError
from thalweg.evaluation.documents import PIECE, Document, as_documents, documents_of, pieces
from thalweg.evaluation.perplexity import words
from thalweg.evaluation.windows import Windows


def contexts_by_loop(ids, length, stride, prefix):
    """For every token that is scored: the tokens that may be seen before it, found token by token.

    A window scores places done+1 .. done+move of the text and reads ``length`` tokens up to the last but one of them.
    """
    every = ([prefix] if prefix is not None else []) + ids
    move, seen = stride or length, []
    for place in range(1, len(every)):
        if place <= length:
            start = 0
        else:
            window = (place - length - 1) // move  # number of the later window, from 0
            last = min(length + (window + 1) * move, len(every) - 1)  # place of the last token that it scores
            start = last - length
        seen.append((every[place], every[start:place]))
    return seen


@pytest.mark.parametrize("prefix", [None, 99])
@pytest.mark.parametrize("stride", [None, 1, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 6, 11, 23])
def test_every_token_is_scored_once_with_the_context_of_its_rule(count, stride, prefix):
    ids, length = list(range(count)), 5
    found = []
    for window in Windows(length, stride, prefix).cut(ids):
        assert len(window.inputs) <= length
        first = len(window.inputs) - len(window.targets)
        found += [(target, window.inputs[: first + i + 1]) for i, target in enumerate(window.targets)]
    assert [target for target, _ in found] == (ids if prefix is not None else ids[1:])
    assert found == contexts_by_loop(ids, length, stride, prefix)


def test_every_later_window_is_full():
    for stride in (3, None):
        for window in list(Windows(8, stride, 7).cut(list(range(42))))[1:]:
            assert len(window.inputs) == 8
            assert len(window.targets) <= (stride or 8)


@pytest.mark.parametrize(("length", "stride"), [(1, None), (0, None), (5, 0), (5, 6)])
def test_windows_refuse(length, stride):
    with pytest.raises(InputError):
        Windows(length, stride)


@pytest.mark.parametrize("text", ["a b", " a  b\n", "a", " a", "a\n", "\n"])
def test_words_are_those_of_lm_eval(text):
    assert words(text) == len(re.split(r"\s+", text))


# documents


def test_pieces_hold_the_whole_text_at_its_paragraphs():
    text = "\n\n".join(f"paragraph {i} " + "x" * (i * 7 % 90) for i in range(60))
    found = pieces(text, 300)
    assert "\n\n".join(found) == text
    assert all(len(piece) >= 300 for piece in found[:-1])
    assert len(found[-1]) >= 150
    assert pieces("short", 300) == ["short"]


def test_a_file_shorter_than_a_piece_is_the_whole_file(tmp_path):
    (tmp_path / "short.txt").write_text("One.\n\nTwo.")
    (tmp_path / "long.txt").write_text("\n\n".join(["x" * 99] * 300))
    short, long = (documents_of(tmp_path / f"{name}.txt") for name in ("short", "long"))
    assert short.rule == "the whole file" and not short.cut
    assert "at least 12,000 characters" in long.rule and long.cut and long.first(2).cut


def test_the_shipped_documents():
    found = documents_of()
    assert len(found) > 30
    assert all(len(document.text) >= PIECE / 2 for document in found)
    assert found.first(2).items == found.items[:2]
    assert "the first 2 of" in found.first(2).rule
    assert found.first(2).sha256 != found.sha256


def test_files_are_cut_by_their_rules(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one\u2028line"}\n\n{"text": "two"}\n')
    (tmp_path / "b.txt").write_text("one\ftwo\f \f")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo"))
    assert [d.text for d in documents_of(tmp_path / "a.jsonl")] == ["one\u2028line", "two"]
    assert [d.text for d in documents_of(tmp_path / "b.txt")] == ["one", "two"]
    assert [d.text for d in documents_of(tmp_path / "c.txt.gz")] == ["one\n\ntwo"]
    assert documents_of(tmp_path / "b.txt").rule == "cut at form feeds"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": 3}', ":1 has no field"),
        ("b.jsonl", b"text", ":1 is not JSON"),
        ("c.txt", b" \n\n ", "holds no text"),
        ("d.txt", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_broken_files_are_one_line(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=says) as error:
        documents_of(tmp_path / name)
    assert "\n" not in str(error.value)


def test_documents_of_a_caller():
    assert as_documents(["a", Document("x", "b")])[1].name == "x"
    for wrong in ("a text", [], [3]):
        with pytest.raises(InputError):
            as_documents(wrong)
    with pytest.raises(InputError):
        documents_of().first(0)


def test_json_is_what_it_says(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x", "other": 1}))
    assert len(documents_of(tmp_path / "a.jsonl")) == 1
