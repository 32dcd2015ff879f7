"""``thalweg.compression.compare``: what compression did to the updates of a model, layer by layer, in bounded memory."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from thalweg.compression.compare_plan import DEFAULT_MODES, MODES, CompareOptions, ComparePlan, Diagnosis, Progress
from thalweg.compression.comparison import Comparison
from thalweg.compression.pairing import Side, side_of, twin_of
from thalweg.errors import InputError, UnknownNameError
from thalweg.records import Measurements

PRESETS = ("paper",)


def compare(base: Any, compressed: Any, texts: Iterable[Any], **options: Any) -> Measurements:
    """How far, and in which direction, compression moved the updates of a model: the rows of :func:`diagnose`, which says all."""
    return diagnose(base, compressed, texts, **options).rows


def diagnose(
    base: nn.Module | str | Path | Side,
    compressed: Any,
    texts: Iterable[Any],
    *,
    tokenizer: Any = None,
    mode: str | Sequence[str] | None = None,
    preset: str | None = None,
    length: int | None = None,
    batch_size: int | None = None,
    tokens: int | None = None,
    values: bool = True,
    layer_kl: bool = False,
    low_memory: bool = False,
    map: Any = None,
    allow_unverified: bool = False,
    progress: Progress | None = None,
    names: tuple[str, str] = ("", ""),
    opening: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Pair two models of the same blocks and split the error of every update of the compressed one along and across the dense update.

    base: a model, or what :func:`thalweg.capture.opening.open_model` opens. compressed: the same; or a context manager that changes the base
    while it is entered (``editing.edit(model, ...)``); or a function that gets a copy of the base and gives the compressed model, a context
    manager, or None where it changed the copy. texts: strings or lists of token ids, one a document, read in windows of ``length`` tokens
    (None: 512, or what both models take) until ``tokens`` are read. opening: of ``open_model``, for both.

    mode: ``local`` (every compressed layer on the dense input of that layer; inside a layer the feed-forward sublayer sees the compressed
    attention), ``isolated`` (every sublayer on its dense input), ``global`` (two passes of the whole models), or several; None: local and
    global. preset ``paper``: local, the last token of the first window of every document, means over layers without the first and the last.
    layer_kl: KL of the predictions with one layer compressed, which costs a pass through the layers behind it for each. low_memory: one
    model open at a time; what the dense one leaves lies in a temporary folder meanwhile.

    Rows: for attention, feed-forward, whole layers and, in value space (site ``layers.3.attention.value``, before the output projection),
    all heads together and each: ``error.total``, ``.along``, ``.signed``, ``.across``, ``.across_share``, ``.cosine``, ``.pooled``,
    ``.sqnr``, each with the mode behind it (:mod:`thalweg.geometry.errors`), an interval over documents (windows, of
    fewer than eight) and the null;
    means over layers and ``agreement.*`` (:mod:`thalweg.compression.layer_numbers`); in global mode of decoders ``kl``, ``loss.*`` and
    ``top_token_agreement``. Source: He et al. 2026 (arXiv 2609.15975). Deviations: all tokens by default; where layers add their updates, the
    error of a layer is that of their sum and not of a difference of states.
    Raises: InputError for models that are no pair; CaptureError, ProofError.
    """
    options = _options(mode, preset, values, layer_kl, low_memory, allow_unverified, seed)
    one = base if isinstance(base, Side) else side_of(base, names[0], tokenizer=tokenizer, map=map, options=opening)
    two = _second(one, compressed, names[1], tokenizer, map, opening)
    work = Comparison(one, two, options, progress)
    read = {"texts": texts, "length": length, "tokens": tokens, "batch_size": batch_size, "tokenizer": tokenizer}
    return work.apart(read) if low_memory else work.together(read)


def _second(base: Side, compressed: Any, name: str, tokenizer: Any, map: Any, opening: Any) -> Side:
    if isinstance(compressed, Side):
        return compressed
    if isinstance(compressed, nn.Module | str | Path):
        return side_of(compressed, name, tokenizer=tokenizer, map=map, options=opening)
    return twin_of(base, compressed, name)


def _options(
    mode: Any, preset: str | None, values: bool, layer_kl: bool, low_memory: bool, allow_unverified: bool, seed: int
) -> CompareOptions:
    if preset is not None and preset not in PRESETS:
        raise UnknownNameError("preset of a comparison", preset, PRESETS)
    modes = (mode,) if isinstance(mode, str) else tuple(mode or (("local",) if preset else DEFAULT_MODES))
    for one in modes:
        if one not in MODES:
            raise UnknownNameError("mode of a comparison", one, MODES)
    if layer_kl and low_memory:
        raise InputError("layer-wise KL needs both models at once; leave it out, or low memory")
    if layer_kl and "local" not in modes:
        raise InputError(
            "layer-wise KL puts the outputs of local mode through the dense network; add local to the modes"
        )
    return CompareOptions(
        modes=tuple(m for m in MODES if m in modes),
        last_only=preset == "paper",
        ends=preset != "paper",
        values=values,
        layer_kl=layer_kl,
        low_memory=low_memory,
        allow_unverified=allow_unverified,
        seed=seed,
    )


__all__ = ["DEFAULT_MODES", "MODES", "PRESETS", "CompareOptions", "ComparePlan", "Diagnosis", "compare", "diagnose"]
