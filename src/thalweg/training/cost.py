"""What a run costs while it goes on: time in updates, tokens, and the peak of memory."""

import functools
import sys
from pathlib import Path

import torch

from thalweg.models.activations import Activations
from thalweg.models.config import DecoderConfig
from thalweg.models.size import Size, flops

CLEAR_REFS, STATUS, MEMORY = Path("/proc/self/clear_refs"), Path("/proc/self/status"), Path("/proc/meminfo")


@functools.lru_cache(maxsize=64)
def train_flops(model: DecoderConfig, length: int) -> float:
    """FLOPs of training per token on sequences of ``length``; kept, because a study asks for few models many times."""
    unmeasured = Activations(0, 0)  # measuring them takes seconds, and FLOPs do not depend on them
    return Size(model, length, "float32", {}, flops(model, length), unmeasured).train_flops


class Meter:
    """Seconds spent in updates (evaluation and saving left out) and the tokens they took, summed over resumptions."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds, self.tokens = 0.0, 0
        self._peak_before, self._held = 0, False
        reset_peak_memory(device)

    def add(self, seconds: float, tokens: int) -> None:
        if self._held:
            reset_peak_memory(self.device)
            self._held = False
        self.seconds += seconds
        self.tokens += tokens

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def peak_memory(self) -> int:
        """Bytes: of tensors on a GPU; of the whole process on a CPU."""
        return self._peak_before if self._held else max(self._peak_before, peak_memory(self.device))

    def hold_peak(self) -> None:
        """Leave what comes now out of the peak, until the next update."""
        self._peak_before, self._held = self.peak_memory, True

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        reset_peak_memory(self.device)
        self._peak_before, self._held = 0, False

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self.seconds, "tokens": self.tokens, "peak_memory": self.peak_memory}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.seconds, self.tokens = state["seconds"], int(state["tokens"])
        self._peak_before = int(state["peak_memory"])


def reset_peak_memory(device: torch.device) -> None:
    """Start the peak anew, so that several runs in one process do not inherit the largest; Linux and CUDA only."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        CLEAR_REFS.write_text("5")  # proc(5): resets the peak resident set size
    except OSError:
        return


def peak_memory(device: torch.device) -> int:
    """Peak of memory in bytes since :func:`reset_peak_memory`; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory(device: torch.device) -> int | None:
    """Bytes that a new process could take; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
