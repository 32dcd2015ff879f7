"""Capture: find the residual stream of any model, prove that it is the one that the model computes with, and watch it pass by.

    located = capture.locate(model)                     # by family, by structure, or by a map of yours
    capture.prove(located, batch)                       # replay at every site and at the logits; raises ProofError
    with capture.watch(located, on_event):              # one call per site, nothing is kept
        model(**batch)

Axis legend: ``b`` batch, ``t`` token, ``d`` width, ``n`` stream, ``h`` query head, ``kv`` key-value head, ``dv`` width of a value.
"""

from typing import TYPE_CHECKING

from thalweg._lazy import lazy

if TYPE_CHECKING:
    from thalweg.capture.inner import prove_inner
    from thalweg.capture.layout import Heads, Inner, Located, Point, SitePlace
    from thalweg.capture.locating import locate
    from thalweg.capture.maps import HeadsMap, InnerMap, Map, SiteMap, read_map
    from thalweg.capture.opening import Opened, open_model
    from thalweg.capture.probe import Probe
    from thalweg.capture.proof import Proof, prove
    from thalweg.capture.values import prove_values
    from thalweg.capture.watching import Event, InnerEvent, ValueEvent, watch

__all__ = [
    "Event",
    "Heads",
    "HeadsMap",
    "Inner",
    "InnerEvent",
    "InnerMap",
    "Located",
    "Map",
    "Opened",
    "Point",
    "Probe",
    "Proof",
    "SiteMap",
    "SitePlace",
    "ValueEvent",
    "locate",
    "open_model",
    "prove",
    "prove_inner",
    "prove_values",
    "read_map",
    "watch",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "inner": ("prove_inner",),
        "layout": ("Heads", "Inner", "Located", "Point", "SitePlace"),
        "locating": ("locate",),
        "maps": ("HeadsMap", "InnerMap", "Map", "SiteMap", "read_map"),
        "opening": ("Opened", "open_model"),
        "probe": ("Probe",),
        "proof": ("Proof", "prove"),
        "values": ("prove_values",),
        "watching": ("Event", "InnerEvent", "ValueEvent", "watch"),
    },
)
