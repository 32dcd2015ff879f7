"""Options of the Manifold-Geometric Transformer: what is written, what the gates see, and where they begin."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

from thalweg.connections.base import ConnectionOptions
from thalweg.errors import InputError
from thalweg.ops.rank_one import check_direction_eps


@dataclass(frozen=True)
class Preset:
    """Where a site begins. All values are ours: the source states none.

    alpha: erase strength (None: 1 / number of sublayers). beta_shift: the constant epsilon. beta_bias, beta_std: start
    of b_beta and standard deviation of W_beta. gate_bias, gate_spread: start of the shift and scale of the LayerNorm
    inside the gate. clamp_erase: whether alpha * beta is held in [0, 2].
    """

    alpha: float | None = None
    beta_shift: float = 0.0
    beta_bias: float = 0.0
    beta_std: float = 0.0
    gate_bias: float = 0.0
    gate_spread: float = 1.0
    clamp_erase: bool = False


PRESETS = {
    "paper": Preset(beta_std=0.02),
    "residual": Preset(alpha=0.0, beta_shift=1.0, gate_bias=3.0),
    "identity": Preset(),
    "stable": Preset(alpha=0.1, beta_bias=math.atanh(0.1), clamp_erase=True),
}


@dataclass(frozen=True)
class MGTOptions(ConnectionOptions):
    """What is written, what the gates see, and where they begin. An option that is None takes the value of the preset.

    form: what is written: ``full`` (gate and delta, element-wise), ``soft_gate`` (x + G V), ``delta`` (element-wise,
    G = 1), ``rank1`` (true rank-1 erase along the gated update), ``delta_rank1`` (the same with G = 1).
    preset: where a site begins: ``paper`` (the literal form), ``residual`` (beta = 1, alpha = 0, gate nearly open: starts near the pre-norm
    block), ``identity`` (beta = 0: every block starts as the identity), ``stable`` (beta = 0.1, alpha = 0.1,
    alpha * beta held in [0, 2]). Only the start of the gate differs between presets of ``soft_gate``.
    gate: what the gate is: ``learned``; controls: ``fixed_random`` (W_gate is drawn and never learned), ``input_independent`` (one
    learned vector), ``update`` (the gate reads the update V instead of the state).
    gate_input: whether the gate and beta read the ``raw`` state or the result of the input norm (``norm``; recommended
    from 48 layers).
    write_only: nothing is erased: alpha = 0, not learned.
    post_norm: the state is normalised after the write, x' = norm(x + beta (G V - alpha x)), as in a post-norm block; it goes
    with ``input_norm`` and ``final_norm`` off. For factorial comparisons with the post-norm baseline.
    gate_open: the gate is divided by its start value, and the scale of its LayerNorm starts at 0: it is exactly 1 at
    start, can move both ways, and ranges over [0, 1 / sigmoid(gate_bias)].
    alpha: start of the erase strength (none: by preset). alpha_kind: ``free``, ``positive`` (a softplus) or ``fixed``.
    alpha_per: whether each sublayer, each layer or the network has one alpha.
    beta_scale: lambda, the factor on the tanh in beta. beta_scale_learned: whether lambda is learned, from beta_scale on.
    beta_shift: epsilon (none: by preset); 1 gives beta the range [0, 2] of delta learning.
    beta_bias: start of b_beta (none: by preset). beta_std: standard deviation of W_beta at start (none: by preset).
    gate_bias: start of the shift of the LayerNorm in the gate (none: by preset). gate_spread: start of the scale of
    that LayerNorm (none: by preset). clamp_erase: whether alpha * beta is held in [0, 2] (none: by preset).
    direction_eps: smooths the erase direction, k = u / sqrt(|u|^2 + direction_eps^2) in the rank-1 forms.

    Raises: InputError for values out of range, options that contradict each other, and options that would do nothing.
    """

    form: Literal["full", "soft_gate", "delta", "rank1", "delta_rank1"] = "full"
    preset: Literal["paper", "residual", "identity", "stable"] = "paper"
    gate: Literal["learned", "fixed_random", "input_independent", "update"] = "learned"
    gate_input: Literal["raw", "norm"] = "raw"
    write_only: bool = False
    post_norm: bool = False
    gate_open: bool = False
    alpha: float | None = None
    alpha_kind: Literal["free", "positive", "fixed"] = "free"
    alpha_per: Literal["sublayer", "layer", "network"] = "sublayer"
    beta_scale: float = 1.0
    beta_scale_learned: bool = False
    beta_shift: float | None = None
    beta_bias: float | None = None
    beta_std: float | None = None
    gate_bias: float | None = None
    gate_spread: float | None = None
    clamp_erase: bool | None = None
    direction_eps: float = 1e-5

    def __post_init__(self) -> None:
        self._refuse_idle_options()
        if self.gate_input == "norm" and not self.input_norm:
            raise InputError("gate_input 'norm' reads the input norm, which input_norm=false switches off; use 'raw'")
        if self.post_norm and (self.input_norm or self.final_norm):
            raise InputError(
                "post_norm already normalises what is read; set input_norm and final_norm to false with it"
            )
        if self.gate_open and self.gate_spread:
            raise InputError(f"gate_open starts the gate constant, got gate_spread {self.gate_spread}; leave one out")
        alpha = self.alpha_start(sublayers=1)
        if self.alpha_kind == "positive" and alpha <= 0:
            raise InputError(f"alpha_kind 'positive' (a softplus) starts above 0, got alpha {alpha}; give alpha > 0")
        if not 0 < self.beta_scale < math.inf:
            raise InputError(f"beta_scale must be positive and finite, got {self.beta_scale}")
        check_direction_eps(self.direction_eps)
        for name, value in asdict(self.start).items():
            if value is not None and not math.isfinite(value):
                raise InputError(f"{name} must be finite, got {value}")
        if self.start.beta_std < 0:
            raise InputError(f"beta_std must not be negative, got {self.start.beta_std}")

    def _refuse_idle_options(self) -> None:
        """An option without effect would make two arms of a study the same under different names."""
        erases = self.delta and not self.write_only
        defaults = {f.name: f.default for f in fields(self)}
        for used, part, names in (
            (self.gated, "gate", ("gate", "gate_open", "gate_bias", "gate_spread")),
            (self.gate != "input_independent", "norm inside its gate", ("gate_spread",)),
            (self.delta, "beta", ("write_only", "beta_scale", "beta_scale_learned")),
            (self.delta, "beta", ("beta_shift", "beta_bias", "beta_std")),
            (erases, "erase term", ("alpha", "alpha_kind", "alpha_per", "clamp_erase")),
            (self.learns_alpha or not erases, "learned alpha", ("alpha_per",)),
            (erases and self.rank_one, "erase direction", ("direction_eps",)),
        ):
            idle = [name for name in names if getattr(self, name) != defaults[name]]
            if idle and not used:
                raise InputError(f"mgt: form {self.form!r} has no {part} here, so leave out {', '.join(idle)}")

    @property
    def gated(self) -> bool:
        """Whether the form has the soft gate."""
        return self.form in ("full", "soft_gate", "rank1")

    @property
    def delta(self) -> bool:
        """Whether the form has beta."""
        return self.form != "soft_gate"

    @property
    def rank_one(self) -> bool:
        """Whether erasing is along one direction; beta is then one number per token."""
        return self.form in ("rank1", "delta_rank1")

    @property
    def learns_alpha(self) -> bool:
        """Whether the erase strength is a parameter."""
        return self.delta and not self.write_only and self.alpha_kind != "fixed"

    @property
    def start(self) -> Preset:
        """The preset with the explicit options over it."""
        given = {f.name: getattr(self, f.name) for f in fields(Preset) if getattr(self, f.name) is not None}
        if self.gate_open:
            given["gate_spread"] = 0.0
        return replace(PRESETS[self.preset], **given)

    @property
    def gate_scale(self) -> float:
        """The factor on the sigmoid of the gate: 1, or the inverse of its start value for ``gate_open``."""
        return 1 + math.exp(-self.start.gate_bias) if self.gate_open else 1.0

    def alpha_start(self, sublayers: int) -> float:
        """The erase strength at start in a network of this many sublayers."""
        if self.write_only or not self.delta:
            return 0.0
        return 1 / sublayers if self.start.alpha is None else self.start.alpha
