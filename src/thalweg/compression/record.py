"""What a compression did, as it is kept beside the model: to the whole, and to every matrix."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg import config
from thalweg.config import to_plain
from thalweg.errors import CheckpointError, ThalwegError
from thalweg.records import jsonl

RECORD = "thalweg_compression.json"
SIMULATED = "the weights are dense floats that hold the values that a compressed model would have; neither memory nor time is saved by them"


@dataclass(frozen=True)
class LinearRecord:
    """One matrix. shape [out in]. bits_per_weight: stored natively. sparsity: share of zeros. mean_square_error: of the weights.
    relative_error: ||W' - W||^2 / ||W||^2. output_error: E|(W' - W) x|^2 / E|W x|^2 over the calibration tokens, None without.
    facts: of the compressor."""

    name: str
    layer: int
    site: str
    shape: tuple[int, ...]
    bits_per_weight: float
    sparsity: float
    mean_square_error: float
    relative_error: float
    output_error: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompressionRecord:
    """method, options: what was asked, defaults included. source: the model. layers, skipped, sites: where. kept_blocks: original numbers of
    the layers that are left where some were taken away, else None. calibration: source, samples, tokens, longest and sha256 of the tokens, or
    None. bits_per_weight: of the compressed matrices, stored natively. bytes: of the whole model stored natively, what is not compressed in
    16 bits; bytes_dense: of the model before in 16 bits. sparsity: share of zeros of the compressed matrices. left_dense: matrices inside the
    chosen layers that stay as they are. linears: every compressed matrix. weights: in what sense they are compressed. notes: what a
    reader should know."""

    method: str
    options: dict[str, Any]
    source: str
    layers: tuple[int, ...]
    skipped: tuple[int, ...]
    sites: tuple[str, ...]
    kept_blocks: tuple[int, ...] | None
    calibration: dict[str, Any] | None
    bits_per_weight: float
    bytes: int
    bytes_dense: int
    sparsity: float
    left_dense: tuple[str, ...] = ()
    linears: tuple[LinearRecord, ...] = ()
    weights: str = SIMULATED
    notes: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As it is written; ``kept_blocks`` and ``calibration`` stand there as null where there are none."""
        return {"kept_blocks": None, "calibration": None, **to_plain(self)}

    def text(self) -> str:
        return jsonl.encode(self.plain(), indent=2) + "\n"

    def lines(self) -> list[str]:
        """For a person."""
        what = ", ".join(f"{name} {value}" for name, value in self.options.items() if value is not None)
        found = [f"{self.method}: {what}" if what else self.method]
        if self.kept_blocks is not None:
            found.append(f"{len(self.kept_blocks)} layers are left: {', '.join(map(str, self.kept_blocks))}")
        else:
            found.append(
                f"{len(self.linears)} matrices in {len(self.layers)} layers, {self.bits_per_weight:.2f} bits a weight, "
                f"{100 * self.sparsity:.1f} % zeros"
            )
        if self.skipped:
            found.append(f"layers left dense: {', '.join(map(str, self.skipped))}")
        found.append(
            f"stored natively {self.bytes / 2**20:.1f} MiB, before {self.bytes_dense / 2**20:.1f} MiB in 16 bits"
        )
        return [*found, *self.notes]


def read_record(folder: str | Path) -> CompressionRecord | None:
    """The record beside a model; None where there is none. Raises: CheckpointError for a broken one."""
    path = Path(folder) / RECORD
    if not path.is_file():
        return None
    try:
        return config.build(
            CompressionRecord, jsonl.numbers(jsonl.read_object(path, "record of a compression")), RECORD
        )
    except CheckpointError:
        raise
    except ThalwegError as error:
        raise CheckpointError(f"{path} is no record of a compression ({error}); compress the model anew") from None
