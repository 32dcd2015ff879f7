"""A run that starts from the weights of a model, as ``thalweg convert`` writes it, in place of random ones."""

import dataclasses
import hashlib
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.config import checked_path, to_plain
from thalweg.errors import InputError

if TYPE_CHECKING:  # reading a configuration loads no torch
    from thalweg.data import Task
    from thalweg.models.config import DecoderConfig
    from thalweg.models.hf_config import ThalwegConfig
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
        if name in (*OWN, "vocab_size", "classes", "connection_options") or value is None:
            continue
        if name == "objective" and value == "classification":  # what such data is for without a word
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
    """The configuration of the model in ``folder``, decoder or encoder. Raises: InputError, CheckpointError."""
    return _in_shell(folder).to_plain_config()


def _in_shell(folder: str | Path) -> "ThalwegConfig":
    from thalweg.models.hf_config import ThalwegConfig, ThalwegEncoderConfig

    path = _folder(folder)
    encoder = _kind(path) == ThalwegEncoderConfig.model_type
    return (ThalwegEncoderConfig if encoder else ThalwegConfig).from_pretrained(path)


def fitted(config: "DecoderConfig", folder: str | Path, vocab_size: int) -> "DecoderConfig":
    """``config`` with the vocabulary of the model in ``folder``. That of a decoder may be larger than the data's; the last tokens of an
    encoder are its mask, or padding and start, so there it is the data's own.

    Raises: InputError for a model that ``config`` does not describe, or data with tokens that it does not know.
    """
    model = stored(folder)
    if _learned(model) != _learned(config):
        raise InputError(
            f"the model in {folder} learned {_learned(model)}, and the data of this run {_learned(config)}; choose data that fits the model, "
            "or leave init_from out"
        )
    if vocab_size > model.vocab_size or (not config.causal and vocab_size != model.vocab_size):
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


def _learned(config: "DecoderConfig") -> str:
    """In words."""
    from thalweg.models.encoder_config import EncoderConfig

    if not isinstance(config, EncoderConfig):
        return "the next token"
    return f"{config.classes} classes" if config.classifies else "masked tokens"


def check_task(folder: str | Path, task: "Task") -> None:
    """Raises: InputError where the tokens or classes of ``task`` mean something else to the encoder in ``folder``."""
    from thalweg.data.text.tokenizer import ByteTokenizer, read_tokenizer

    settings, path = _in_shell(folder), _folder(folder)
    wanted = task.portable_settings()
    for name, what in (("id2label", "names of classes"), ("pad_token_id", "padding"), ("bos_token_id", "start")):
        theirs, ours = getattr(settings, name, None), wanted.get(name)
        unnamed = name == "id2label" and theirs == {i: f"LABEL_{i}" for i in range(len(theirs or ()))}
        if ours is not None and theirs is not None and theirs != ours and not unnamed:
            shown = [", ".join(map(str, side.values())) if isinstance(side, dict) else side for side in (theirs, ours)]
            raise InputError(
                f"the {what} of the model in {folder} and of the data differ: {shown[0]} and {shown[1]}; give the data and the tokenizer "
                "that the model was trained with"
            )
    if not (path / TOKENIZER).exists() or task.tokenizer is None:
        return
    theirs = read_tokenizer(path).vocabulary()
    if isinstance(task.tokenizer, ByteTokenizer) or not task.tokenizer.vocabulary().items() <= theirs.items():
        raise InputError(
            f"the tokenizer of this run ({task.tokenizer.name}) is not that of the model in {folder}; leave tokenizer out to take the model's"
        )


def load(model: "Transformer", folder: str | Path) -> None:
    """Give ``model`` the weights of the one in ``folder``. Raises: CheckpointError; InputError for weights that are not finite."""
    import torch

    from thalweg.capture.quiet import hushed
    from thalweg.capture.weights import check_finite
    from thalweg.models.encoder_config import EncoderConfig
    from thalweg.models.hf import ThalwegForCausalLM
    from thalweg.models.hf_encoder import shell_of
    from thalweg.models.retained import take_weights

    config = model.config
    kind: Any = shell_of(config) if isinstance(config, EncoderConfig) else ThalwegForCausalLM
    with hushed():
        stored = kind.from_pretrained(_folder(folder), dtype=torch.float32)
    check_finite(stored, str(folder))
    take_weights(model, stored.transformer)


def hashes(folder: str | Path) -> dict[str, str]:
    """File -> SHA-256 of the weights in ``folder`` that :func:`load` reads: the one file, or those that the index of several names."""
    from thalweg.capture.weights import files_of

    path = _folder(folder)
    whole = (path / WEIGHTS).exists()
    names = [WEIGHTS] if whole else sorted(set(files_of(path / f"{WEIGHTS}.index.json").values()))
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
    kind = _kind(path)
    if isinstance(kind, str) and kind not in (ThalwegConfig.model_type, ThalwegEncoderConfig.model_type):
        raise InputError(
            f"init_from names {folder}, a model of the type {kind!r}, and a run begins at one of ours; if it is a decoder of a family that "
            f"can be converted, do so first: thalweg convert {shlex.quote(str(folder))} --connection additive -o FOLDER"
        )
    return path


def _kind(path: Path) -> Any:
    """What ``config.json`` calls the model; None where it cannot be read: who reads the configuration says what is wrong with it."""
    try:
        return json.loads((path / "config.json").read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
