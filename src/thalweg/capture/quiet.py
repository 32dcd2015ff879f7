"""transformers without its warnings on the terminal; what it raises about a place becomes one line of ours."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from thalweg.capture.fields import unknown_name
from thalweg.config import is_path
from thalweg.errors import CheckpointError, InputError, OfflineError, ThalwegError, first_line, is_memory

_DEVICE = re.compile(
    r"device_map|not compiled with|not linked with support|invalid device|device ordinal|device type|No CUDA GPUs|NVIDIA driver"
)


@contextmanager
def hushed(*, bars: bool = False) -> Iterator[None]:
    """Warnings of transformers are kept back, and its progress bars too unless ``bars``. What they would say is checked by the caller."""
    from transformers.utils import logging as theirs

    logger = logging.getLogger("transformers")
    level, shown = logger.level, theirs.is_progress_bar_enabled()
    logger.setLevel(logging.CRITICAL)
    if not bars:
        theirs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        if shown:
            theirs.enable_progress_bar()


@contextmanager
def readable(
    where: str, what: str = "give a folder that save_pretrained wrote", *, bars: bool = False
) -> Iterator[None]:
    """Errors of transformers about ``where`` in one line, and its warnings kept back.

    Raises: OfflineError for a name on a hub; CheckpointError, which advises ``what``, for a place on the disk; InputError where it is not the
    place's fault: no memory left, or a device that is not here.
    """
    try:
        with hushed(bars=bars):
            yield
    except ThalwegError:
        raise
    except SafetensorError as error:
        raise CheckpointError(
            f"{where}: the weights cannot be read ({first_line(error)}); the file is broken: save or copy it anew"
        ) from None
    except Exception as error:  # transformers and its transports raise many kinds
        line = first_line(error)
        if is_memory(error):
            raise InputError(
                f"{where}: there is no memory for it ({line}); take a smaller model or dtype (bfloat16), or spread it by device_map"
            ) from None
        if _DEVICE.search(str(error)):
            raise InputError(
                f"{where}: {line}; device_map may name the devices of this machine: {_devices()}"
            ) from None
        if is_path(where):
            raise CheckpointError(f"{where}: {unknown_name(error, where) or line}; {what}") from None
        raise OfflineError(
            f"{where} is no folder here, and the hub did not give it ({line}); give a folder, or check name and network"
        ) from None


def _devices() -> str:
    import torch

    found = [f"cuda:{i}" for i in range(torch.cuda.device_count())] + ["mps"] * torch.backends.mps.is_available()
    return ", ".join(["cpu", *found, "auto"])
