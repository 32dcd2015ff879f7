"""Geometry of the residual stream: pure functions of tensors; knows no model and no connection.

Names are loaded at first use, so that looking something up here does not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thalweg.geometry.gates import gate_statistics, sign_transition
    from thalweg.geometry.gradients import depth_slope, gradient_norms, state_gradient_norms
    from thalweg.geometry.jacobian import extreme_singular_values, jacobian_matrix, jacobian_singular_values
    from thalweg.geometry.mixing import amax_gain, composite, mean_gain
    from thalweg.geometry.similarity import residual_to_rank_one, rms, state_cosine, token_cosine
    from thalweg.geometry.spectrum import (
        effective_rank,
        gaussian_null,
        participation_ratio,
        pooled_effective_rank,
        rankme,
        relative_effective_rank,
        singular_values,
        stable_rank,
    )
    from thalweg.geometry.stability import largest_stable_lr, spikes, variation
    from thalweg.geometry.summaries import StreamOptions, gradient_measurements, stream_measurements
    from thalweg.geometry.tangent import local_tangent, project
    from thalweg.geometry.updates import (
        off_tangent,
        off_tangent_null,
        parallel_coefficient,
        parallel_energy,
        parallel_fraction,
        relative_update,
        split_update,
        update_rms,
    )

_HOMES = {
    "gates": ("gate_statistics", "sign_transition"),
    "gradients": ("depth_slope", "gradient_norms", "state_gradient_norms"),
    "jacobian": ("extreme_singular_values", "jacobian_matrix", "jacobian_singular_values"),
    "mixing": ("amax_gain", "composite", "mean_gain"),
    "similarity": ("residual_to_rank_one", "rms", "state_cosine", "token_cosine"),
    "spectrum": (
        *("effective_rank", "gaussian_null", "participation_ratio", "pooled_effective_rank"),
        *("rankme", "relative_effective_rank", "singular_values", "stable_rank"),
    ),
    "stability": ("largest_stable_lr", "spikes", "variation"),
    "summaries": ("StreamOptions", "gradient_measurements", "stream_measurements"),
    "tangent": ("local_tangent", "project"),
    "updates": (
        *("off_tangent", "off_tangent_null", "parallel_coefficient", "parallel_energy"),
        *("parallel_fraction", "relative_update", "split_update", "update_rms"),
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "StreamOptions",
    "amax_gain",
    "composite",
    "depth_slope",
    "effective_rank",
    "extreme_singular_values",
    "gate_statistics",
    "gaussian_null",
    "gradient_measurements",
    "gradient_norms",
    "jacobian_matrix",
    "jacobian_singular_values",
    "largest_stable_lr",
    "local_tangent",
    "mean_gain",
    "off_tangent",
    "off_tangent_null",
    "parallel_coefficient",
    "parallel_energy",
    "parallel_fraction",
    "participation_ratio",
    "pooled_effective_rank",
    "project",
    "rankme",
    "relative_effective_rank",
    "relative_update",
    "residual_to_rank_one",
    "rms",
    "sign_transition",
    "singular_values",
    "spikes",
    "split_update",
    "stable_rank",
    "state_cosine",
    "state_gradient_norms",
    "stream_measurements",
    "token_cosine",
    "update_rms",
    "variation",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
