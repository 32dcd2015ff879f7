"""How the measures of streams side by side are called in a report, and where they are shown."""

from thalweg.reports.shown import MIXING, STREAMS, TABLE, Shown

_GAINS = {
    "amax_gain": ("Amax gain", "Largest absolute sum of a row (forward) or column (backward), mean over tokens (mHC)."),
    "inf_norm_gain": ("Norm gain", "Largest sum of absolute values of a row (forward) or column (backward): no sign cancels."),
    "mean_map_gain": ("Gain of the mean map", "Amax gain of the mean of the matrices over the tokens of a sequence."),
}  # fmt: skip
_SCOPES = {
    "": ("of each site", ""),
    ".from_start": ("from the start to a state", "Of the product of all mixing matrices before the state."),
    ".to_end": ("from a state to the end", "Of the product of all mixing matrices after the state."),
    ".window": ("of a window of layers", ""),
}
_OPEN = {
    "amax_gain.from_start.forward",
    "amax_gain.to_end.backward",
    "sigma_2",
    "permutation_index",
    "channel.difference.from_start",
}


def _group(name: str, scope: str) -> str:
    return TABLE if scope == ".window" else STREAMS if name in _OPEN else MIXING


def _scoped(name: str, title: str, caption: str, scopes=tuple(_SCOPES)) -> dict[str, Shown]:
    found = {}
    for scope in scopes:
        words, more = _SCOPES[scope]
        text = " ".join(filter(None, (caption, more)))
        found[f"{name}{scope}"] = Shown(f"{title}, {words}", text, _group(f"{name}{scope}", scope))
    return found


def _gains() -> dict[str, Shown]:
    found = {}
    for kind, (title, caption) in _GAINS.items():
        for scope, (words, more) in _SCOPES.items():
            for side in ("forward", "backward"):
                name, text = f"{kind}{scope}.{side}", " ".join(filter(None, (caption, more)))
                found[name] = Shown(f"{title}, {side}, {words}", text, _group(name, scope), True)
    return found


STREAM_MEASURES: dict[str, Shown] = {
    **_gains(),
    **_scoped("sigma_2", "Second singular value of the mixing", "1: differences between streams are kept, 0: averaged away."),
    **_scoped(
        "permutation_index",
        "Uniform or permutation",
        "0: all streams averaged, 1: a permutation or the identity (reconstructed from mHC, Table 6).",
    ),
    **_scoped("channel.difference", "Difference between streams, kept", "The most that a difference is multiplied by."),
    "difference_share": Shown(
        "Differences between the streams", "Norm of what differs between the streams of a token over that of all, 0: copies.", STREAMS
    ),
    "mixer_replaced.identity": Shown(
        "Mixing replaced by the identity", "Change in held-out loss, one site at a time, mean over the sublayers of a layer.", STREAMS
    ),
    "mixer_replaced.token_mean": Shown(
        "Mixing replaced by its token mean", "Change in held-out loss, one site at a time, mean over the sublayers of a layer.", STREAMS
    ),
    "stream_rank": Shown("Effective rank of the streams of a token", "Normalised; 1/n: copies.", MIXING),
    "stream_cosine": Shown("Cosine between streams", "Mean over pairs, 1: all streams of a token point the same way.", MIXING),
    "effective_streams.read": Shown("Streams that are read", "exp of the entropy of the shares.", MIXING),
    "effective_streams.write": Shown("Streams that are written to", "exp of the entropy of the shares.", MIXING),
    "horizon": Shown("Horizon", "1/(1 - second singular value): sites over which differences are kept.", MIXING, True),
    **_scoped("sigma_1", "Largest singular value of the mixing", "1 for doubly stochastic matrices."),
    **_scoped("channel.mean", "Mean of the streams, factor", "1 for doubly stochastic matrices."),
    "channel.mean_to_difference": Shown("Mean into differences", "0 where rows sum to one.", MIXING),
    "channel.difference_to_mean": Shown("Differences into the mean", "0 where columns sum to one.", MIXING),
    "distance.identity": Shown("Distance from the identity", "Frobenius norm.", MIXING),
    "distance.uniform": Shown("Distance from the uniform matrix", "Frobenius norm.", MIXING),
    "distance.permutation": Shown("Distance from the nearest permutation", "Frobenius norm.", MIXING),
    "constraint_error.rows": Shown("Rows that do not sum to one", "Largest |sum - 1| over rows and tokens.", MIXING, True),
    "constraint_error.columns": Shown(
        "Columns that do not sum to one", "Largest |sum - 1| over columns and tokens; grows with the spread of the logits.", MIXING, True
    ),
    "constraint_error.negative": Shown("Negative entries", "Size of the most negative one.", MIXING, True),
    "mix.logit_spread": Shown("Spread of the logits of the mixing", "Standard deviation over the logits of a matrix.", MIXING),
    "read.mean": Shown("Read weights, mean", "", MIXING),
    "read.sd": Shown("Read weights, spread", "Over tokens and streams.", MIXING),
    "write.mean": Shown("Write weights, mean", "", MIXING),
    "write.sd": Shown("Write weights, spread", "Over tokens and streams.", MIXING),
    **{
        f"{family}.{name}": Shown(f"{title} coefficients: {words}", caption, MIXING, True)
        for family, title in (("read", "Read"), ("write", "Write"), ("mix", "Mixing"))
        for name, words, caption in (
            ("token_sd", "standard deviation over tokens", "0: the same at every token."),
            ("dynamic", "how dynamic", "Standard deviation over tokens over the size of the means, 0: constants."),
        )
    },
    "stream_share.read": Shown("Share of each stream in what is read", "", TABLE),
    "stream_share.write": Shown("Share of each stream in what is written", "", TABLE),
    "coefficient_distance": Shown("Distance of coefficients from their start", "", TABLE),
    "coefficient_distance.relative": Shown("Distance of coefficients over the size of the start", "", TABLE),
    "coefficient_gradient_norm": Shown("Gradient into coefficients", "", TABLE),
}  # fmt: skip
