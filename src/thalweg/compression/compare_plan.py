"""What a comparison will take, said before it begins."""

from dataclasses import dataclass


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
        found = [
            f"{self.tokens:,} tokens of {self.documents:,} documents in {self.windows:,} windows of up to {self.length}, {looked} looked at; "
            f"{self.batches:,} batches, {' and '.join(self.modes)}: {self.passes:g} passes each",
            f"{self.weights / 2**20:,.0f} MiB of weights at once, {self.kept / 2**20:,.0f} MiB for statistics, "
            + (
                f"{self.record / 2**20:,.0f} MiB on the disk for what the dense model left"
                if self.on_disk
                else f"{self.record / 2**20:,.0f} MiB for a batch of dense inputs and updates"
            ),
        ]
        if self.layer_passes:
            found.append(f"layer-wise KL: {self.layer_passes} more passes for every batch, each through the layers behind one")
        if self.seconds is not None:
            found.append(f"about {self.seconds:.0f} s, from one timed batch")
        return [*found, *self.notes]
