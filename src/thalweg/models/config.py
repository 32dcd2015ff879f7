"""What a decoder is: one frozen dataclass, checked when it is made."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from thalweg import connections
from thalweg.config import convert
from thalweg.connections import ConnectionOptions, Site
from thalweg.errors import InputError, UnknownNameError

SublayerKind = Literal["attention", "feed_forward", "parallel"]


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer whose layers write to the stream by ``connection``.

    vocab_size, width, depth (layers), heads: sizes. kv_heads: key and value heads, shared by groups of query heads (None: as many as
    ``heads``). connection, connection_options: how layers write; ``norm`` and ``norm_eps`` are the defaults of its options. feed_forward and
    ffn_width: kind and inner width (None: 4 width for gelu; 8/3 width, rounded up to a multiple of 8, for swiglu). rope_base: base of the
    rotary angles. max_length: longest sequence, in tokens. tie_embeddings: the unembedding is the embedding. attention_gate: a sigmoid
    gate on the attention output, one per head or per element. qk_norm: a norm on queries and keys of each head. layers: the sublayers of
    one layer, in order. initial_std, embedding_std: normal initialisation. bias: in all linear maps. gradient_checkpointing: recompute
    each block in the backward pass. logit_softcap: c tanh(logits / c), or None.

    Raises: InputError or UnknownNameError with one line for the first value that is not allowed.
    """

    vocab_size: int
    width: int
    depth: int
    heads: int
    kv_heads: int | None = None
    connection: str = "additive"
    connection_options: dict[str, Any] = field(default_factory=dict, hash=False)
    feed_forward: Literal["swiglu", "gelu"] = "swiglu"
    ffn_width: int | None = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    max_length: int = 2048
    tie_embeddings: bool = True
    attention_gate: Literal["none", "head", "element"] = "none"
    qk_norm: bool = False
    layers: tuple[SublayerKind, ...] = ("attention", "feed_forward")
    initial_std: float = 0.02
    embedding_std: float = 0.02
    bias: bool = False
    gradient_checkpointing: bool = False
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, convert(hints[f.name], getattr(self, f.name), f.name))
        for name in ("vocab_size", "width", "depth", "heads", "kv_heads", "ffn_width", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        for name in ("norm_eps", "rope_base", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"{name} must be positive and finite, got {value}")
        for name in ("initial_std", "embedding_std"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if not self.layers:
            raise InputError("layers must name at least one sublayer: attention, feed_forward or parallel")
        if self.width % self.heads:
            raise InputError(f"width must be a multiple of heads, got width {self.width} and heads {self.heads}")
        if self.head_width % 2:
            raise InputError(
                f"width / heads must be even for rotary positions, got {self.width} / {self.heads} = {self.head_width}; change width or heads"
            )
        if self.heads % self.key_value_heads:
            raise InputError(
                f"heads must be a multiple of kv_heads, got heads {self.heads} and kv_heads {self.kv_heads}"
            )
        object.__setattr__(
            self, "connection", connections.registry.entry(self.connection).name
        )  # an alias is the same connection
        self.stream_options()

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """``kv_heads`` with its default filled in."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def feed_forward_width(self) -> int:
        """``ffn_width`` with its default filled in."""
        if self.ffn_width is not None:
            return self.ffn_width
        return 4 * self.width if self.feed_forward == "gelu" else -(-8 * self.width // 24) * 8

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where the sublayers stand, in order."""
        return Site.stack(self.depth, self.layers)

    def stream_options(self) -> ConnectionOptions:
        """The connection's options, with the model's norm as their default. Raises: UnknownNameError, InputError."""
        return connections.make_options(self.connection, self.stream_values())

    def stream_values(self) -> dict[str, Any]:
        """The same as plain values, as ``connections.create`` takes them."""
        return {"norm": self.norm, "norm_eps": self.norm_eps, **self.connection_options}

    def replace(self, **changes: Any) -> "DecoderConfig":
        """A new config with some fields changed. Raises: UnknownNameError, InputError."""
        known = {f.name for f in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise UnknownNameError("key", name, known)
        return dataclasses.replace(self, **changes)
