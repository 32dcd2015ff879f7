"""What the dense model left, kept on the disk between its passes and those of the compressed model: one file a batch."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from thalweg.compression.dense_pass import Kept
from thalweg.errors import InputError, first_line

MARGIN = 64 * 2**20  # left free on the disk


class Stored:
    """A record whose tensors lie in a file and are read when they are asked for, each into memory of its own."""

    def __init__(self, path: Path, specs: dict[str, TreeSpec], shapes: dict[str, tuple[int, ...]]):
        self.path, self.specs, self.shapes = path, specs, shapes

    def tensor(self, name: str) -> Tensor:
        return self._leaf(f"{name}/0")

    def tree(self, name: str) -> Any:
        spec = self.specs[name]
        return tree_unflatten([self._leaf(f"{name}/{i}") for i in range(spec.num_leaves)], spec)

    def _leaf(self, name: str) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            return (
                file.get_tensor(name).clone().expand(self.shapes[name])
            )  # of its own, aligned as a fresh tensor is: the same sums to the last bit


class Store:
    """Records of batches in a folder."""

    def __init__(self, folder: Path):
        self.folder, self.records = folder, {}

    def put(self, batch: int, record: Kept) -> None:
        """Raises: InputError for a full disk."""
        path = self.folder / f"{batch:06}.safetensors"
        try:
            save_file({name: x.cpu() for name, x in record.tensors.items()}, path)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"what the dense model left cannot be kept in {self.folder.parent} ({first_line(error)}); make room, read fewer tokens, or "
                f"name another folder by TMPDIR"
            ) from None
        self.records[batch] = Stored(path, record.specs, record.shapes)

    def get(self, batch: int) -> Stored:
        """The record of a batch."""
        return self.records[batch]


@contextmanager
def store(size: int) -> Iterator[Store]:
    """A folder for ``size`` bytes among the temporary files, gone afterwards. Raises: InputError where there is no room for it."""
    place = Path(tempfile.gettempdir())
    free = shutil.disk_usage(place).free
    if free < size + MARGIN:
        raise InputError(
            f"the dense inputs take {size / 2**20:,.0f} MiB in {place}, {free / 2**20:,.0f} MiB are free; make room, read fewer tokens, or "
            f"name another folder by TMPDIR"
        )
    with tempfile.TemporaryDirectory(prefix="thalweg-compare-") as folder:
        yield Store(Path(folder))
