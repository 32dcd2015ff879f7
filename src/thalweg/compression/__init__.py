"""Compression: make a model smaller in place, or a twin of it by somebody else's library, and say what was done to every weight.

made = compression.compress(model, "round_to_nearest", bits=4, group=64)     # no calibration
made = compression.compress(model, "wanda", sparsity="2:4", calibration=ids)  # ids: a list of lists of token numbers
made.save("smaller", tokenizer=tokenizer)                                      # a folder of transformers with the record beside it
rows = compression.compare("base", "smaller", texts)                           # what that did to the updates, layer by layer
"""

from typing import TYPE_CHECKING

from thalweg._lazy import lazy

if TYPE_CHECKING:
    from thalweg.compression.cache import CacheOptions, compress_cache
    from thalweg.compression.calibration import Calibration, calibration_of
    from thalweg.compression.comparing import CompareOptions, Diagnosis, compare, diagnose
    from thalweg.compression.compressing import Compressed, compress
    from thalweg.compression.record import CompressionRecord, LinearRecord, read_record

__all__ = [
    "CacheOptions",
    "Calibration",
    "CompareOptions",
    "Compressed",
    "CompressionRecord",
    "Diagnosis",
    "LinearRecord",
    "calibration_of",
    "compare",
    "compress",
    "compress_cache",
    "diagnose",
    "read_record",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "cache": ("CacheOptions", "compress_cache"),
        "calibration": ("Calibration", "calibration_of"),
        "comparing": ("CompareOptions", "Diagnosis", "compare", "diagnose"),
        "compressing": ("Compressed", "compress"),
        "record": ("CompressionRecord", "LinearRecord", "read_record"),
    },
)
