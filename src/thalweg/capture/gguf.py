"""Models in GGUF files: read by transformers, every weight unpacked, so that the model is a plain one."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from thalweg._words import counted
from thalweg.capture.quiet import hushed, readable
from thalweg.errors import CheckpointError, MissingExtraError, first_line

MAGIC = b"GGUF"
BROKEN = "the file is cut short or of a kind that transformers does not load"


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_config(path: Path) -> Any:
    """The configuration of the model in a GGUF file. Raises: MissingExtraError, CheckpointError."""
    _check_extra()
    from transformers import AutoConfig

    _check_depth(path)
    with readable(str(path), BROKEN), _no_bar():
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


def _check_depth(path: Path) -> None:
    """Every layer has a tensor: a number of layers from nowhere is refused before anything is built of it. Raises: CheckpointError."""
    with path.open("rb") as file:
        tensors = int.from_bytes(file.read(16)[8:], "little")
    for key, value in _metadata(path).items():
        if key.endswith(".block_count") and isinstance(value, int) and value > tensors:
            raise CheckpointError(
                f"{path} says that it has {value:,} layers and holds {counted(tensors, 'tensor')}; {BROKEN}"
            )


def _metadata(path: Path) -> dict[str, Any]:
    """Raises: CheckpointError."""
    from transformers.integrations.gguf import read_gguf_metadata

    try:
        with hushed():
            return read_gguf_metadata(str(path))[0]
    except Exception as error:  # a reader of bytes that may be anything
        raise CheckpointError(f"{path}: {first_line(error)}; {BROKEN}") from None


def read_model(path: Path, config: Any, loader: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Model and loading info by ``loader``, an Auto class of transformers; nothing stays quantised. Raises: as ``read_config``."""
    _check_extra()
    from transformers import GgufConfig

    plain = GgufConfig(dequantize=True)  # else transformers may fetch kernels from a hub
    with readable(str(path), BROKEN), _no_bar():
        return loader.from_pretrained(
            path.parent,
            config=config,
            gguf_file=path.name,
            quantization_config=plain,
            output_loading_info=True,
            **options,
        )


def read_tokenizer(path: Path) -> Any:
    """The tokenizer inside a GGUF file. Raises: as ``read_config``."""
    _check_extra()
    from transformers import AutoTokenizer

    with readable(str(path), BROKEN), _no_bar():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def packing(path: Path) -> str:
    """How the weights are packed, as the file says it (``mostly Q4_1``); empty where it does not."""
    _check_extra()
    from gguf import LlamaFileType

    kind = _metadata(path).get("general.file_type")
    if kind not in [*LlamaFileType]:
        return ""
    return LlamaFileType(kind).name.replace("MOSTLY_", "mostly ").replace("ALL_", "all ")


def _check_extra() -> None:
    from importlib.util import find_spec

    for name in ("gguf", "accelerate"):
        if find_spec(name) is None:
            raise MissingExtraError(f"{name} (for GGUF files)", "gguf")


@contextmanager
def _no_bar() -> Iterator[None]:
    """transformers draws one bar for GGUF past its own switch."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    bar = theirs.tqdm
    theirs.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        theirs.tqdm = bar
