"""What the measures by depth are called in a report, what a reader should know of them, where they are shown."""

from thalweg.reports.shown import DIAGNOSTIC, GATES, HEADLINE, JACOBIANS, STATES, TABLE, UPDATES, Shown
from thalweg.reports.stream_measures import STREAM_MEASURES

_SHOWN: dict[str, Shown] = {
    "effective_rank": Shown(
        "Normalised effective rank",
        "Entropy of the singular values of a sequence's states (MGT, Eq. 8), 1: all directions used alike.",
        HEADLINE,
    ),
    "effective_rank.centred": Shown(
        "Effective rank, centred", "The mean over tokens taken out first: what differs between tokens.", HEADLINE
    ),
    "token_cosine": Shown("Mean cosine between tokens", "1: all tokens of a sequence point the same way.", HEADLINE),
    "residual_to_rank_one": Shown(
        "Distance from rank one",
        "Relative distance from the nearest matrix of equal rows (Dong et al. 2021), 0: collapsed.",
        HEADLINE,
    ),
    "rms": Shown(
        "Size of the stream", "Root mean square of the state that enters each layer, over held-out sequences.", HEADLINE, True
    ),
    "relative_update.step": Shown(
        "Relative size of the steps", "Change of the state over its size, at each sublayer.", HEADLINE, True
    ),
    "effective_rank.without_first": Shown(
        "Effective rank without the first token", "A sink at the first token lowers the plain one.", STATES
    ),
    "effective_rank.relative": Shown(
        "Effective rank against the first state", "1: as high as where the stream begins.", STATES
    ),
    "stable_rank": Shown("Stable rank", "Sum of squared singular values over the largest.", STATES),
    "participation_ratio": Shown("Participation ratio", "Directions that hold the energy of the states.", STATES),
    "entered_cosine": Shown("Cosine with the first state", "How much of the embedding's direction is left.", STATES),
    "state_cosine": Shown("Cosine between neighbouring states", "1: the sublayer turns nothing.", STATES),
    "update_rms": Shown("Size of the updates", "Root mean square.", UPDATES, True),
    "relative_update": Shown("Relative size of the updates", "Over the size of the state.", UPDATES, True),
    "parallel_coefficient": Shown(
        "Update along the state", "Coefficient on the state, below 0: the update shrinks the state.", UPDATES
    ),
    "parallel_energy": Shown("Share of the update along the state", "Of its squared norm.", UPDATES),
    "off_tangent": Shown(
        "Share of the update off the tangent space", "Tangent space estimated from the states of past tokens.", UPDATES
    ),
    "gate.mean": Shown("Gate on the update, mean", "0: closed, 1: open.", GATES),
    "gate.sd": Shown("Gate on the update, spread", "Standard deviation over tokens and channels.", GATES),
    "gate.closed": Shown("Gates that are closed", "Share near 0.", GATES),
    "gate.open": Shown("Gates that are open", "Share near 1.", GATES),
    "beta.mean": Shown("Write strength, mean", "1 in an ordinary residual stream.", GATES),
    "beta.sd": Shown("Write strength, spread", "Standard deviation over tokens and channels.", GATES),
    "beta.below_zero": Shown("Write strengths below zero", "Share that writes the opposite of the update.", GATES),
    "erase.mean": Shown("Erase factor, mean", "The old state is multiplied by 1 minus this.", GATES),
    "erase.sd": Shown("Erase factor, spread", "Standard deviation over tokens and channels.", GATES),
    "erase.log_abs": Shown("Erase factor, mean ln|.|", "Over the entries that are not 0.", GATES),
    "erase.identity": Shown("Erase factors near 0", "Share: the old state is kept.", GATES),
    "erase.partial": Shown("Erase factors between 0 and 1", "Share: the old state is shrunk.", GATES),
    "erase.erase": Shown("Erase factors near 1", "Share: the old state is erased.", GATES),
    "erase.flip": Shown("Erase factors between 1 and 2", "Share: shrunk, sign turned.", GATES),
    "erase.reflect": Shown("Erase factors near 2", "Share: the old state is reflected.", GATES),
    "erase.amplify": Shown("Erase factors below 0 or above 2", "Share: the old state is enlarged.", GATES),
    "gate": Shown("Gate on the update", group=GATES),
    "beta": Shown("Write strength", group=GATES),
    "erase": Shown("Erase factor", group=GATES),
    "jacobian.skip": Shown(
        "Skip path", "Jacobian of a site with update, gates and past tokens frozen: singular values.", JACOBIANS, True
    ),
    "jacobian.block": Shown("Whole layer", "Jacobian of the layer in its last token: singular values.", JACOBIANS, True),
    "jacobian": Shown("Jacobian", "Singular values.", JACOBIANS, True),
    "gradient_norm": Shown(
        "Gradient in the state", "Norm of the gradient of the loss in the state that enters.", DIAGNOSTIC, True
    ),
    "gradient_norm.history": Shown(
        "Gradient in kept states",
        "Norm of the gradient of the loss in what the state holds of earlier places, mean over them.",
        DIAGNOSTIC,
        True,
    ),
    "weight_gradient_norm": Shown(
        "Gradient of the sublayers' weights", "Euclidean norm by layer, before clipping.", DIAGNOSTIC, True
    ),
    "connection_distance": Shown(
        "Distance of the connection from its start", "Parameters of a layer's sites, 0: it never moved.", DIAGNOSTIC, True
    ),
    "retained_scale": Shown(
        "Retained scale of an edit", "What is kept of the part along (or across) the reference; 1: all of it.", DIAGNOSTIC, True
    ),
    "stream_rms": Shown(
        "Size of the stream in training",
        "Root mean square of the state that leaves each layer, on one held-out sequence at an evaluation; the same state stands one place "
        "further right in \"Size of the stream\", which shows what enters.",
        DIAGNOSTIC,
        True,
        "layer that the state leaves, from 0",
        "stream units",
    ),
    **STREAM_MEASURES,
}  # fmt: skip
_VARIANTS = {
    "raw": "as the sublayer returned them",
    "gated": "after the gate",
    "step": "as the state changed",
    "largest": "largest singular value",
    "smallest": "smallest singular value",
    "mean_square": "mean squared singular value",
    "near_one": "share of singular values near 1",
    "common": "common to all streams",
}
_ORDER = {name: place for place, name in enumerate(_SHOWN)}


def shown(measure: str) -> Shown:
    """How ``measure`` is shown; one that is not known here keeps its own name, under "other measures"."""
    if measure in _SHOWN:
        return _SHOWN[measure]
    family, _, variant = measure.rpartition(".")
    while family and family not in _SHOWN:
        family = family.rpartition(".")[0]
    if not family:
        return Shown(measure.replace("_", " ").replace(".", ": "))
    known, rest = _SHOWN[family], measure.removeprefix(f"{family}.")
    title = f"{known.title}, {_VARIANTS.get(variant, rest.replace('_', ' '))}"
    group = UPDATES if known.group == HEADLINE else known.group
    return Shown(
        title, known.caption, STATES if family in STATE_FAMILIES else group, known.log and variant != "near_one"
    )


STATE_FAMILIES = ("effective_rank", "token_cosine", "residual_to_rank_one", "rms")


def place(measure: str) -> tuple[int, str]:
    """Where a measure comes in reading order: as listed here, then by name."""
    family = measure
    while family and family not in _ORDER:
        family = family.rpartition(".")[0]
    return _ORDER.get(family, len(_ORDER)), measure


def plain(measure: str) -> str:
    """The name of a measure in words: ``beta.sharpness`` -> ``beta sharpness``."""
    return measure.replace("_", " ").replace(".", " ")


def in_own_table(measure: str) -> bool:
    """Whether a measure of the whole network has a table of its own, beside that of all others."""
    return measure.startswith("mixer_replaced.") or shown(measure).group == TABLE
