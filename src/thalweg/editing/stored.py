"""Single tensors of a saved model, by name."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from thalweg.config import is_path
from thalweg.errors import CheckpointError, first_line
from thalweg.records.jsonl import read_object

WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"


def stored_tensors(where: str | Path, names: Sequence[str]) -> dict[str, Tensor]:
    """The tensors ``names`` of the model that was saved in the folder ``where``, or stands under that name in the cache of the hub.

    Raises: CheckpointError where the weights, or one of the names in them, are missing.
    """
    from safetensors import safe_open

    index = _file(where, INDEX)
    whole = None if index is not None else _file(where, WHOLE)
    if index is None and whole is None:
        raise CheckpointError(
            f"{str(where) or 'the model'}: no {WHOLE} is there to take learned scales from; give the folder that save_pretrained wrote"
        )
    places = {} if index is None else read_object(index, "index of weights")["weight_map"]
    found: dict[str, Tensor] = {}
    for name in names:
        path = whole if index is None else _file(where, places.get(name, ""))
        try:
            if path is not None:
                with safe_open(path, framework="pt") as file:
                    if name in list(file.keys()):
                        found[name] = file.get_tensor(name)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({first_line(error)})") from None
        if name not in found:
            raise CheckpointError(
                f"{where} names an edit in its configuration but holds no {name}; save the model anew with the edit attached"
            )
    return found


def _file(where: str | Path, name: str) -> Path | None:
    if not name or not str(where):
        return None
    if is_path(where) or Path(where).is_dir():
        path = Path(where) / name
        return path if path.is_file() else None
    from transformers.utils import cached_file

    found = cached_file(
        str(where), name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)
