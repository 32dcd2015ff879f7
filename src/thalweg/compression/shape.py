"""What two models must share to be a pair: sizes, positions and rotary settings, as their configurations and modules say."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from thalweg.capture.layout import Located
from thalweg.capture.maps import text_config
from thalweg.errors import InputError

# What two configurations must share, by what people call it -> the names it goes by.
SIZES = {
    "vocabulary": ("vocab_size",),
    "width": ("hidden_size", "width"),
    "heads": ("num_attention_heads", "heads"),
    "key-value heads": ("num_key_value_heads", "kv_heads"),
    "width of a head": ("head_dim", "head_width"),
    "connection": ("connection",),
}
ROTARY = ("rope_parameters", "rope_scaling", "rope_theta", "rope_base", "rotary_scaling", "window_rope_base")
STATED = ("positions", "position_embedding_type")  # where a configuration says the kind of its positions
KINDS = {"absolute": "learned", "rope": "rotary", "nope": "none"}  # other words for them
TABLES = ("wpe", "position_embeddings", "embed_positions")  # modules that hold a vector for every position


def shared(model: nn.Module) -> dict[str, Any]:
    """Everything that must be the same in both models of a pair, by what people call it; None or left out where a model does not say."""
    config = text_config(model)
    found: dict[str, Any] = {}
    for what, names in SIZES.items():
        for name in names:
            value = getattr(config, name, None)
            if value is not None and not callable(value):
                found[what] = value
                break
    rotary = {name: _plain(value) for name in ROTARY if (value := getattr(config, name, None)) is not None}
    return {**found, "positions": _positions(model, config, bool(rotary)), "rotary settings": rotary or None}


def check_shared(pair: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> None:
    """Raises: InputError that names the first thing of :func:`shared` in which two models differ."""
    for what in one:
        check_same(pair, what, one[what], two.get(what))


def check_same(pair: str, what: str, one: Any, two: Any) -> None:
    """Raises: InputError where both are known and differ."""
    if one is not None and two is not None and one != two:
        raise InputError(
            f"{pair} are no pair: they differ in {what} ({_brief(one)} and {_brief(two)}); give two models of one shape"
        )


def norm_of(located: Located) -> str:
    """Kind of the last norm; empty where it cannot be told."""
    norm = None if located.final_norm is None else located.module(located.final_norm)
    if isinstance(norm, nn.RMSNorm) or "rms" in type(norm).__name__.lower():
        return "RMSNorm"
    return "LayerNorm" if isinstance(norm, nn.LayerNorm) else ""


def _positions(model: nn.Module, config: Any, settings: bool) -> str | None:
    """How a model knows where a token stands; None where it cannot be told. settings: its configuration has rotary ones."""
    stated = next((kind for name in STATED if isinstance(kind := getattr(config, name, None), str)), None)
    if stated is not None:
        return KINDS.get(stated, stated)
    if getattr(config, "alibi", False) is True:  # Falcon has rotary settings all the same
        return "ALiBi"
    if settings or any(name.endswith("inv_freq") for name, _ in model.named_buffers()):
        return "rotary"
    if any(isinstance(m, nn.Embedding) and name.rpartition(".")[2] in TABLES for name, m in model.named_modules()):
        return "learned"
    # a model of somebody else's code may turn its queries without a trace of it in the configuration or the buffers
    return "neither rotary nor learned" if type(model).__module__.startswith("transformers.") else None


def _plain(value: Any) -> Any:
    """Without what is not set, as a folder may spell it out and another may not."""
    return {k: _plain(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
