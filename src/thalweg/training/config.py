"""What a training run is asked: one flat table, from TOML or flags, with one dial."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from thalweg import config
from thalweg.errors import InputError, ThalwegError, UnknownNameError
from thalweg.training import initial

if TYPE_CHECKING:  # importing models loads torch; reading a configuration need not
    from thalweg.data import Task
    from thalweg.models.config import DecoderConfig

ASPECT = 32  # width per layer of depth
HEAD_SIZE = 64
DEFAULT_STEPS = 1000
MOST_THREADS = 1024  # far more than helps; beyond it the system may fail to start them

# Fields that may change between the start of a run and its resumption; those that can change its bits are noted in the record.
FREE_AT_RESUME = ("threads", "device", "compile", "gradient_checkpointing", "parallel", "save_every")


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    The dial: ``depth``, in layers. Where they are not given, width = 32 * depth rounded up to a multiple of 64, and there are as many
    heads as sizes of 64 (32 below a width of 256) fit into the width; everything else keeps its default. A comparison over depth at a
    fixed width states ``width``.

    Each field is explained once, here; ``thalweg train --help`` prints it.

    The model.
    connection: how layers write to the stream, by name.
    connection_options: table of the connection's own options.
    depth: layers, the dial.
    width: size of the stream (none: 32 a layer, rounded up to a multiple of 64).
    heads: attention heads (none: of 64 each, of 32 below a width of 256).
    kv_heads: key and value heads, shared by groups of query heads (none: as many as heads).
    feed_forward: kind of the feed-forward sublayer.
    ffn_width: inner width of the feed-forward sublayer (none: by its kind).
    norm: kind of the norms.
    layers: sublayers of one layer, in order.
    attention_edit: what is kept of the updates of attention along and across their reference, such as ``value:full:0`` (none: all of it).
    mlp_edit: the same of the feed-forward sublayer, such as ``residual:0`` (none: all of it).
    model: table of further fields of the decoder or encoder, such as ``qk_norm = true``.
    init_from: folder of a model, as ``thalweg convert`` writes it, whose weights the run begins with (none: random weights).
    growth: table of when heads are added and removed, for ``thalweg grow`` (none: the structure stays as it is).

    The data.
    data: name of the task, with its parameters.
    tokenizer: for a text: bpe, byte or the path of a tokenizer.json (none: the task's own).
    vocab_size: entries of a tokenizer that is trained on the text (none: the task's own).
    objective: what is learned: the next token by a decoder, masked tokens or a classification by an encoder (none: the task's own).
    sequence_length: tokens of one sequence.
    batch_size: sequences of one update, over all ranks and micro-batches.
    accumulation: micro-batches of one update.

    The length.
    steps: updates of the whole run (none, and no tokens: 1000).
    tokens: length of the run in tokens, in place of steps; rounded up to whole updates.

    The optimiser.
    optimizer: muon of the matrices of the blocks, the rest then stays with adamw; adamw or sgd of all.
    momentum: of sgd; 0 for none.
    lr: learning rate at its peak.
    min_lr_ratio: share of the peak that the schedule falls to.
    warmup: linear rise to the peak: below 1 a fraction of the run, from 1 on steps.
    schedule: how the learning rate falls after the warm-up.
    betas: decay of the running means of AdamW.
    eps: added to AdamW's denominator.
    weight_decay: decay of matrices; vectors have none.
    clip: largest global gradient norm; 0 clips nothing.
    dictionary_weight: weight of the loss of dictionaries of prototypes beside that of the task; 0 leaves it out.

    The record.
    log_every: steps between two lines of the log.
    eval_every: steps between two evaluations on held-out data.
    eval_batches: held-out batches of one evaluation.
    save_every: steps between two checkpoints (none: at each evaluation).
    measure_every: steps between two measurements of the geometry (none: at the start and at the end).
    geometry: whether the geometry of the stream is measured.
    trajectory: steps between two records of the weights, as few random projections of every block, for ``thalweg probe`` (none: no records).

    Divergence is a result and not an error: the run ends with status ``diverged``, also when the loss or the gradient norm is not finite.

    diverge_factor: multiple of the first loss beyond which a loss counts against the run.
    diverge_patience: so many updates in a row beyond diverge_factor, and the run has diverged.
    diverge_rms: the run has diverged when the root mean square of a state exceeds this at an evaluation.

    The machine.
    seed: decides the first weights and the order of the data.
    precision: arithmetic inside the model; weights stay in float32.
    device: what to run on; auto takes a GPU where there is one.
    threads: threads of the processor (none: as torch chooses).
    compile: whether torch.compile makes the model faster, after a slow start.
    gradient_checkpointing: whether blocks are computed again in the backward pass, to save memory.
    parallel: how ranks share the work under torchrun.

    Raises: InputError for values that are not allowed.
    """

    # model
    connection: str = "additive"
    connection_options: dict[str, Any] = field(default_factory=dict)
    depth: int = 4
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    feed_forward: Literal["swiglu", "gelu", "gelu_tanh", "geglu_tanh"] = "swiglu"
    ffn_width: int | None = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    layers: tuple[str, ...] = ("attention", "feed_forward")
    attention_edit: str | dict[str, Any] | None = None
    mlp_edit: str | dict[str, Any] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    init_from: str | None = None
    growth: dict[str, Any] | None = None
    # data
    data: str = "austen"
    tokenizer: str | None = None
    vocab_size: int | None = None
    objective: Literal["next_token", "masked", "classification"] | None = None
    sequence_length: int = 128
    batch_size: int = 16
    accumulation: int = 1
    # length
    steps: int | None = None
    tokens: int | None = None
    # optimiser
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    momentum: float = 0.0
    lr: float = 2e-3
    min_lr_ratio: float = 0.1
    warmup: float = 0.05
    schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    dictionary_weight: float = 0.0
    # record
    log_every: int = 1
    eval_every: int = 100
    eval_batches: int = 8
    save_every: int | None = None
    measure_every: int | None = None
    geometry: bool = True
    trajectory: int | None = None
    # divergence
    diverge_factor: float = 2.0
    diverge_patience: int = 20
    diverge_rms: float = 1e4
    # machine
    seed: int = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    compile: bool = False
    gradient_checkpointing: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(self, name) <= high:
                raise InputError(f"{name} must lie between {low:g} and {high:g}, got {getattr(self, name)}")
        if math.isinf(self.warmup):
            raise InputError("warmup must be finite: a fraction of the run below 1, or steps; got inf")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise InputError(f"threads must be at most {MOST_THREADS}, got {self.threads}; give the number of cores")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas must lie in [0, 1), got {self.betas}")
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum must lie in [0, 1), got {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise InputError(f"momentum belongs to sgd, got optimizer {self.optimizer}; leave it out (adamw has betas)")
        if not 0 < self.lr < math.inf:
            raise InputError(f"lr must be positive and finite, got {self.lr}")
        if self.steps is not None and self.tokens is not None:
            raise InputError(f"give steps or tokens, not both (got {self.steps} and {self.tokens})")
        if self.batch_size % self.accumulation:
            raise InputError(
                f"batch_size ({self.batch_size}) must be a multiple of accumulation ({self.accumulation}), so that micro-batches are equal"
            )
        if self.warmup_steps and self.warmup_steps >= self.total_steps:
            raise InputError(f"warmup ({self.warmup:g}) must end before the run does ({self.total_steps} steps)")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update, over all ranks."""
        return self.batch_size * self.sequence_length

    @property
    def total_steps(self) -> int:
        """Updates of the whole run."""
        if self.tokens is not None:
            return math.ceil(self.tokens / self.tokens_per_step)
        return DEFAULT_STEPS if self.steps is None else self.steps

    @property
    def warmup_steps(self) -> int:
        """Updates of the warm-up, rounded down."""
        return int(self.warmup * self.total_steps if self.warmup < 1 else self.warmup)

    @property
    def resolved_width(self) -> int:
        """``width``, or what the dial gives."""
        return self.width if self.width is not None else max(64, math.ceil(ASPECT * self.depth / 64) * 64)

    @property
    def resolved_heads(self) -> int:
        """``heads``, or what the dial gives: the largest head size up to 64 (32 below a width of 256) that divides the width."""
        width = self.resolved_width
        return (
            self.heads
            if self.heads is not None
            else width // math.gcd(width, HEAD_SIZE if width >= 256 else HEAD_SIZE // 2)
        )

    def decoder(self, vocab_size: int, longest: int = 0) -> "DecoderConfig":
        """The configuration of the model for a task with ``vocab_size`` tokens and sequences of up to ``longest``.

        Raises: InputError, UnknownNameError.
        """
        from thalweg.models.config import DecoderConfig

        return self._model(DecoderConfig, vocab_size, longest)

    def network(self, task: "Task", longest: int = 0) -> "DecoderConfig":
        """The configuration of the model that ``task`` asks for: a decoder, or an encoder with its objective. Raises: as :meth:`decoder`."""
        if task.objective == "next_token":
            return self.decoder(task.vocab_size, longest)
        from thalweg.models.encoder_config import EncoderConfig

        asked = {"objective": task.objective, "classes": task.classes}
        found = self._model(EncoderConfig, task.vocab_size, longest, **asked)
        if self.init_from is not None:
            initial.check_task(self.init_from, task)
        return found

    def _model(self, cls: type["DecoderConfig"], vocab_size: int, longest: int, **asked: Any) -> "DecoderConfig":
        values = {
            **asked,
            "connection": self.connection,
            "connection_options": self.connection_options,
            "depth": self.depth,
            "width": self.resolved_width,
            "heads": self.resolved_heads,
            "kv_heads": self.kv_heads,
            "feed_forward": self.feed_forward,
            "ffn_width": self.ffn_width,
            "norm": self.norm,
            "layers": self.layers,
            "attention_edit": self.attention_edit,
            "mlp_edit": self.mlp_edit,
            "gradient_checkpointing": self.gradient_checkpointing,
            "vocab_size": vocab_size,
        }
        for key in self.model:
            if key in values:
                raise InputError(
                    f"model.{key} is set twice; write {key} at the top level only"
                    if key not in (*asked, "vocab_size")
                    else f"model.{key} follows from the data; set {'data' if key == 'classes' else key} at the top level"
                )
        allowed = [f.name for f in dataclasses.fields(cls) if f.name not in values]
        for key in self.model:
            if key not in allowed:
                raise UnknownNameError("key", f"model.{key}", [f"model.{name}" for name in allowed])
        if "max_length" not in self.model:
            values["max_length"] = max(_default(cls, "max_length"), self.sequence_length, longest)
        found = config.build(cls, {**values, **self.model}, where="model")
        if self.init_from is None:
            return self._with_dictionaries(found)
        return self._with_dictionaries(initial.fitted(found, self.init_from, vocab_size))

    def _with_dictionaries(self, model: "DecoderConfig") -> "DecoderConfig":
        """``model``. Raises: InputError where ``dictionary_weight`` weighs a loss that it has not."""
        if self.dictionary_weight and not (model.head_prototypes or "prototypes" in model.layers):
            raise InputError(
                f"dictionary_weight is {self.dictionary_weight:g}, but this model has no prototypes; set model.head_prototypes, "
                "name prototypes in layers, or leave dictionary_weight out"
            )
        return model


_POSITIVE = (
    *(
        "depth",
        "width",
        "heads",
        "kv_heads",
        "ffn_width",
        "vocab_size",
        "sequence_length",
        "batch_size",
        "accumulation",
        "steps",
        "tokens",
    ),
    *(
        "log_every",
        "eval_every",
        "eval_batches",
        "save_every",
        "measure_every",
        "trajectory",
        "diverge_patience",
        "threads",
    ),
)
_RANGES = {
    "min_lr_ratio": (0, 1),
    "warmup": (0, math.inf),
    "eps": (0, 1),
    "weight_decay": (0, math.inf),
    "clip": (0, math.inf),
    "dictionary_weight": (0, math.inf),
    "diverge_factor": (1, math.inf),
    "diverge_rms": (0, math.inf),
    "seed": (0, 2**31 - 1),
}


def _default(cls: type, name: str) -> Any:
    return next(f.default for f in dataclasses.fields(cls) if f.name == name)


def from_table(table: Mapping[str, Any]) -> TrainConfig:
    """A configuration from plain values. Raises: InputError, UnknownNameError naming the key."""
    return config.build(TrainConfig, table)


def changes(saved: Mapping[str, Any], now: TrainConfig) -> list[str]:
    """``key saved -> now`` for every field that must not change when a run is resumed."""
    plain = config.to_plain(now)
    keys = sorted((saved.keys() | plain.keys()) - set(FREE_AT_RESUME))
    return [
        f"{key} {saved.get(key, 'unset')} -> {plain.get(key, 'unset')}"
        for key in keys
        if saved.get(key) != plain.get(key)
    ]


def settled(table: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration with every default and the sizes that the dial gives, so that what is left out and what is said can be the same;
    as it is, where it cannot be read."""
    try:
        made = from_table(table)
    except ThalwegError:
        return dict(table)
    sizes = {"width": made.resolved_width, "heads": made.resolved_heads, "kv_heads": made.resolved_heads}
    return {**sizes, **config.to_plain(made)}
