"""A run that starts from the weights of a model, as ``thalweg convert`` writes it, in place of random ones."""

import dataclasses
import hashlib
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.config import checked_path, to_plain
from thalweg.errors import InputError
from thalweg.records.jsonl import read_object

if TYPE_CHECKING:  # reading a configuration loads no torch
    from thalweg.models.config import DecoderConfig
    from thalweg.models.transformer import Transformer

# Fields of a decoder that a run may choose for itself: they change no weight that the model has.
OWN = ("max_length", "gradient_checkpointing")  # never taken from the model
FREE = (*OWN, "attention_edit", "mlp_edit")
TOKENIZER, WEIGHTS = "tokenizer.json", "model.safetensors"


def table_of(folder: str | Path) -> dict[str, Any]:
    """What a training configuration must say to go on with the model in ``folder``, its tokenizer included where it has one.

    Raises: InputError, CheckpointError for a folder that holds no model of ours.
    """
    from thalweg.models.edits import UpdateEdit
    from thalweg.training.config import TrainConfig

    path = _folder(folder)
    model = stored(path)
    usual = {f.name: f.default for f in dataclasses.fields(model)}
    flat = {f.name for f in dataclasses.fields(TrainConfig)}
    found: dict[str, Any] = {"connection_options": to_plain(model.connection_options)}
    further: dict[str, Any] = {}
    for name in usual:
        value = getattr(model, name)
        value = value.plain() if isinstance(value, UpdateEdit) else to_plain(value)
        if name in (*OWN, "vocab_size", "connection_options") or value is None:
            continue
        if name in flat:
            found[name] = value
        elif getattr(model, name) != usual[name]:
            further[name] = value
    if further:
        found["model"] = further
    if (path / TOKENIZER).exists():
        found["tokenizer"] = str(path / TOKENIZER)
    return found


def stored(folder: str | Path) -> "DecoderConfig":
    """The configuration of the model in ``folder``. Raises: InputError, CheckpointError."""
    from thalweg.models.hf_config import ThalwegConfig

    return ThalwegConfig.from_pretrained(_folder(folder)).to_decoder()


def fitted(config: "DecoderConfig", folder: str | Path, vocab_size: int) -> "DecoderConfig":
    """``config`` with the vocabulary of the model in ``folder``, which may be larger than that of the data.

    Raises: InputError for a model that ``config`` does not describe, or data with tokens that it does not know.
    """
    model = stored(folder)
    if vocab_size > model.vocab_size:
        raise InputError(
            f"the data has {vocab_size} tokens, the model in {folder} knows {model.vocab_size}; give its own tokenizer by tokenizer"
        )
    config = config.replace(vocab_size=model.vocab_size)
    if model.positions == "learned":
        config = config.replace(max_length=model.max_length)
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(model, field.name)
        if field.name not in FREE and ours != theirs:
            raise InputError(
                f"the model in {folder} has {field.name} {theirs!r}, this run asks for {ours!r}; leave it out to take the model's"
            )
    return config


def load(decoder: "Transformer", folder: str | Path) -> None:
    """Give ``decoder`` the weights of the model in ``folder``. Raises: CheckpointError."""
    import torch

    from thalweg.models.hf import ThalwegForCausalLM
    from thalweg.models.retained import take_weights

    model: Any = ThalwegForCausalLM.from_pretrained(_folder(folder), dtype=torch.float32)
    take_weights(decoder, model.decoder)


def hashes(folder: str | Path) -> dict[str, str]:
    """File -> SHA-256 of the weights in ``folder`` that :func:`load` reads: the one file, or those that the index of several names."""
    path = _folder(folder)
    index = path / f"{WEIGHTS}.index.json"
    names = (
        [WEIGHTS]
        if (path / WEIGHTS).exists()
        else sorted(set(read_object(index, "index of weights")["weight_map"].values()))
    )
    found = {}
    for name in names:
        with (path / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _folder(folder: str | Path) -> Path:
    from thalweg.models.hf_config import ThalwegConfig, ThalwegEncoderConfig

    path = checked_path(folder, expand=True)
    if not path.is_dir():
        raise InputError(
            f"init_from names {folder}, which is no folder; give one that thalweg convert or save_pretrained wrote"
        )
    try:
        kind = json.loads((path / "config.json").read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError):  # who reads the configuration says what is wrong with it
        return path
    if kind == ThalwegEncoderConfig.model_type:
        raise InputError(
            f"init_from names {folder}, an encoder of ours, and a run begins at a decoder or at random weights; leave init_from out, "
            "or change the encoder in Python: thalweg.surgery.grow_heads, grow_width, grow_depth and prune_heads take it"
        )
    if isinstance(kind, str) and kind != ThalwegConfig.model_type:
        raise InputError(
            f"init_from names {folder}, a model of the type {kind!r}, and a run begins at one of ours; if it is a decoder of a family that "
            f"can be converted, do so first: thalweg convert {shlex.quote(str(folder))} --connection additive -o FOLDER"
        )
    return path
