"""Text as a task: the shipped novels, files, splits without a leak, and nulls that are what they say."""

import gzip
import hashlib
import lzma
import math

import numpy as np
import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from thalweg import data
from thalweg.data.task import next_token_accuracy
from thalweg.data.tasks import austen
from thalweg.data.text import nulls
from thalweg.data.text.source import cap_documents, cap_text, split_block
from thalweg.errors import InputError, UnknownNameError


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def novels(cache_dir):
    return data.load("austen", cache_dir=cache_dir)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


PROSE = "".join(f"Sentence number {i} is here, and no other is like it.\n" for i in range(400))


def test_the_novels_are_whole_and_in_order():
    texts = austen.novels()
    first_words = {
        "Emma": "Emma Woodhouse, handsome, clever, and rich",
        "Mansfield Park": "About thirty years ago Miss Maria Ward",
        "Northanger Abbey": "THIS little work was finished in the year 1803",
        "Persuasion": "Sir Walter Elliot, of Kellynch Hall",
        "Pride and Prejudice": "It is a truth universally acknowledged",
        "Sense and Sensibility": "The family of Dashwood had long been settled",
    }
    last_words = {
        "Emma": "perfect happiness of the union.",
        "Mansfield Park": "Mansfield Park had long been.",
        "Northanger Abbey": "or reward filial disobedience.",
        "Persuasion": "than in its national importance.",
        "Pride and Prejudice": "had been the means of uniting them.",
        "Sense and Sensibility": "producing coolness between their husbands.",
    }
    assert list(texts) == list(first_words)
    for title, text in texts.items():
        assert text.startswith(first_words[title]) and text.endswith(last_words[title])


def test_the_held_out_novel_does_not_leak(novels):
    decoded = {split: novels.tokenizer.decode(novels.cache.tokens[split].tolist()) for split in novels.splits}
    texts = austen.novels()
    assert decoded["valid"] == texts["Persuasion"]
    assert decoded["train"] == "".join(text for title, text in texts.items() if title != "Persuasion")
    paragraphs = {split: {p for p in text.split("\n") if len(p) > 60} for split, text in decoded.items()}
    assert len(paragraphs["valid"]) > 500 and not paragraphs["valid"] & paragraphs["train"]
    assert novels.split_rule == "by novel; validation: Persuasion"


def test_between_two_novels_stands_the_end_of_a_text(novels):
    ends = {split: int((tokens == novels.tokenizer.end_of_text).sum()) for split, tokens in novels.cache.tokens.items()}
    assert ends == {"train": 4, "valid": 0}


def test_the_numbers_of_the_readme(novels, cache_dir):
    by_byte = data.load("austen", tokenizer="byte", cache_dir=cache_dir)
    assert novels.describe()["tokens"] == {"train": 962_099, "valid": 133_144}
    assert by_byte.describe()["tokens"] == {"train": 3_471_156, "valid": 459_061}
    assert novels.bytes_per_token() == pytest.approx(3.448, abs=5e-4) and by_byte.bytes_per_token() == 1
    assert novels.nulls()["unigram_entropy"] == pytest.approx(6.320, abs=5e-4)
    assert by_byte.nulls()["unigram_entropy"] == pytest.approx(3.037, abs=5e-4)
    assert data.bits_per_byte(by_byte.nulls()["unigram_entropy"], 1) == pytest.approx(4.381, abs=5e-4)


def test_the_kept_xz_rate_of_the_held_out_novel():
    found = nulls.xz_rates(b"", austen.novels()[austen.HELD_OUT].encode())
    assert found["xz_bits_per_byte"] == pytest.approx(austen.XZ["xz_bits_per_byte"], rel=1e-3)


@pytest.mark.slow  # packs 7 MB
def test_the_kept_xz_rates_are_right():
    texts = austen.novels()
    train = "".join(text for title, text in texts.items() if title != austen.HELD_OUT).encode()
    found = nulls.xz_rates(train, texts[austen.HELD_OUT].encode())
    assert found == pytest.approx(austen.XZ, rel=1e-3)  # another liblzma may choose a little differently


def test_a_changed_corpus_is_noticed(monkeypatch):
    monkeypatch.setattr(austen, "TEXT_SHA256", "0" * 64)
    with pytest.raises(InputError, match="was changed"):
        austen.novels.__wrapped__()


def test_nulls_of_a_text_by_hand(tmp_path):
    write(tmp_path / "a.txt", "aab" * 20 + "\n" + "abc" * 20)
    task = data.load(f"text:{tmp_path / 'a.txt'},valid=0.5", tokenizer="byte", cache_dir=tmp_path)
    train, valid = (bytes(task.cache.tokens[s].tolist()) for s in task.splits)
    assert (train, valid) == (b"aab" * 20 + b"\n", b"abc" * 20)
    total = len(train) + 257 / 2
    want = -sum(math.log((train.count(byte) + 0.5) / total) for byte in valid) / len(valid)
    found = task.nulls()
    assert found["unigram_entropy"] == pytest.approx(want, rel=1e-12)
    assert found["uniform"] == pytest.approx(math.log(257), rel=1e-12)
    assert found["xz_bits_per_byte"] == 8 * len(lzma.compress(valid, preset=6)) / len(valid)
    extra = len(lzma.compress(train + valid, preset=6)) - len(lzma.compress(train, preset=6))
    assert found["xz_after_train_bits_per_byte"] == 8 * extra / len(valid)
    assert found["xz_nats_per_token"] == pytest.approx(found["xz_bits_per_byte"] * math.log(2), rel=1e-12)


def test_xz_is_given_no_more_than_it_looks_back(monkeypatch):
    monkeypatch.setattr(nulls, "DICTIONARY", 1000)
    rng = np.random.default_rng(0)
    train, valid = rng.bytes(5000), rng.bytes(3000)
    assert nulls.xz_rates(train, valid) == nulls.xz_rates(train[-1000:], valid[:1000])


def test_token_counts_in_blocks():
    tokens = np.random.default_rng(0).integers(0, 50, size=1000).astype(np.uint16)
    assert np.array_equal(nulls.token_counts(tokens, 60, block=7), np.bincount(tokens, minlength=60))


def test_units_invert_each_other():
    assert data.bits_per_byte(math.log(2) * 3, 3.0) == pytest.approx(1.0, rel=1e-15)
    assert data.nats_per_token(data.bits_per_byte(2.7, 3.4), 3.4) == pytest.approx(2.7, rel=1e-15)


@pytest.mark.parametrize("suffix", [".txt", ".xz", ".gz", ".XZ", ""])
def test_files_are_unpacked_by_their_suffix(tmp_path, suffix):
    pack = {".xz": lzma.compress, ".gz": gzip.compress}.get(suffix.lower(), bytes)
    write(tmp_path / f"a{suffix}", pack(PROSE.encode()))
    task = data.load(f"text:{tmp_path / f'a{suffix}'}", tokenizer="byte", cache_dir=tmp_path / "c")
    decoded = [task.tokenizer.decode(task.cache.tokens[split].tolist()) for split in task.splits]
    assert "".join(decoded) == PROSE
    assert decoded[1].startswith("Sentence number 38")  # the last 5 %, from a line on


def test_a_byte_order_mark_is_left_out_and_line_ends_are_kept(tmp_path):
    write(tmp_path / "a.txt", b"\xef\xbb\xbf" + PROSE.replace("\n", "\r\n").encode())
    task = data.load(f"text:{tmp_path / 'a.txt'}", tokenizer="byte", cache_dir=tmp_path)
    assert bytes(task.cache.tokens["train"][:53].tolist()).endswith(b"it.\r\n")
    assert task.cache.tokens["train"][0] == ord("S")


def test_the_same_text_has_the_same_fingerprint_wherever_it_is(tmp_path):
    write(tmp_path / "a.txt", PROSE)
    write(tmp_path / "b,odd:name.txt", PROSE)
    write(tmp_path / "c.txt", PROSE[:-2] + "?\n")

    def load(name, **kwargs):
        return data.load(f"text:{tmp_path / name}", cache_dir=tmp_path / "c", **({"tokenizer": "byte"} | kwargs))

    first = load("a.txt").fingerprint
    assert load("b,odd:name.txt").fingerprint == first
    others = [
        load("c.txt"),
        load("a.txt", max_bytes=9000),
        load("a.txt", max_tokens=50),
        load("a.txt", tokenizer="bpe", vocab_size=300),
    ]
    assert len({first, *(task.fingerprint for task in others)}) == 5


def test_a_bpe_of_ones_own(tmp_path):
    write(tmp_path / "a.txt", PROSE)
    task = data.load(f"text:{tmp_path / 'a.txt'}", vocab_size=280, cache_dir=tmp_path)
    assert task.vocab_size == task.tokenizer.vocab_size == 280 and task.notes == ()
    small = data.load(
        f"text:{tmp_path / 'a.txt'}", cache_dir=tmp_path
    )  # bpe is the default, and 4,096 more than the text has
    assert small.vocab_size < 4096 and "4096 was asked for" in small.notes[0]
    again = data.load(f"text:{tmp_path / 'a.txt'}", cache_dir=tmp_path)
    assert again.notes == small.notes  # the note comes from the cache too
    start = PROSE[: PROSE.index("\n", 500) + 1]
    encoded = small.tokenizer.encode(start)
    assert encoded == small.cache.tokens["train"][: len(encoded)].tolist()


def test_a_bpe_of_ones_own_sees_the_train_split_only(tmp_path):
    write(tmp_path / "a.txt", PROSE + "zyzyzyzyzyzyzyzyzyzyzyzyzyzyzyzyzyzyzyzy " * 30)
    task = data.load(f"text:{tmp_path / 'a.txt'},valid=0.1", vocab_size=300, cache_dir=tmp_path)
    assert len(task.tokenizer.encode("zyzyzyzy")) == 8


def test_a_tokenizer_by_path(tmp_path):
    (tmp_path / "tokenizer.json").write_text(austen.shipped_tokenizer().library_json())
    write(tmp_path / "a.txt", PROSE)
    task = data.load(f"text:{tmp_path / 'a.txt'}", tokenizer=tmp_path / "tokenizer.json", cache_dir=tmp_path / "c")
    assert task.vocab_size == 2048 and task.tokenizer.decode(task.cache.tokens["valid"].tolist()) in PROSE


def test_limits(cache_dir, tmp_path):
    small = data.load("austen", cache_dir=cache_dir, max_bytes=20_001)
    assert small.describe()["bytes"] == {"train": 20_001, "valid": 20_001}
    text = austen.novels()["Emma"]
    assert small.tokenizer.decode(small.cache.tokens["train"].tolist()) == text[: len(cap_text(text, 20_001))]
    few = data.load("austen", cache_dir=cache_dir, max_tokens=500, max_bytes=20_000)
    assert few.describe()["tokens"]["train"] == 500
    assert few.describe()["bytes"]["train"] == len(few.tokenizer.decode(few.cache.tokens["train"].tolist()).encode())
    write(tmp_path / "a.txt", PROSE)
    file = data.load(f"text:{tmp_path / 'a.txt'}", tokenizer="byte", cache_dir=tmp_path, max_bytes=10_000)
    assert sum(file.describe()["bytes"].values()) == 10_000  # the split is made of what is read


def test_capping_keeps_characters_whole():
    assert cap_text("aéz", 2) == "a" and cap_text("aéz", 3) == "aé" and cap_text("aéz", None) == "aéz"
    assert list(cap_documents(["abc", "def", "ghi"], 5)) == ["abc", "de"]
    assert list(cap_documents(["abc", "def"], 3)) == ["abc"]
    assert list(cap_documents(["abc", "def"], None)) == ["abc", "def"]


@pytest.mark.parametrize("text", ["no newline at all but words", "x" * 100, "line\n" * 30, "a" * 50 + "\n" + "b" * 5])
def test_split_block_is_a_partition(text):
    parts = split_block(text, 0.2, "it")
    assert parts["train"][0] + parts["valid"][0] == text
    assert all(parts[s][0] for s in ("train", "valid"))


def test_split_begins_at_a_line_then_at_a_word():
    assert split_block("one\ntwo\nthree\nfour\n", 0.4, "it")["valid"] == ["four\n"]
    assert split_block("one two three four", 0.4, "it")["valid"] == ["four"]


def test_wide_vocabularies_take_four_bytes(tmp_path):
    from thalweg.data.text.encoding import encode_source
    from thalweg.data.text.source import TextSource
    from thalweg.data.text.tokenizer import ByteTokenizer

    class Wide(ByteTokenizer):
        vocab_size = 2**16 + 1

        def encode_pieces(self, pieces):
            return [ids.astype(np.uint32) + 2**16 - 255 for ids in super().encode_pieces(pieces)]

    source = TextSource("x", "x", "x", {"train": ["abc\xff"], "valid": ["abc"]})
    meta = encode_source(source, Wide(), tmp_path)
    stored = np.fromfile(tmp_path / "train.bin", meta["dtype"])
    assert meta["dtype"] == "uint32" and stored.tolist() == [b + 2**16 - 255 for b in "abc\xff".encode()]


def test_shapes_are_checked_where_annotations_are():
    checked = jaxtyped(typechecker=beartype)(next_token_accuracy)
    labels = torch.tensor([[5, 1, 2]])
    assert checked(torch.zeros(1, 3, 6), labels)["token_accuracy"] == 0
    for wrong in (torch.zeros(1, 2, 6), torch.zeros(3, 6), torch.zeros(1, 3, 6, dtype=torch.int64)):
        with pytest.raises(TypeCheckError):
            checked(wrong, labels)


def test_metrics_shift_labels():
    labels = torch.tensor([[5, 1, 2, 3], [5, -100, 2, 3], [-100, -100, -100, -100]])
    logits = torch.full((3, 4, 6), -1.0)
    for row, place, token in ((0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 1, 2), (1, 2, 4)):
        logits[row, place, token] = 1.0
    task = data.load("copy")
    assert task.metrics(logits, labels) == {"token_accuracy": pytest.approx(4 / 5), "exact_match": 0.5}
    with pytest.raises(InputError, match="score no token"):
        task.metrics(logits, torch.full_like(labels, -100))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no text"),
        (b" \n \n", "holds no text"),
        (b"a", "too short to be split"),
        (b"ab", "too short|at least 2 are needed"),
        (b"good\nline\xff\n", r"not UTF-8 text \(byte 9, line 2"),
        ("text".encode("utf-16"), "not UTF-8"),
    ],
)
def test_texts_that_cannot_be_used(tmp_path, content, words):
    path = write(tmp_path / "a.txt", content)
    with pytest.raises(InputError, match=words) as caught:
        data.load(f"text:{path}", tokenizer="byte", cache_dir=tmp_path / "c")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "c").rglob("*.bin"))


def test_one_token_per_split_is_not_enough(tmp_path):
    path = write(tmp_path / "a.txt", "a\nb")
    with pytest.raises(InputError, match="valid split holds 1 token, at least 2"):
        data.load(f"text:{path},valid=0.5", tokenizer="byte", cache_dir=tmp_path / "c")


@pytest.mark.parametrize("suffix", [".xz", ".gz"])
@pytest.mark.parametrize("damage", ["foreign", "cut"])
def test_damaged_archives(tmp_path, suffix, damage):
    packed = {".xz": lzma.compress, ".gz": gzip.compress}[suffix](PROSE.encode())
    path = write(tmp_path / f"a{suffix}", b"plain text" if damage == "foreign" else packed[:-20])
    with pytest.raises(InputError, match=f"no whole {suffix} file"):
        data.load(f"text:{path}", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("spec", "kwargs", "words"),
    [
        ("text:", {}, "needs a file"),
        ("text:{tmp}/none.txt", {}, "no such file"),
        ("text:{tmp}", {}, "is a folder"),
        ("text:{tmp}/a.txt,valid=x", {}, "valid must be a number"),
        ("text:{tmp}/a.txt,valid=0", {}, "valid must be above 0"),
        ("text:{tmp}/a.txt,valid=0.9", {}, "valid must be above 0 and at most 0.5"),
        ("text:{tmp}/a.txt", {"vocab_size": 100}, "at least 257"),
        ("text:{tmp}/a.txt", {"vocab_size": 0}, "vocab_size must be a whole number"),
        ("text:{tmp}/a.txt", {"vocab_size": "300"}, "vocab_size must be a whole number"),
        ("text:{tmp}/a.txt", {"tokenizer": "byte", "vocab_size": 300}, "leave vocab_size out"),
        ("text:{tmp}/a.txt", {"tokenizer": "wordpiece"}, "no tokenizer at wordpiece"),
        ("text:{tmp}/a.txt", {"tokenizer": 3}, "tokenizer must be a string"),
        ("text:{tmp}/a.txt", {"max_bytes": 0}, "max_bytes must be a whole number"),
        ("text:{tmp}/a.txt", {"cache_dir": 3}, "cache_dir must be a string"),
        ("austen:x=1", {}, "takes no parameters"),
        ("copy", {"tokenizer": "byte"}, "takes no tokenizer"),
        ("copy", {"vocab_size": 300, "max_bytes": 5}, "takes no vocab_size or max_bytes"),
        (3, {}, "named by a string"),
    ],
)
def test_wrong_requests_are_one_clear_line(tmp_path, spec, kwargs, words):
    write(tmp_path / "a.txt", PROSE)
    spec = spec.format(tmp=tmp_path) if isinstance(spec, str) else spec
    with pytest.raises(InputError, match=words) as caught:
        data.load(spec, **({"cache_dir": tmp_path / "c"} | kwargs))
    assert "\n" not in str(caught.value)


def test_unknown_names_suggest_the_nearest(tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'austen'"):
        data.load("austin")
    path = write(tmp_path / "a.txt", PROSE)
    with pytest.raises(UnknownNameError, match=f"write text:{path}"):
        data.load(str(path))


def test_every_kind_of_data_is_listed():
    wanted = {
        "austen",
        "text",
        "hf",
        "wikitext-2",
        "wikitext-103",
        "openwebtext",
        "fineweb-edu",
        "copy",
        "overwrite",
        "forget",
        "sentiment",
        "sst2",
    }
    assert set(data.names()) == wanted
    assert all(entry.summary and entry.source for entry in data.entries())


def test_the_readme_names_the_hash_of_its_files():
    raw = "\n\n".join(austen.novels().values()).encode()
    assert hashlib.sha256(raw).hexdigest() == austen.TEXT_SHA256 and len(raw) == 3_930_223
