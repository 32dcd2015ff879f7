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
    from thalweg.growth.network import TransformerNetwork
    from thalweg.growth.online import OjaTracker, mca_exin
    from thalweg.growth.options import GrowthOptions
    from thalweg.growth.planning import GrowthPlan, plan_growth
    from thalweg.growth.protocol import Birth, Growable, HeadFactors
    from thalweg.growth.prototypes import Panel, PrototypeLoss, collapse_panel, prototype_loss, time_scales
    from thalweg.growth.run import GrownRun, grow

__all__ = [
    "DDCL",
    "Birth",
    "Controller",
    "Forecast",
    "FreeEnergy",
    "Growable",
    "GrownRun",
    "GrowthEvent",
    "GrowthOptions",
    "GrowthPlan",
    "GrowthRecord",
    "HeadFactors",
    "OjaTracker",
    "Panel",
    "PrototypeLoss",
    "TransformerNetwork",
    "at_random",
    "check_inputs",
    "check_labels",
    "check_texts",
    "collapse_panel",
    "forecast",
    "grow",
    "mca_exin",
    "on_the_plane",
    "plan_growth",
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
        "network": ("TransformerNetwork",),
        "online": ("OjaTracker", "mca_exin"),
        "options": ("GrowthOptions",),
        "planning": ("GrowthPlan", "plan_growth"),
        "protocol": ("Birth", "Growable", "HeadFactors"),
        "prototypes": ("Panel", "PrototypeLoss", "collapse_panel", "prototype_loss", "time_scales"),
        "run": ("GrownRun", "grow"),
    },
)
