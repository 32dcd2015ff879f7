"""What a decoder is: one frozen dataclass, checked when it is made."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, get_type_hints

from thalweg import connections
from thalweg.config import convert
from thalweg.connections import ConnectionOptions, Site
from thalweg.errors import InputError, UnknownNameError
from thalweg.models.edits import UpdateEdit
from thalweg.models.rotary import RotaryScaling

SublayerKind = Literal["attention", "feed_forward", "parallel", "moe", "prototypes"]


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer whose layers write to the stream by ``connection``.

    vocab_size, width, depth (layers), heads: sizes. kv_heads: key and value heads, shared by groups of query heads (None: as many as
    ``heads``). connection, connection_options: how layers write; ``norm`` and ``norm_eps`` are the defaults of its options. feed_forward and
    ffn_width: kind and inner width (None: 4 width for gelu; 8/3 width, rounded up to a multiple of 8, for swiglu). rope_base: base of the
    rotary angles. max_length: longest sequence, in tokens. tie_embeddings: the unembedding is the embedding. attention_gate: a sigmoid
    gate on the attention output, one per head or per element. attention_weights: softmax, or a transport plan by ``attention_iterations`` of
    Sinkhorn's, causal where the model is (:func:`thalweg.ops.entropic.causal_bridge`). qk_norm: a norm on queries and keys of each head.
    layers: the sublayers of one layer, in order. initial_std, embedding_std: normal initialisation. bias: in all linear maps.
    gradient_checkpointing: recompute each block in the backward pass. logit_softcap: c tanh(logits / c), or None.

    What published models have beside. head_size: width of one head (None: width / heads). attention_scale: factor on the products of queries
    and keys (None: 1 / sqrt of the width of a head). attention_bias: which maps of attention have a bias (None: all or none, by ``bias``).
    positions: rotary angles, or a learned vector for each position, added to the embedding. rotary_scaling: a rule that stretches the rotary
    angles beyond the length that a model was trained on (None: none). windows: for every layer the number of tokens that its attention sees,
    the present one included, 0 for all (empty: all layers see all). window_rope_base: base of the rotary angles in the layers with a window,
    which are then not scaled (None: as in all others). embedding_scale: factor on the embedding before the stream.
    layer_heads: query heads of every layer, as growing and pruning leave them (empty: ``heads`` in all); the group, heads / kv_heads, is the
    same everywhere, so a layer has layer_heads / group key-value heads, and the width of a head stays that of ``heads``.

    Where ``layers`` names ``moe``: experts (routed), active_experts: how many there are, and how many of them a token takes.
    shared_experts: how many more see every token. expert_width: inner width of one expert (None: that of the feed-forward sublayer shared
    out over the active and the shared ones, rounded up to a multiple of 8, so that a token costs as much as without experts).
    dense_layers: so many first layers have a feed-forward sublayer in its place. router: how experts are scored. balancing_rate: step of
    the bias that evens their load out, after each update; 0 leaves it out.

    attention_edit, mlp_edit: what is kept of the updates along and across their reference, in training and in use: a text such as
    ``value:full:0`` or a table (:class:`thalweg.models.edits.UpdateEdit`); None: all of it. The feed-forward sublayer, experts or not, is
    edited in the residual stream only.

    prototypes: size of a dictionary, where ``layers`` names ``prototypes`` in place of feed_forward, or with head_prototypes: a dictionary per
    head between attention and its output map. prototype_gradient: of its losses, through the assignment or with it detached.
    prototype_bypass: share of what the dictionary loses that is handed on beside it. prototype_temperature: where temperatures start.

    Raises: InputError or UnknownNameError with one line for the first value that is not allowed.
    """

    causal: ClassVar[bool] = True  # a token sees itself and those before it

    vocab_size: int
    width: int
    depth: int
    heads: int
    kv_heads: int | None = None
    connection: str = "additive"
    connection_options: dict[str, Any] = field(default_factory=dict, hash=False)
    feed_forward: Literal["swiglu", "gelu", "gelu_tanh", "geglu_tanh"] = "swiglu"
    ffn_width: int | None = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    max_length: int = 2048
    tie_embeddings: bool = True
    attention_gate: Literal["none", "head", "element"] = "none"
    attention_weights: Literal["softmax", "sinkhorn"] = "softmax"
    attention_iterations: int = 5
    qk_norm: bool = False
    layers: tuple[SublayerKind, ...] = ("attention", "feed_forward")
    initial_std: float = 0.02
    embedding_std: float = 0.02
    bias: bool = False
    gradient_checkpointing: bool = False
    logit_softcap: float | None = None
    head_size: int | None = None
    attention_scale: float | None = None
    attention_bias: Literal["none", "qkv", "all"] | None = None
    positions: Literal["rotary", "learned"] = "rotary"
    rotary_scaling: RotaryScaling | None = None
    windows: tuple[int, ...] = ()
    window_rope_base: float | None = None
    embedding_scale: float = 1.0
    experts: int = 8
    active_experts: int = 2
    shared_experts: int = 1
    expert_width: int | None = None
    dense_layers: int = 0
    router: Literal["sigmoid", "softmax"] = "sigmoid"
    balancing_rate: float = 1e-3
    attention_edit: UpdateEdit | str | dict[str, Any] | None = None
    mlp_edit: UpdateEdit | str | dict[str, Any] | None = None
    prototypes: int = 8
    head_prototypes: bool = False
    prototype_gradient: Literal["through", "detached"] = "through"
    prototype_bypass: float = 0.0
    prototype_temperature: float = 1.0
    layer_heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, convert(hints[f.name], getattr(self, f.name), f.name))
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"{name} must be positive and finite, got {value}")
        for name in ("initial_std", "embedding_std", "balancing_rate"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if not self.layers:
            raise InputError(
                "layers must name at least one sublayer: attention, feed_forward, parallel, moe or prototypes"
            )
        if self.head_size is None and self.width % self.heads:
            raise InputError(
                f"width must be a multiple of heads, got width {self.width} and heads {self.heads}; change them or give head_size"
            )
        self._check_positions()
        if self.heads % self.key_value_heads:
            raise InputError(
                f"heads must be a multiple of kv_heads, got heads {self.heads} and kv_heads {self.kv_heads}"
            )
        self._check_layer_heads()
        self._check_experts()
        if not 0 <= self.prototype_bypass <= 1:
            raise InputError(
                f"prototype_bypass must be from 0 (the dictionary alone) to 1 (the identity), got {self.prototype_bypass}"
            )
        self._check_edits()
        object.__setattr__(
            self, "connection", connections.registry.entry(self.connection).name
        )  # an alias is the same connection
        self.stream_options()

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads if self.head_size is None else self.head_size

    @property
    def gated(self) -> bool:
        """Whether the feed-forward sublayer has a gate beside its first map."""
        return self.feed_forward in ("swiglu", "geglu_tanh")

    @property
    def biased_attention(self) -> str:
        """``attention_bias`` with its default filled in."""
        return ("all" if self.bias else "none") if self.attention_bias is None else self.attention_bias

    def window(self, layer: int) -> int:
        """How many tokens the attention of ``layer`` sees; 0: all."""
        return self.windows[layer] if self.windows else 0

    @property
    def key_value_heads(self) -> int:
        """``kv_heads`` with its default filled in."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_group(self) -> int:
        """How many query heads share one key-value head, in every layer."""
        return self.heads // self.key_value_heads

    def heads_of(self, layer: int) -> int:
        """Query heads of ``layer``."""
        return self.layer_heads[layer] if self.layer_heads else self.heads

    def key_value_heads_of(self, layer: int) -> int:
        """Key-value heads of ``layer``."""
        return self.heads_of(layer) // self.head_group

    @property
    def feed_forward_width(self) -> int:
        """``ffn_width`` with its default filled in."""
        if self.ffn_width is not None:
            return self.ffn_width
        return -(-8 * self.width // 24) * 8 if self.gated else 4 * self.width

    @property
    def expert_feed_forward_width(self) -> int:
        """``expert_width`` with its default filled in."""
        if self.expert_width is not None:
            return self.expert_width
        return -(-self.feed_forward_width // (8 * (self.active_experts + self.shared_experts))) * 8

    @property
    def head_parameters(self) -> int:
        """Parameters after the stream, those that are tied left out."""
        return 0 if self.tie_embeddings else self.vocab_size * self.width

    def head_flops(self, length: int) -> float:
        """FLOPs after the stream, per token of a sequence of ``length``."""
        return 2.0 * self.vocab_size * self.width

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where the sublayers stand, in order."""
        return layout(self.depth, self.layers, self.dense_layers)

    def stream_options(self) -> ConnectionOptions:
        """The connection's options, with the model's norm as their default. Raises: UnknownNameError, InputError."""
        return connections.make_options(self.connection, self.stream_values())

    def stream_values(self) -> dict[str, Any]:
        """The same as plain values, as ``connections.create`` takes them."""
        return {"norm": self.norm, "norm_eps": self.norm_eps, **self.connection_options}

    def _check_positions(self) -> None:
        if self.positions == "rotary" and self.head_width % 2:
            raise InputError(
                f"width / heads must be even for rotary positions, got {self.width} / {self.heads} = {self.head_width}; "
                "change width or heads"
                if self.head_size is None
                else f"head_size must be even for rotary positions, got {self.head_size}"
            )
        if self.windows and (len(self.windows) != self.depth or min(self.windows) < 0):
            raise InputError(
                f"windows has one number of tokens for each of the {self.depth} layers, 0 for all tokens, got {self.windows}"
            )
        if self.window_rope_base is not None and not any(self.windows):
            raise InputError("window_rope_base is for layers with a window, and windows names none; leave it out")
        if self.positions == "learned" and (self.rotary_scaling or self.window_rope_base):
            raise InputError(
                "learned positions have no angles: leave rotary_scaling and window_rope_base out, or positions"
            )

    def _check_layer_heads(self) -> None:
        if not self.layer_heads:
            return
        if len(self.layer_heads) != self.depth or min(self.layer_heads) < 1:
            raise InputError(
                f"layer_heads has one number of heads, at least 1, for each of the {self.depth} layers, got {self.layer_heads}"
            )
        if not {"attention", "parallel"} & set(self.layers):
            raise InputError(f"layers {', '.join(self.layers)} have no heads; leave layer_heads out")
        if any(count % self.head_group for count in self.layer_heads):
            raise InputError(
                f"layer_heads must be multiples of {self.head_group}, the query heads that share keys and values "
                f"(heads / kv_heads), got {self.layer_heads}"
            )
        if all(count == self.heads for count in self.layer_heads):  # one spelling for one model
            object.__setattr__(self, "layer_heads", ())

    def _check_experts(self) -> None:
        if self.active_experts > self.experts:
            raise InputError(
                f"active_experts must be at most experts, got {self.active_experts} of {self.experts}; take fewer or make more"
            )
        for name, most in (("shared_experts", None), ("dense_layers", self.depth)):
            value = getattr(self, name)
            if value < 0 or (most is not None and value > most):
                allowed = "at least 0" if most is None else f"0 to depth ({most})"
                raise InputError(f"{name} must be {allowed}, got {value}")
        if "moe" in self.layers and (self.feed_forward != "swiglu" or self.bias):
            raise InputError(
                f"experts are swiglu without bias, got feed_forward {self.feed_forward!r} and bias {self.bias}; leave them or moe out"
            )

    @property
    def edits(self) -> dict[str, UpdateEdit]:
        """The edits that change something, by the name of their field."""
        given = {name: UpdateEdit.of(getattr(self, name), name) for name in EDITS}
        return {name: edit for name, edit in given.items() if edit is not None and not edit.is_one}

    def _check_edits(self) -> None:
        for name, (kinds, words) in EDITS.items():
            edit = UpdateEdit.of(getattr(self, name), name)
            object.__setattr__(self, name, edit)
            if edit is None:
                continue
            try:
                edit.chosen(self.depth)
                for layer in range(self.depth):
                    edit.check_heads(self.heads_of(layer), layer)
            except InputError as error:
                raise InputError(f"{name}: {error}") from None
            if edit.space == "value" and name == "mlp_edit":
                raise InputError("mlp_edit: only attention reads values, got space 'value'; write residual:0")
            if edit.space == "residual" and "parallel" in self.layers:
                raise InputError(
                    f"{name}: a parallel layer writes attention and feed-forward as one update, which cannot be edited apart; "
                    "edit values, or leave parallel out of layers"
                )
            if not set(kinds) & set(self.layers):
                raise InputError(f"{name}: layers {', '.join(self.layers)} have no {words}; leave {name} out")

    def replace(self, **changes: Any) -> Self:
        """A new config with some fields changed. Raises: UnknownNameError, InputError."""
        known = {f.name for f in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise UnknownNameError("key", name, known)
        return dataclasses.replace(self, **changes)


EDITS = {  # field of an edit -> the kinds of sublayers that it is for, and what they are called
    "attention_edit": (("attention", "parallel"), "attention"),
    "mlp_edit": (("feed_forward", "moe"), "feed-forward sublayer"),
}
_ABOVE_ZERO = (
    "norm_eps",
    "rope_base",
    "window_rope_base",
    "logit_softcap",
    "attention_scale",
    "embedding_scale",
    "prototype_temperature",
)
_POSITIVE = (
    *("vocab_size", "width", "depth", "heads", "kv_heads", "head_size", "ffn_width", "max_length"),
    *("experts", "active_experts", "expert_width", "prototypes", "attention_iterations"),
)


def layout(depth: int, layers: Sequence[str], dense_layers: int) -> tuple[Site, ...]:
    """The sites of a decoder: ``layers`` in each of ``depth`` layers, the first ``dense_layers`` with a feed-forward in place of experts."""
    return tuple(
        dataclasses.replace(site, kind="feed_forward") if site.kind == "moe" and site.layer < dense_layers else site
        for site in Site.stack(depth, layers)
    )
