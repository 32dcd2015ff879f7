"""Convert: any supported decoder, or an encoder of ours, to another connection, with the proof that it computes what it computed."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.capture.weights import check_finite
from thalweg.errors import InputError, ProofError, UnknownNameError
from thalweg.models.hf import in_shell
from thalweg.models.hf_base import ThalwegPreTrainedModel
from thalweg.models.transformer import Transformer
from thalweg.surgery import text as texts
from thalweg.surgery.change import generates_as, generation_of
from thalweg.surgery.growth_plan import Growth
from thalweg.surgery.proof import TOLERANCE, Proof, compare, prove
from thalweg.surgery.source import Source, as_additive, as_ours, open_source
from thalweg.surgery.target import options_of, under, wanted

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Conversion(NamedTuple):
    """A new model of ours, and what was proved of it."""

    model: ThalwegPreTrainedModel
    proof: Proof


def convert(
    model: Any,
    connection: str | None = "additive",
    *,
    options: dict[str, Any] | None = None,
    growth: Growth | None = None,
    dtype: str = "float32",
    tokenizer: Any = None,
    text: str | Path | None = None,
    tokens: Tensor | texts.Sample | None = None,
    length: int | None = None,
    allow_drift: bool = False,
    **more: Any,
) -> Conversion:
    """A new model with the weights of ``model`` whose layers write to the stream by ``connection``; the given one is not changed.

    model: a decoder of transformers of a known family, or a decoder or encoder of ours with the additive connection; a folder, a name on a
    hub, or a :class:`Source`. connection: the name of one, or of a recipe (``closed_delta``); None: that of the model, where it
    is ours whatever it is.
    options, more: options of the connection; norms come from the model. growth: heads, widths and layers that the result has more of
    (:class:`thalweg.surgery.Growth`), which change no number either. dtype: ``float32`` (logits equal to 1e-4) or ``float64`` (to 1e-9),
    of the new model and of the proof. tokenizer, text, tokens, length: what the two are compared on: by default the held-out novel of the
    shipped corpus, cut by the model's tokenizer into rows of ``length`` tokens; or ``tokens`` [rows length], or a ready sample of
    :func:`thalweg.surgery.text.labelled`, which has the classes of texts. allow_drift: return a model
    that fails its proof too.

    Where the connection can start as the additive one it does, and the result is proved equal. Where it cannot (post-norm, DeepNorm,
    Highway, the k-map of Deep Delta Learning) the result is a warm start, and its proof says how far it drifted.
    Raises: InputError, UnknownNameError for what cannot be converted; CheckpointError, OfflineError for a model that cannot be loaded;
    ProofError when the proof fails.
    """
    if dtype not in DTYPES:
        raise UnknownNameError("value for dtype:", dtype, DTYPES)
    kind = DTYPES[dtype]
    given = {**(options or {}), **more}
    if connection is not None:
        wanted(connection, given)
    elif given:
        raise InputError(
            f"{', '.join(sorted(given))} are options of a connection, and none is named; give it or leave them out"
        )
    source = model if isinstance(model, Source) else open_source(model, tokenizer=tokenizer, dtype=kind)
    check_finite(source.model, source.name)  # else the proof would find the fault in the conversion
    kept = connection is None and source.ours is not None
    if kept and growth is None:
        raise InputError("nothing would change: name a connection, or say what grows")
    theirs, additive = as_ours(source, kind) if kept else as_additive(source, kind)
    if not kept:
        name, values = options_of(connection or "additive", additive, given)
    window = max(additive.config.windows, default=0)
    sample = texts.chosen(
        additive.config, source.tokenizer, text=text, tokens=tokens, length=length, window=window, rows=texts.ROWS
    )
    made, equal, notes = (additive, True, ()) if kept else under(additive, name, values)
    if growth is not None:
        made, grown, words = growth.apply(made, allow_drift=allow_drift)
        equal, notes = equal and grown, (*notes, *words)
    found, imported = compare(theirs, made, sample, kind), None
    if not equal or not found.difference <= TOLERANCE[kind]:  # whose fault it is, or where the drift begins
        imported = compare(theirs, additive, sample, kind).difference
    proof = prove(
        {"source": source.name, "family": source.family},
        found,
        sample,
        ours=made,
        equal=equal,
        imported=imported,
        dtype=kind,
        notes=(*notes, *left_behind(source), *unseen(window, sample.ids.shape[1]), *sample.notes),
    )
    if not proof.passed and not allow_drift:
        raise ProofError(why(proof))
    return Conversion(shell(source, made), proof)


ROUNDING = 10  # times the tolerance: as far as rounding has been seen to go, see docs/surgery.md


def why(proof: Proof) -> str:
    """The line of a proof that failed: by how much, where, and whose fault it is."""
    worst = next(c for c in proof.cases if c.difference == proof.difference or c.difference != c.difference)
    wrong_map = proof.imported is not None and not proof.imported <= proof.tolerance
    fault = (
        f"the map of family {proof.family!r} is wrong for this model"
        if wrong_map
        else f"the start of {proof.connection!r} is not the function of the model"
    )
    near = proof.dtype == "float32" and proof.difference < ROUNDING * proof.tolerance
    rounded = " (in float32 the rounding of a large model may do as much: --dtype float64 tells)" if near else ""
    return (
        f"{proof.source}: logits differ by {proof.difference:.3g} ({worst.name}), {proof.tolerance:g} is allowed in {proof.dtype}: {fault}; "
        f"nothing was written, --allow-drift takes it as it is{rounded}"
    )


def unseen(window: int, length: int) -> tuple[str, ...]:
    """What the compared rows are too short to show."""
    if not window or length > window:
        return ()
    return (
        f"no compared row is longer than the window of {window} tokens; a length of {window + texts.BEYOND} would show it",
    )


def left_behind(source: Source) -> tuple[str, ...]:
    """What of the source's behaviour the result does not have."""
    config = getattr(source.model, "config", None)
    names = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")
    dropped = [name for name in names if getattr(config, name, 0.0)] if source.ours is None else []
    notes = [f"dropout in training ({', '.join(dropped)}) is not carried over"] if dropped else []
    if getattr(source.model, "generation_config", None) is not None and generation_of(source.model) is None:
        notes.append(
            "its generation_config contradicts itself (transformers would not save it) and is not carried over"
        )
    return tuple(notes)


def shell(source: Source, made: Transformer) -> ThalwegPreTrainedModel:
    """The model in the shell of Hugging Face, with the special tokens and classes of the source, and how it generates."""
    return generates_as(source.model, in_shell(made, **source.settings))
