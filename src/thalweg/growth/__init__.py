"""Growth: prototypes that keep apart (DDCL), heads that are added while a directional residual remains (INCRT), and a record of why.

Names load when they are first used.
"""

from typing import TYPE_CHECKING

from thalweg._lazy import lazy

if TYPE_CHECKING:
    from thalweg.growth.birth import at_random, on_the_plane
    from thalweg.growth.checks import check_inputs, check_labels, check_texts
    from thalweg.growth.controller import Controller
    from thalweg.growth.ddcl import DDCL
    from thalweg.growth.energy import FreeEnergy
    from thalweg.growth.events import GrowthEvent, GrowthRecord
    from thalweg.growth.forecasting import Forecast, forecast
    from thalweg.growth.online import OjaTracker, mca_exin
    from thalweg.growth.options import GrowthOptions
    from thalweg.growth.protocol import Birth, Growable, HeadFactors
    from thalweg.growth.prototypes import Panel, PrototypeLoss, collapse_panel, prototype_loss, time_scales

__all__ = [
    "DDCL",
    "Birth",
    "Controller",
    "Forecast",
    "FreeEnergy",
    "Growable",
    "GrowthEvent",
    "GrowthOptions",
    "GrowthRecord",
    "HeadFactors",
    "OjaTracker",
    "Panel",
    "PrototypeLoss",
    "at_random",
    "check_inputs",
    "check_labels",
    "check_texts",
    "collapse_panel",
    "forecast",
    "mca_exin",
    "on_the_plane",
    "prototype_loss",
    "time_scales",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "birth": ("at_random", "on_the_plane"),
        "checks": ("check_inputs", "check_labels", "check_texts"),
        "controller": ("Controller",),
        "ddcl": ("DDCL",),
        "energy": ("FreeEnergy",),
        "events": ("GrowthEvent", "GrowthRecord"),
        "forecasting": ("Forecast", "forecast"),
        "online": ("OjaTracker", "mca_exin"),
        "options": ("GrowthOptions",),
        "protocol": ("Birth", "Growable", "HeadFactors"),
        "prototypes": ("Panel", "PrototypeLoss", "collapse_panel", "prototype_loss", "time_scales"),
    },
)
