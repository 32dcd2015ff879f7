"""Datasets of the hub and of files: loaded in earnest from local files, and one quick clear line where the hub is out of reach."""

import builtins
import json
import time

import datasets
import pytest

from thalweg import data
from thalweg.data.tasks import hugging_face
from thalweg.data.text import hub
from thalweg.errors import InputError, MissingExtraError, OfflineError, UnknownNameError

DOCS = [f"Document {i} tells of the number {i * i}.\nIt has two lines." for i in range(50)]


@pytest.fixture
def load(tmp_path):
    return lambda spec, **kwargs: data.load(spec, **({"tokenizer": "byte", "cache_dir": tmp_path / "cache"} | kwargs))


@pytest.fixture
def online(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake_hub(monkeypatch, online):
    """A hub that answers with ``opened[(name, config)]``; records what it was asked."""
    asked, opened = [], {}

    class Info:
        sha = "c0ffee"

    def dataset_info(self, name, revision=None, timeout=None):
        asked.append(("info", name, revision, timeout))
        return Info

    def load_dataset(name, config=None, *, revision=None, streaming=False):
        asked.append(("load", name, config, revision, streaming))
        return opened[name, config]

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked, opened


def documents(task, split):
    text = task.tokenizer.decode
    ids, out = task.cache.tokens[split].tolist(), [[]]
    for i in ids:
        out.append([]) if i == task.tokenizer.end_of_text else out[-1].append(i)
    return [text(one) for one in out]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "arrow", "folder", "saved", "saved_dict"])
def test_local_files_of_every_kind(load, tmp_path, kind):
    rows = datasets.Dataset.from_list([{"id": i, "text": text} for i, text in enumerate(DOCS)])
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_lines(path, rows)
    elif kind in ("parquet", "csv"):
        getattr(rows, f"to_{kind}")(str(path))
    elif kind == "arrow":
        with datasets.arrow_writer.ArrowWriter(path=str(path), schema=rows.data.schema) as writer:
            writer.write_table(rows.data.table)
    elif kind == "folder":
        path.mkdir()
        write_lines(path / "train.jsonl", rows)
    else:
        saved = rows if kind == "saved" else datasets.DatasetDict(train=rows)
        saved.save_to_disk(str(path))
    task = load(f"hf:{path}")
    held_out = [text for i, text in enumerate(DOCS) if i % 20 == 0]
    assert documents(task, "valid") == held_out
    assert documents(task, "train") == [text for text in DOCS if text not in held_out]
    assert task.describe()["documents"] == {"train": 47, "valid": 3}
    assert "first of every 20 documents" in task.split_rule


def test_an_own_validation_split_is_used(load, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for split, rows in (("train", DOCS[:30]), ("validation", DOCS[30:40]), ("test", DOCS[40:])):
        write_lines(folder / f"{split}.jsonl", [{"text": text} for text in rows])
    task = load(f"hf:{folder}")
    assert documents(task, "train") == DOCS[:30] and documents(task, "valid") == DOCS[30:40]  # and test is not touched


def test_text_files_are_documents(load, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(DOCS[:5]):
        (folder / f"{i}.txt").write_text(text)
    task = load(f"hf:{folder}")
    assert documents(task, "valid") == DOCS[:1] and sorted(documents(task, "train")) == DOCS[1:5]
    with pytest.raises(InputError, match="1 document, so none can be held out; a single text is read by text:FILE"):
        load(f"hf:{folder / '1.txt'}")


def test_the_cache_follows_the_content_of_the_files(load, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in DOCS])
    first = load(f"hf:{path}")
    moved = write_lines(tmp_path / "b.jsonl", [{"text": text} for text in DOCS])
    assert load(f"hf:{moved}").fingerprint == first.fingerprint
    write_lines(path, [{"text": text + "!"} for text in DOCS])
    assert load(f"hf:{path}").fingerprint != first.fingerprint


def test_columns(load, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"n": i, "body": text, "title": "t"} for i, text in enumerate(DOCS)])
    assert documents(load(f"hf:{path},column=body"), "valid")[0] == DOCS[0]
    with pytest.raises(InputError, match="columns n, body, title, none of them clearly the text; name it"):
        load(f"hf:{path}")
    with pytest.raises(InputError, match="no column 'boddy'; it has n, body, title"):
        load(f"hf:{path},column=boddy")
    with pytest.raises(InputError, match="holds int, not text"):
        load(f"hf:{path},column=n")
    single = write_lines(tmp_path / "b.jsonl", [{"n": i, "body": text if i else None} for i, text in enumerate(DOCS)])
    with pytest.raises(InputError, match="none of them clearly"):
        load(f"hf:{single}")  # the first row is empty
    only = write_lines(
        tmp_path / "c.jsonl", [{"n": i, "body": text if i != 1 else None} for i, text in enumerate(DOCS)]
    )
    assert documents(load(f"hf:{only}"), "train")[0] == DOCS[2]  # empty rows are no documents


def test_limits_in_the_spec_and_in_the_call(load, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in DOCS])
    few = load(f"hf:{path},max_tokens=200")
    assert few.describe()["tokens"]["train"] == 200 and few.describe()["documents"]["valid"] == 1
    assert load(f"hf:{path}", max_tokens=200).fingerprint == few.fingerprint
    assert sum(load(f"hf:{path},max_bytes=1_000").describe()["bytes"].values()) == 1000
    with pytest.raises(InputError, match="max_tokens is given twice"):
        load(f"hf:{path},max_tokens=200", max_tokens=300)
    with pytest.raises(UnknownNameError, match=r"Did you mean 'hf\.column'"):
        load(f"hf:{path},colum=x")


def test_a_bpe_is_trained_on_the_train_documents(load, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in DOCS])
    task = load(f"hf:{path}", tokenizer="bpe", vocab_size=300)
    assert task.vocab_size == 300 and documents(task, "valid")[1] == DOCS[20]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, "no such file or folder"),
        ("a.doc", b"x", "no dataset file: allowed are .json"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "cannot be read as a dataset"),
        ("broken.parquet", b"no parquet", "cannot be read as a dataset"),
    ],
)
def test_files_that_cannot_be_read(load, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        load(f"hf:{tmp_path / name}")
    assert "\n" not in str(caught.value)


def test_an_empty_folder(load, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no files"):
        load(f"hf:{tmp_path / 'empty'}")


def test_wikitext_lines_become_articles(load, fake_hub):
    asked, opened = fake_hub
    lines = [
        "",
        " = First = \n",
        " Text of the first . \n",
        " = = Section = = \n",
        " More . \n",
        " = Second = \n",
        " Other = text . \n",
    ]
    rows = datasets.Dataset.from_list([{"text": line} for line in lines])
    opened["Salesforce/wikitext", "wikitext-2-raw-v1"] = {"train": rows, "validation": rows, "test": rows}
    task = load("wikitext-2")
    assert documents(task, "train") == documents(task, "valid") == ["".join(lines[1:5]), "".join(lines[5:])]
    assert task.notes == ("Salesforce/wikitext at hub commit c0ffee",)
    assert asked == [
        ("info", "Salesforce/wikitext", None, hub.TIMEOUT),
        ("load", "Salesforce/wikitext", "wikitext-2-raw-v1", "c0ffee", True),
    ]
    assert (
        load("hf:wikitext-2").fingerprint == task.fingerprint and len(asked) == 2
    )  # once made, the hub is not asked again


def test_a_hub_dataset_with_config_and_revision(load, fake_hub):
    asked, opened = fake_hub
    opened["owner/name", "en"] = {"train": datasets.Dataset.from_list([{"text": text} for text in DOCS])}
    task = load("hf:owner/name:en,revision=v2")
    assert documents(task, "valid")[0] == DOCS[0] and asked[0] == ("info", "owner/name", "v2", hub.TIMEOUT)
    opened["owner/name", None] = {"fit": [], "check": []}
    with pytest.raises(InputError, match="no train split, only fit, check"):
        load("hf:owner/name")


def test_a_hub_stream_that_breaks_is_an_offline_error(load, fake_hub, tmp_path):
    def rows():
        yield {"text": DOCS[0]}
        raise ConnectionError("connection reset")

    fake_hub[1]["owner/name", None] = {"train": rows()}
    with pytest.raises(OfflineError, match="connection reset"):
        load("hf:owner/name")
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_large_presets_must_be_asked_for_in_part(load):
    for spec, example in (("openwebtext", "openwebtext:max_tokens"), ("hf:fineweb-edu", "hf:fineweb-edu,max_tokens")):
        with pytest.raises(InputError, match=f"GB of text; say how much.*{example}="):
            load(spec)


@pytest.mark.parametrize(
    "spec",
    ["wikitext-2", "wikitext-103", "openwebtext:max_tokens=1000", "fineweb-edu:max_tokens=1000", "hf:owner/name"],
)
@pytest.mark.parametrize("known_to_library", [True, False])
def test_offline_is_one_quick_line(load, monkeypatch, spec, known_to_library):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", known_to_library)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", known_to_library)
    started = time.monotonic()
    with pytest.raises(OfflineError, match="HF_HUB_OFFLINE is set and nothing is cached") as caught:
        load(spec)
    assert time.monotonic() - started < 5 and "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_a_hub_out_of_reach_is_one_quick_line(load, monkeypatch, online):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def nowhere(self):
        from huggingface_hub import HfApi

        return HfApi(endpoint="http://127.0.0.1:9").dataset_info(self.where, timeout=hub.TIMEOUT).sha

    monkeypatch.setattr(hub.DatasetSource, "_commit", nowhere)
    started = time.monotonic()
    with pytest.raises(OfflineError, match="hub, which cannot be reached"):
        load("wikitext-2")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("RepositoryNotFoundError", "shows no dataset 'owner/name'"),
        ("GatedRepoError", "log in"),
        ("RevisionNotFoundError", "no revision 'v9'"),
    ],
)
def test_what_the_hub_does_not_have(load, monkeypatch, online, kind, words):
    error = type(kind, (Exception,), {"__module__": "huggingface_hub.errors"})

    def dataset_info(self, name, revision=None, timeout=None):
        raise error("404 Client Error.\nmore lines")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    with pytest.raises(InputError, match=words) as caught:
        load("hf:owner/name,revision=v9")
    assert "\n" not in str(caught.value)
    from huggingface_hub import errors

    assert hasattr(errors, kind)  # the library still has it by this name


def test_a_config_that_does_not_exist(load, fake_hub, monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ValueError("BuilderConfig 'x' not found. Available: ['a', 'b']")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        InputError, match=r"hf:owner/name:x cannot be read: BuilderConfig 'x' not found\. Available: \['a', 'b'\]"
    ):
        load("hf:owner/name:x")


def test_without_the_library(load, monkeypatch, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in DOCS])
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r"pip install 'thalweg\[data\]'"):
        load(f"hf:{path}")


def test_unknown_presets_suggest_the_nearest(load):
    for spec in ("hf:wikitext2", "hf:open-web-text"):
        with pytest.raises(UnknownNameError, match=r"Did you mean '(wikitext-2|openwebtext)'"):
            load(spec)
    with pytest.raises(InputError, match="needs a dataset"):
        load("hf:")


def test_presets_name_their_source():
    assert all("/" in preset.path and preset.source for preset in hugging_face.PRESETS.values())
