"""A comparison: what is asked of it, what it will take, said before it begins, and what it gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thalweg.compression.error_statistics import PairStatistics
from thalweg.compression.pairing import Description
from thalweg.records import Measurements

MODES = ("local", "isolated", "global")
DEFAULT_MODES = ("local", "global")


@dataclass(frozen=True)
class ComparePlan:
    """tokens, documents, windows: that are read, ``counted`` of the tokens are looked at. batches: of ``batch_size`` windows; passes: of either
    model over all of them. kept: bytes of the statistics; record: bytes of what the dense model leaves, of one batch in memory or of all on the
    disk. seconds: None before a batch was timed. notes: what a reader of the numbers should know."""

    documents: int
    windows: int
    tokens: int
    counted: int
    length: int
    batch_size: int
    batches: int
    passes: float
    modes: tuple[str, ...]
    kept: int
    record: int
    on_disk: bool
    weights: int
    layer_passes: int = 0
    seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """For a person."""
        looked = "all" if self.counted == self.tokens else f"{self.counted:,}"
        what = f"{self.tokens:,} tokens of {self.documents:,} documents in {self.windows:,} windows of up to {self.length}, {looked} looked at"
        found = [
            f"{what}; {self.batches:,} batches, {' and '.join(self.modes)}: {self.passes:g} passes each",
            f"{self.weights / 2**20:,.0f} MiB of weights at once, {self.kept / 2**20:,.0f} MiB for statistics, "
            + (
                f"{self.record / 2**20:,.0f} MiB on the disk for what the dense model left"
                if self.on_disk
                else f"{self.record / 2**20:,.0f} MiB for a batch of dense inputs and updates"
            ),
        ]
        if self.layer_passes:
            found.append(
                f"layer-wise KL: {self.layer_passes} more passes for every batch, each through the layers behind one"
            )
        if self.seconds is not None:
            found.append(f"about {self.seconds:.0f} s, from one timed batch")
        return [*found, *self.notes]


Progress = Callable[[int, ComparePlan], Any]


@dataclass(frozen=True)
class CompareOptions:
    """modes: of :data:`MODES`. last_only: only the last token of every window. ends: the first and the last layer count in numbers over layers.
    values: attention heads before the output projection. layer_kl: KL of every layer alone. low_memory: one model at a time."""

    modes: tuple[str, ...] = DEFAULT_MODES
    last_only: bool = False
    ends: bool = True
    values: bool = True
    layer_kl: bool = False
    low_memory: bool = False
    allow_unverified: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """rows: everything that was measured. base, compressed: what is known of both models. protected: bytes that it costs to leave a layer of
    the base as it was, where that is known; how that was counted stands in ``bytes_rule``. errors: the sums behind the rows, by mode, every
    unit of the text apart; layer_kl: by layer, where it was asked for."""

    rows: Measurements
    plan: ComparePlan
    base: Description
    compressed: Description
    notes: tuple[str, ...]
    protected: Mapping[int, int]
    bytes_rule: str
    options: CompareOptions
    errors: Mapping[str, PairStatistics] = field(default_factory=dict, repr=False, compare=False)
    layer_kl: Mapping[int, float] = field(default_factory=dict)
