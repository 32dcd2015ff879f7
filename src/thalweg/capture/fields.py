"""Fields of ``config.json`` that no model can have, by name: what transformers says of them names neither field nor what is allowed."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from thalweg.capture.weights import LAYERS, SIZES
from thalweg.errors import CheckpointError, nearest

HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "heads",
    "kv_heads",
    "head_dim",
)
COUNTS = (*LAYERS, *SIZES, *HEADS)
INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_width")  # 0: a model without such sublayers


def check_counts(table: Mapping[str, Any], folder: Path) -> None:
    """That depth, widths and heads are counts, before anything is built of them. A list (by layer) and null are for transformers to judge.

    Raises: CheckpointError.
    """
    for part in (table, table.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        for name, least in [*((name, 1) for name in COUNTS), *((name, 0) for name in INNER)]:
            value = part.get(name)
            if value is None or isinstance(value, list | dict):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise CheckpointError(
                    f"{folder}: config.json says {name} {value!r}, which must be a whole number of at least {least}; "
                    "use the config that the weights were saved with"
                )


def unknown_name(error: BaseException, where: str) -> str:
    """What a KeyError of transformers means, by the field of ``config.json`` that holds the missing name; empty for another error."""
    if not isinstance(error, KeyError) or len(error.args) != 1 or not isinstance(error.args[0], str):
        return ""
    name = error.args[0]
    try:
        table = json.loads((Path(where) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    field = next((field for field, value in _leaves(table) if value == name), None)
    if field is None:
        return ""
    known = _known(field)
    near = nearest(name, known, n=5, cutoff=0.3) or known[:8]
    allowed = f"; it knows {', '.join(near)}{', ...' if len(near) < len(known) else ''}" if known else ""
    return f"config.json says {field} {name!r}, which transformers does not know{allowed}"


def _known(field: str) -> list[str]:
    """The names that transformers has for a field."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if "rope" in field:
        return sorted({"default", *ROPE_INIT_FUNCTIONS})
    return sorted(ACT2FN) if "act" in field else []


def _leaves(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items() if isinstance(table, dict) else ():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
