"""Changes to a trained model that keep what it computes, and the proof that they do. Names load when they are first used."""

from typing import TYPE_CHECKING

from thalweg._lazy import lazy

if TYPE_CHECKING:
    from thalweg.surgery.carrying import carry_optimizer
    from thalweg.surgery.change import Change, Grown, ParameterMap
    from thalweg.surgery.conversion import Conversion, convert
    from thalweg.surgery.depth import grow_depth
    from thalweg.surgery.families import Family
    from thalweg.surgery.folder import save
    from thalweg.surgery.growth_plan import Growth
    from thalweg.surgery.heads import grow_heads, head_masks, mask_heads, prune_heads
    from thalweg.surgery.proof import Case, Proof
    from thalweg.surgery.pruning import Pruned, PruneRecord, prune, save_pruned
    from thalweg.surgery.scoring import HeadScore, head_scores, lowest
    from thalweg.surgery.source import Source, open_source
    from thalweg.surgery.target import RECIPES
    from thalweg.surgery.width import grow_width

__all__ = [
    "RECIPES",
    "Case",
    "Change",
    "Conversion",
    "Family",
    "Grown",
    "Growth",
    "HeadScore",
    "ParameterMap",
    "Proof",
    "PruneRecord",
    "Pruned",
    "Source",
    "carry_optimizer",
    "convert",
    "grow_depth",
    "grow_heads",
    "grow_width",
    "head_masks",
    "head_scores",
    "lowest",
    "mask_heads",
    "open_source",
    "prune",
    "prune_heads",
    "save",
    "save_pruned",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "carrying": ("carry_optimizer",),
        "change": ("Change", "Grown", "ParameterMap"),
        "conversion": ("Conversion", "convert"),
        "depth": ("grow_depth",),
        "families": ("Family",),
        "folder": ("save",),
        "growth_plan": ("Growth",),
        "heads": ("grow_heads", "head_masks", "mask_heads", "prune_heads"),
        "proof": ("Case", "Proof"),
        "pruning": ("PruneRecord", "Pruned", "prune", "save_pruned"),
        "scoring": ("HeadScore", "head_scores", "lowest"),
        "source": ("Source", "open_source"),
        "target": ("RECIPES",),
        "width": ("grow_width",),
    },
)
