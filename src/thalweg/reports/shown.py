"""What a report says of one measure, and the places where measures are shown."""

from dataclasses import dataclass

HEADLINE = "headline"
DIAGNOSTIC = "diagnostic"
STATES, UPDATES, GATES, MIXING, JACOBIANS, OTHER = (
    "Spread and size of the states",
    "Updates",
    "Gates",
    "Mixing of the streams",
    "Jacobians",
    "Other measures",
)
GROUPS = (STATES, UPDATES, GATES, MIXING, JACOBIANS, OTHER)  # under "more measures", in reading order
STREAMS = "streams"  # openly, after the headline
TABLE = "table"  # in a table or a picture of their own, not as curves


@dataclass(frozen=True)
class Shown:
    """Title and caption of a measure; group: where it is drawn; log: a logarithmic axis where the values ask for it.

    x_label: what a place on the axis of depth is, where the rows do not show it; unit: for rows that were recorded without one.
    """

    title: str
    caption: str = ""
    group: str = OTHER
    log: bool = False
    x_label: str = ""
    unit: str = ""
