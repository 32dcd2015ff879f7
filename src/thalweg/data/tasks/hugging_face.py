"""Datasets of the Hugging Face hub, or files that the datasets library reads; some by short names."""

from dataclasses import dataclass, replace
from typing import Literal

from thalweg import config
from thalweg.data.tasks import Request, register
from thalweg.data.text.hub import DatasetSource
from thalweg.data.text.task import TextTask, text_task
from thalweg.errors import InputError, UnknownNameError


@dataclass(frozen=True)
class Preset:
    """A dataset whose layout is known; ``gigabytes`` is the size of one that must be asked for in part."""

    path: str
    config: str | None
    summary: str
    source: str
    rows: Literal["documents", "wikitext"] = "documents"
    revision: str | None = None
    gigabytes: int | None = None


PRESETS = {
    "wikitext-2": Preset(
        "Salesforce/wikitext",
        "wikitext-2-raw-v1",
        "2 M words of Wikipedia articles, from the hub",
        "Merity et al. 2016 (arXiv 1609.07843)",
        rows="wikitext",
    ),
    "wikitext-103": Preset(
        "Salesforce/wikitext",
        "wikitext-103-raw-v1",
        "103 M words of Wikipedia articles, from the hub",
        "Merity et al. 2016 (arXiv 1609.07843)",
        rows="wikitext",
    ),
    "openwebtext": Preset(
        "Skylion007/openwebtext",
        None,
        "8 M web pages in the manner of WebText, from the hub; say how much",
        "Gokaslan and Cohen 2019",
        revision="refs/convert/parquet",  # the hub's own conversion: the original needs a loading script, which datasets no longer runs
        gigabytes=40,
    ),
    "fineweb-edu": Preset(
        "HuggingFaceFW/fineweb-edu",
        "sample-10BT",
        "educational web pages, sample of 10 G tokens, from the hub; say how much",
        "Penedo et al. 2024 (arXiv 2406.17557)",
        gigabytes=45,
    ),
}


@dataclass(frozen=True)
class DatasetOptions:
    """column: of the text; revision: branch, tag or commit; max_bytes, max_tokens: as in :func:`thalweg.data.load`."""

    column: str | None = None
    revision: str | None = None
    max_bytes: int | None = None
    max_tokens: int | None = None


def open_dataset(path: str, name: str | None, options: str, request: Request, preset: Preset | None = None) -> TextTask:
    """The task of a dataset of the hub or of files, with ``column=...,max_tokens=...`` as options. Raises: InputError, OfflineError."""
    values = config.parse_assignments(
        [part for part in options.split(",") if part.strip()], where=f"an option of {request.spec}"
    )
    chosen = config.build(DatasetOptions, values, where="hf")
    for limit in ("max_bytes", "max_tokens"):
        if getattr(chosen, limit) is not None:
            if getattr(request, limit) not in (None, getattr(chosen, limit)):
                raise InputError(
                    f"{limit} is given twice, as {getattr(chosen, limit)} in {request.spec} and as {getattr(request, limit)}"
                )
            request = replace(request, **{limit: getattr(chosen, limit)})
    if preset is not None and preset.gigabytes and request.max_bytes is None and request.max_tokens is None:
        example = f"{request.spec}{',' if ':' in request.spec else ':'}max_tokens=100_000_000"
        raise InputError(
            f"{request.spec} is about {preset.gigabytes} GB of text; say how much of it to use, for example {example}"
        )
    local = config.checked_path(path, expand=True)
    is_local = preset is None and (path.startswith(("/", "./", "../", "~")) or local.exists())
    source = DatasetSource(
        name=request.spec,
        where=local if is_local else path,
        config=None if is_local else name,
        revision=chosen.revision or (preset.revision if preset else None),
        column=chosen.column,
        rows=preset.rows if preset else "documents",
        max_bytes=request.max_bytes,
    )
    return text_task(source, request, "hf")


@register(
    "hf",
    summary="a dataset of the hub, or a folder, .jsonl, .parquet, .csv, .arrow or .txt file",
    source="hf:NAME[:CONFIG][,column=...][,revision=...][,max_tokens=...] or hf:PATH",
)
def hugging_face(rest: str, request: Request) -> TextTask:
    """Next-token prediction on a column of text; an own validation split is used where there is one."""
    named, _, options = rest.partition(",")
    path, _, name = named.partition(":")
    path = path.strip()
    if path in PRESETS and not name:
        preset = PRESETS[path]
        return open_dataset(preset.path, preset.config, options, request, preset)
    if not path:
        raise InputError("hf: needs a dataset; write hf:NAME, hf:NAME:CONFIG or hf:PATH")
    if "/" not in path and not config.checked_path(path).exists():
        raise UnknownNameError(
            "preset", path, PRESETS, more="Datasets of the hub are named OWNER/NAME; files by a path."
        )
    return open_dataset(path, name or None, options, request)


def _register_preset(short: str, preset: Preset) -> None:
    @register(short, summary=preset.summary, source=preset.source)
    def opener(rest: str, request: Request) -> TextTask:
        return open_dataset(preset.path, preset.config, rest, request, preset)


for _short, _preset in PRESETS.items():
    _register_preset(_short, _preset)
