"""Same seed, same bits: random state of its own, deterministic kernels, a fixed number of threads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from thalweg.errors import InputError

MEMORY: Any = torch.utils.deterministic  # its one attribute is a property of the module, which type checkers do not see


def derive_seed(seed: int, purpose: int) -> int:
    """A seed for one purpose (model 0, data 1, loop 2), so that arms that share a seed share data order whatever their model draws."""
    return (seed * 1_000_003 + purpose * 7_919 + 1) % (2**63 - 1)


@contextmanager
def reproducible(seed: int, device: torch.device, threads: int | None) -> Iterator[None]:
    """Run a block with deterministic algorithms, ``threads`` CPU threads and a global random state of its own; all is put back after.

    Nothing in the package draws from the global state on purpose; whatever does (a third-party connection) is then seeded too.
    """
    if device.type == "cuda":
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS is deterministic only with a fixed workspace
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        MEMORY.fill_uninitialized_memory,
        torch.get_num_threads(),
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        MEMORY.fill_uninitialized_memory = False  # a debugging aid; it costs a pass over each new tensor
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            MEMORY.fill_uninitialized_memory = before[2]
            torch.set_num_threads(before[3])


def pick_device(name: str) -> torch.device:
    """``auto`` takes the GPU where there is one. Raises: InputError where a GPU is asked for and none is there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, but this torch sees no GPU; choose auto or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The global random state of this process: nothing should depend on it, so that nothing is lost if it is kept."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
