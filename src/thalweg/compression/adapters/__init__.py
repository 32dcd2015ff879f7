"""Adapters: compressors of other libraries, each run in an environment of its own, with files in and out.

Their pins clash with ours, so nothing of them is imported here: a script is run by the Python of their environment. It opens a folder of
the dense model, compresses it, and hands back dense weights with the values of the compressed ones.
"""

from typing import TYPE_CHECKING

from thalweg._lazy import lazy

if TYPE_CHECKING:
    from thalweg.compression.adapters.libraries import LIBRARIES, Library, external, is_external
    from thalweg.compression.adapters.running import compress_outside

__all__ = ["LIBRARIES", "Library", "compress_outside", "external", "is_external"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "libraries": ("LIBRARIES", "Library", "external", "is_external"),
        "running": ("compress_outside",),
    },
)
