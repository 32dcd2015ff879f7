"""Rows of a dataset, from the hub or from files, as documents: streamed, never whole in memory."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from thalweg.data.text.source import Documents, cap_documents
from thalweg.errors import InputError, MissingExtraError, OfflineError, ThalwegError

VALID_NAMES = ("validation", "valid", "val", "dev")
EVERY = 20  # without a validation split of its own, the first of every 20 documents is held out
TIMEOUT = 10.0  # seconds for the first answer of the hub
_BUILDERS = {".json": "json", ".jsonl": "json", ".txt": "text", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_ARTICLE = re.compile(r" ?= [^=].*[^=] = ?\n?")  # how WikiText marks the title of an article; sections have more signs


@dataclass
class DatasetSource:
    """A dataset of the hub (``where`` is its name) or of local files (a path).

    column: of the text (None: ``text``, or the only column of strings). rows: each a document, or each a line of WikiText, whose titles
    begin documents. instead: what needs no hub, for the error.
    """

    name: str
    where: str | Path
    config: str | None = None
    revision: str | None = None
    column: str | None = None
    rows: Literal["documents", "wikitext"] = "documents"
    max_bytes: int | None = None
    instead: str = "'austen' or text:FILE"
    notes: list[str] = field(default_factory=list)
    known_xz: dict[str, float] | None = None
    split_rule: str = f"the dataset's own validation split, else the first of every {EVERY} documents"

    @property
    def identity(self) -> str:
        """Of files by their content; of a hub dataset by what was asked for, so that tokens made once serve offline too."""
        if isinstance(self.where, Path):
            return f"files {digest_of_files(self.where)} {self.column}"
        return f"hub {self.where} {self.config} {self.revision} {self.column}"

    def documents(self) -> Documents:
        """Raises: OfflineError, MissingExtraError, InputError; each names the dataset."""
        try:
            splits = self._open()
            train = self._choose_train(splits)
            held_out = next((name for name in VALID_NAMES if name in splits and name != train), None)
            if held_out is None:
                count = 0
                for text in cap_documents(self._texts(splits[train]), self.max_bytes):
                    yield "train" if count % EVERY else "valid", text
                    count += 1
                if count < 2:
                    raise InputError(
                        f"{self.name} has no validation split and {count} document{'s' * (count != 1)}, so none can be held out; "
                        "a single text is read by text:FILE"
                    )
            else:
                for split, name in (("valid", held_out), ("train", train)):
                    yield from ((split, text) for text in cap_documents(self._texts(splits[name]), self.max_bytes))
        except (ThalwegError, GeneratorExit):
            raise
        except Exception as error:  # the library and its transports raise many kinds
            raise self._readable(error) from error

    def held_out_rows(self, columns: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """All rows of the train split and of the validation split, ``train`` and ``valid``, with ``columns``.

        Raises: OfflineError, MissingExtraError, InputError; each names the dataset.
        """
        try:
            splits = self._open()
            held_out = next((name for name in VALID_NAMES if name in splits), None)
            if "train" not in splits or held_out is None:
                raise InputError(
                    f"{self.name} needs a train and a validation split, it has {', '.join(splits) or 'none'}"
                )
            found: dict[str, list[dict[str, Any]]] = {}
            for split, name in (("train", "train"), ("valid", held_out)):
                found[split] = list(splits[name])
                for row in found[split][:1]:
                    if missing := [column for column in columns if column not in row]:
                        raise InputError(f"{self.name} has no column {missing[0]!r}; it has {', '.join(row)}")
            return found
        except ThalwegError:
            raise
        except Exception as error:  # the library and its transports raise many kinds
            raise self._readable(error) from error

    def _open(self) -> dict[str, Any]:
        try:
            import datasets
        except ImportError:
            raise MissingExtraError("datasets (for hf: data)", "data") from None
        if isinstance(self.where, Path):
            return _open_files(datasets, self.where)
        if is_offline():  # streams need the hub; what an earlier download left on this machine does not
            from datasets import config as settings

            if not settings.HF_HUB_OFFLINE:  # read when the library was imported; it would now wait for the network
                raise ConnectionError("HF_HUB_OFFLINE was set too late")
            opened = datasets.load_dataset(self.where, self.config, revision=self.revision)
        else:
            commit = self._commit()
            note = f"{self.where} at hub commit {commit}"
            if note not in self.notes:
                self.notes.append(note)
            opened = datasets.load_dataset(self.where, self.config, revision=commit, streaming=True)
        return {str(name): rows for name, rows in opened.items()}

    def _commit(self) -> str:
        """The commit that the revision names now; also the one quick question that shows whether the hub can be reached."""
        from huggingface_hub import HfApi

        commit = HfApi().dataset_info(str(self.where), revision=self.revision, timeout=TIMEOUT).sha
        return commit or self.revision or "main"

    def _choose_train(self, splits: dict[str, Any]) -> str:
        if "train" in splits:
            return "train"
        if len(splits) == 1:
            return next(iter(splits))
        raise InputError(f"{self.name} has no train split, only {', '.join(splits)}")

    def _texts(self, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
        texts = (row for row in map(self._text, rows) if row)
        return _articles(texts) if self.rows == "wikitext" else texts

    def _text(self, row: dict[str, Any]) -> str:
        if self.column is None:
            strings = [name for name, value in row.items() if isinstance(value, str)]
            if "text" not in strings and len(strings) != 1:
                raise InputError(
                    f"{self.name} has the columns {', '.join(row)}, none of them clearly the text; name it: hf:NAME,column=COLUMN"
                )
            self.column = "text" if "text" in strings else strings[0]
        if self.column not in row:
            raise InputError(f"{self.name} has no column {self.column!r}; it has {', '.join(row)}")
        text = row[self.column]
        if text is not None and not isinstance(text, str):
            raise InputError(f"column {self.column!r} of {self.name} holds {type(text).__name__}, not text")
        return text or ""

    def _readable(self, error: Exception) -> ThalwegError:
        kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
        said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if isinstance(self.where, Path):
            return InputError(f"{self.name} cannot be read as a dataset: {said}")
        if kinds & {
            "huggingface_hub.RepositoryNotFoundError",
            "huggingface_hub.GatedRepoError",
            "datasets.DatasetNotFoundError",
        }:
            return InputError(
                f"the hub shows no dataset {self.where!r} at this revision to you: {said}; check the name, or log in"
            )
        if kinds & {"huggingface_hub.RevisionNotFoundError"}:
            return InputError(f"{self.where} has no revision {self.revision!r} on the hub")
        network = {"builtins.OSError", "builtins.TimeoutError", "huggingface_hub.HfHubHTTPError"}
        if kinds & network or any(
            kind.partition(".")[0] in ("httpx", "httpx2", "httpcore", "aiohttp", "requests") for kind in kinds
        ):
            why = "HF_HUB_OFFLINE is set and nothing is cached" if is_offline() else said
            return OfflineError(
                f"{self.name} needs the Hugging Face hub, which cannot be reached ({why}); connect once, or use {self.instead}"
            )
        return InputError(f"{self.name} cannot be read: {said}")


def is_offline() -> bool:
    """Whether the hub libraries were told to stay off the network."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def _open_files(datasets: Any, path: Path) -> dict[str, Any]:
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            saved = datasets.load_from_disk(str(path))
            return dict(saved) if isinstance(saved, dict) else {"train": saved}
        only_text = {file.suffix for file in _files(path)} == {".txt"}
        return dict(
            datasets.load_dataset(str(path), streaming=True, **({"sample_by": "document"} if only_text else {}))
        )
    builder = _BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise InputError(
            f"{path} is no dataset file: allowed are {', '.join(_BUILDERS)}, or a folder of them; for plain text use text:{path}"
        )
    whole = {"sample_by": "document"} if builder == "text" else {}
    return dict(datasets.load_dataset(builder, data_files=str(path), streaming=True, **whole))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))


def digest_of_files(path: Path) -> str:
    """sha256 of the names and contents below ``path``. Raises: InputError where there is no file."""
    files = _files(path) if path.exists() else []
    if not files:
        raise InputError(f"{path} holds no files" if path.exists() else f"no such file or folder: {path}")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _articles(lines: Iterable[str]) -> Iterator[str]:
    """Lines of WikiText joined into articles."""
    article: list[str] = []
    for line in lines:
        if article and _ARTICLE.fullmatch(line):
            yield "".join(article)
            article = []
        article.append(line)
    if article:
        yield "".join(article)
