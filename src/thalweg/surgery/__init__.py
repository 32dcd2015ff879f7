"""Changes to a trained model that keep what it computes, and the proof that they do. Names load when they are first used."""

from typing import TYPE_CHECKING

from thalweg._lazy import lazy

if TYPE_CHECKING:
    from thalweg.surgery.conversion import Conversion, convert
    from thalweg.surgery.families import Family
    from thalweg.surgery.folder import save
    from thalweg.surgery.proof import Case, Proof
    from thalweg.surgery.source import Source, open_source
    from thalweg.surgery.target import RECIPES

__all__ = ["RECIPES", "Case", "Conversion", "Family", "Proof", "Source", "convert", "open_source", "save"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "conversion": ("Conversion", "convert"),
        "families": ("Family",),
        "folder": ("save",),
        "proof": ("Case", "Proof"),
        "source": ("Source", "open_source"),
        "target": ("RECIPES",),
    },
)
