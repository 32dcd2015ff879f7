"""What a measurement will take, said before it begins: tokens, passes, memory, and time from one timed batch."""

from dataclasses import dataclass

from thalweg._words import counted

SCRATCH = 8  # float32 copies of a batch of states that live at once
MOST_LOGITS = 2**27  # numbers: 512 MiB in float32
MOST_ROWS = 8


@dataclass(frozen=True)
class MeasurePlan:
    """documents, windows, tokens: that are read. passes: batches of ``batch_size`` windows. kept: bytes of the statistics, the same for any
    number of tokens; scratch: bytes of one batch beside what the model itself needs. proof: in words. seconds: None before a batch was
    timed. begins: how a document begins, in words. notes: what a reader of the numbers should know."""

    documents: int
    windows: int
    tokens: int
    length: int
    batch_size: int
    passes: int
    kept: int
    scratch: int
    dtype: str
    begins: str = ""
    proof: str = ""
    seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """For a person."""
        size = (
            f"{self.kept / 2**20:.0f} MiB for statistics, whatever the text, {self.scratch / 2**20:.0f} MiB for a batch"
        )
        what = f"{self.tokens:,} tokens of {counted(self.documents, 'document')} in {counted(self.windows, 'window')} of up to {self.length}"
        begins = f"; {self.begins}" if self.begins else ""
        found = [f"{what}{begins}; {counted(self.passes, 'pass')} in {self.dtype}", size]
        if self.proof:
            found.append(self.proof)
        if self.seconds is not None:
            found.append(f"about {self.seconds:.0f} s, from one timed batch")
        return [*found, *self.notes]


def rows_of_a_batch(length: int, vocabulary: int) -> int:
    """How many windows go in one batch unless it is said: at most 8, and no more logits than 512 MiB."""
    return max(1, min(MOST_ROWS, MOST_LOGITS // max(1, length * vocabulary)))


def scratch_of(rows: int, length: int, width: int, vocabulary: int) -> int:
    """Bytes of a batch: copies of states, and the logits of one row in float32, twice."""
    return 4 * (SCRATCH * rows * length * width + 2 * length * vocabulary)
