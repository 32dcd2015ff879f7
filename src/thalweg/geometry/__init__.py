"""Geometry of the residual stream: pure functions of tensors; knows no model and no connection.

Names are loaded at first use, so that looking something up here does not load torch.
"""

from typing import TYPE_CHECKING

from thalweg._lazy import lazy

if TYPE_CHECKING:
    from thalweg.geometry.alignment import cka_of, hsic, linear_cka
    from thalweg.geometry.constraint import (
        constraint_error,
        logit_spread,
        mixing_distance,
        permutation_index,
    )
    from thalweg.geometry.diagonal import effective_diagonal
    from thalweg.geometry.errors import (
        error_across,
        error_across_share,
        error_along,
        error_cosine,
        error_pooled,
        error_signed,
        error_total,
        sqnr,
    )
    from thalweg.geometry.gates import gate_statistics, sign_transition
    from thalweg.geometry.gradients import (
        common_gradient_norms,
        depth_slope,
        gradient_norms,
        history_gradient_norms,
        state_gradient_norms,
    )
    from thalweg.geometry.jacobian import extreme_singular_values, jacobian_matrix, jacobian_singular_values
    from thalweg.geometry.lengths import (
        layer_drop_cosine,
        parallel_over_perpendicular,
        token_relative_update,
        update_angle,
    )
    from thalweg.geometry.mixing import (
        amax_gain,
        channels,
        composite,
        doubly_stochastic_null,
        horizon,
        inf_norm_gain,
        mean_gain,
        mean_map_gain,
        running_composites,
        sigma_2,
    )
    from thalweg.geometry.mixing_summaries import (
        MixingOptions,
        mixing_measurements,
    )
    from thalweg.geometry.outliers import channel_kurtosis, first_token, outlier_channels
    from thalweg.geometry.similarity import anisotropy, residual_to_rank_one, rms, state_cosine, token_cosine
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
    from thalweg.geometry.streams import (
        difference_share,
        dynamics,
        effective_streams,
        loss_change,
        stream_cosine,
        stream_rank,
        stream_shares,
        token_sd,
    )
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

__all__ = [
    "MixingOptions",
    "StreamOptions",
    "amax_gain",
    "anisotropy",
    "channel_kurtosis",
    "channels",
    "cka_of",
    "common_gradient_norms",
    "composite",
    "constraint_error",
    "depth_slope",
    "difference_share",
    "doubly_stochastic_null",
    "dynamics",
    "effective_diagonal",
    "effective_rank",
    "effective_streams",
    "error_across",
    "error_across_share",
    "error_along",
    "error_cosine",
    "error_pooled",
    "error_signed",
    "error_total",
    "extreme_singular_values",
    "first_token",
    "gate_statistics",
    "gaussian_null",
    "gradient_measurements",
    "gradient_norms",
    "history_gradient_norms",
    "horizon",
    "hsic",
    "inf_norm_gain",
    "jacobian_matrix",
    "jacobian_singular_values",
    "largest_stable_lr",
    "layer_drop_cosine",
    "linear_cka",
    "local_tangent",
    "logit_spread",
    "loss_change",
    "mean_gain",
    "mean_map_gain",
    "mixing_distance",
    "mixing_measurements",
    "off_tangent",
    "off_tangent_null",
    "outlier_channels",
    "parallel_coefficient",
    "parallel_energy",
    "parallel_fraction",
    "parallel_over_perpendicular",
    "participation_ratio",
    "permutation_index",
    "pooled_effective_rank",
    "project",
    "rankme",
    "relative_effective_rank",
    "relative_update",
    "residual_to_rank_one",
    "rms",
    "running_composites",
    "sigma_2",
    "sign_transition",
    "singular_values",
    "spikes",
    "split_update",
    "sqnr",
    "stable_rank",
    "state_cosine",
    "state_gradient_norms",
    "stream_cosine",
    "stream_measurements",
    "stream_rank",
    "stream_shares",
    "token_cosine",
    "token_relative_update",
    "token_sd",
    "update_angle",
    "update_rms",
    "variation",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "alignment": (
            "cka_of",
            "hsic",
            "linear_cka",
        ),
        "diagonal": ("effective_diagonal",),
        "lengths": ("layer_drop_cosine", "parallel_over_perpendicular", "token_relative_update", "update_angle"),
        "outliers": (
            "channel_kurtosis",
            "first_token",
            "outlier_channels",
        ),
        "constraint": (
            "constraint_error",
            "logit_spread",
            "mixing_distance",
            "permutation_index",
        ),
        "errors": (
            "error_across",
            "error_across_share",
            "error_along",
            "error_cosine",
            "error_pooled",
            "error_signed",
            "error_total",
            "sqnr",
        ),
        "gates": ("gate_statistics", "sign_transition"),
        "gradients": (
            "common_gradient_norms",
            "depth_slope",
            "gradient_norms",
            "history_gradient_norms",
            "history_gradient_norms",
            "state_gradient_norms",
        ),
        "jacobian": ("extreme_singular_values", "jacobian_matrix", "jacobian_singular_values"),
        "mixing": (
            "amax_gain",
            "channels",
            "composite",
            "doubly_stochastic_null",
            "horizon",
            "inf_norm_gain",
            "mean_gain",
            "mean_map_gain",
            "running_composites",
            "sigma_2",
        ),
        "mixing_summaries": (
            "MixingOptions",
            "mixing_measurements",
        ),
        "similarity": ("anisotropy", "residual_to_rank_one", "rms", "state_cosine", "token_cosine"),
        "spectrum": (
            "effective_rank",
            "gaussian_null",
            "participation_ratio",
            "pooled_effective_rank",
            "rankme",
            "relative_effective_rank",
            "singular_values",
            "stable_rank",
        ),
        "stability": ("largest_stable_lr", "spikes", "variation"),
        "streams": (
            "difference_share",
            "dynamics",
            "effective_streams",
            "loss_change",
            "stream_cosine",
            "stream_rank",
            "stream_shares",
            "token_sd",
        ),
        "summaries": ("StreamOptions", "gradient_measurements", "stream_measurements"),
        "tangent": ("local_tangent", "project"),
        "updates": (
            "off_tangent",
            "off_tangent_null",
            "parallel_coefficient",
            "parallel_energy",
            "parallel_fraction",
            "relative_update",
            "split_update",
            "update_rms",
        ),
    },
)
