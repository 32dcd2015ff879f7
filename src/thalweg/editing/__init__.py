"""Editing: scale the part of a model's updates along, or across, what they are added to; sweeps of scales; what an edit really changed.

with editing.edit(model, site="value", parallel=0.5):     # always restored
    model.generate(**inputs)
"""

from typing import TYPE_CHECKING

from thalweg._lazy import lazy

if TYPE_CHECKING:
    from thalweg.editing.attaching import Attached, attach, attach_from
    from thalweg.editing.auditing import audit, correlation
    from thalweg.editing.editor import Drift, Edited, edit, matched_noop
    from thalweg.editing.options import EditOptions
    from thalweg.editing.sweeping import PUBLISHED, Point, Result, Sweep, each_layer, grid, sweep

__all__ = [
    "PUBLISHED",
    "Attached",
    "Drift",
    "EditOptions",
    "Edited",
    "Point",
    "Result",
    "Sweep",
    "attach",
    "attach_from",
    "audit",
    "correlation",
    "each_layer",
    "edit",
    "grid",
    "matched_noop",
    "sweep",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "attaching": ("Attached", "attach", "attach_from"),
        "auditing": ("audit", "correlation"),
        "editor": ("Drift", "Edited", "edit", "matched_noop"),
        "options": ("EditOptions",),
        "sweeping": ("PUBLISHED", "Point", "Result", "Sweep", "each_layer", "grid", "sweep"),
    },
)
