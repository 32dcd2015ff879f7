"""How large a decoder is, known before it is built: parameters and FLOPs by part, activation and optimiser bytes."""

import functools
import json
from dataclasses import dataclass

import torch

from thalweg import connections
from thalweg.config import to_plain
from thalweg.connections import cost
from thalweg.models.activations import Activations, kept_activations
from thalweg.models.config import EDITS, DecoderConfig, layout
from thalweg.models.edits import UpdateEdit

Counts = dict[str, float]


@dataclass(frozen=True)
class Size:
    """The size of a decoder on sequences of ``length`` tokens.

    parameters: by part, each counted once (``unembedding`` is 0 where it is tied). flops: of one forward pass, per token, by part; a
    multiply-add is two. Sublayers and unembedding count their matrix products; ``attention_scores`` counts whole rows, as
    ``torch.utils.flop_counter`` does (a causal kernel does half); ``stream`` counts its element-wise work too, so that connections differ
    by all they cost; so does ``edits``, where updates are edited. activation_bytes: what autograd keeps for one sequence, logits and loss
    included. With experts, ``routed_experts`` counts all of them in parameters, and in FLOPs those that a token takes.
    """

    config: DecoderConfig
    length: int
    dtype: str
    parameters: dict[str, int]
    flops: Counts
    activations: Activations

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def non_embedding_parameters(self) -> int:
        return self.total_parameters - self.parameters["embedding"] - self.parameters["unembedding"]

    @property
    def active_parameters(self) -> int:
        """Those that one token uses: all but the routed experts that it is not sent to."""
        routed, config = self.parameters.get("routed_experts", 0), self.config
        return self.total_parameters - routed // config.experts * (config.experts - config.active_experts)

    @property
    def forward_flops(self) -> float:
        """Per token."""
        return sum(self.flops.values())

    @property
    def train_flops(self) -> float:
        """Per token: the backward pass costs two forward passes; recomputing the blocks, one more of them."""
        recomputed = self.forward_flops - self.flops["unembedding"] if self.config.gradient_checkpointing else 0.0
        return 3 * self.forward_flops + recomputed

    @property
    def activation_bytes(self) -> int:
        """For one sequence; with gradient checkpointing: block inputs and one block at a time."""
        return self.activations.checkpointed if self.config.gradient_checkpointing else self.activations.full

    def training_bytes(self, batch: int, states: int = 2) -> int:
        """Weights, gradients and ``states`` optimiser tensors per weight (AdamW: two), all of the size of a weight, and activations."""
        width = torch.finfo(getattr(torch, self.dtype)).bits // 8
        return self.total_parameters * width * (2 + states) + batch * self.activation_bytes

    def lines(self) -> list[str]:
        """The plan as text: one line per part, then the totals."""
        names = [*self.parameters, *(name for name in self.flops if name not in self.parameters)]
        rows = [(name.replace("_", " "), self.parameters.get(name, 0), self.flops.get(name, 0.0)) for name in names]
        rows.append(("total", self.total_parameters, self.forward_flops))
        table = [f"{'part':<18}{'parameters':>16}{'FLOPs/token':>16}"]
        table += [f"{name:<18}{count:>16,}{flops:>16,.0f}" for name, count, flops in rows]
        recompute = " (blocks recomputed in the backward pass)" if self.config.gradient_checkpointing else ""
        return [
            *table,
            f"without embeddings: {self.non_embedding_parameters:,} parameters",
            *(
                [f"active for a token: {self.active_parameters:,} parameters"]
                if self.active_parameters < self.total_parameters
                else []
            ),
            f"training: {self.train_flops:,.0f} FLOPs per token{recompute}",
            f"activations: {readable(self.activation_bytes)} for one sequence of {self.length} tokens in {self.dtype}",
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def size_of(config: DecoderConfig, *, length: int | None = None, dtype: torch.dtype = torch.float32) -> Size:
    """The size of ``config`` on sequences of ``length`` tokens (None: ``max_length``), weights and stream in ``dtype``.

    Nothing large is allocated. Activations of more than four layers are extrapolated as ``connections.cost`` does.
    Raises: InputError for a connection that needs real numbers to run.
    """
    length = config.max_length if length is None else length
    return Size(
        config,
        length,
        str(dtype).removeprefix("torch."),
        parameters(config),
        flops(config, length),
        kept_activations(config, length, dtype),
    )


def parameters(config: DecoderConfig) -> dict[str, int]:
    """Parameters by part, each counted once."""
    d, bias = config.width, int(config.bias)
    counts = {"embedding": config.vocab_size * d, "unembedding": config.head_parameters}
    stream, inner_norms = _stream(_key(config))
    counts |= {"attention": 0, "feed_forward": 0, "stream": stream}
    if config.positions == "learned":
        counts["embedding"] += config.max_length * d
    inner, outer = config.biased_attention != "none", config.biased_attention == "all"

    def attention(layer: int, with_norm: bool) -> int:
        q, kv, gates = head_widths(config, layer)
        maps = sum((d + inner) * out for out in (q, kv, kv)) + (d + outer) * gates + (q + outer) * d
        return maps + (2 * config.head_width if config.qk_norm else 0) + q * with_norm

    def feed_forward(f: int, with_norm: bool) -> int:
        return (2 if config.gated else 1) * (d + bias) * f + (f + bias) * d + f * with_norm

    def experts(with_norm: bool) -> dict[str, int]:
        f = config.expert_feed_forward_width
        together = config.shared_experts * f
        return {
            "routed_experts": config.experts * feed_forward(f, False),
            "shared_experts": feed_forward(together, with_norm) if together else 0,
            "router": config.experts * d + f * with_norm,
        }

    for site, with_norm in zip(config.sites, inner_norms, strict=True):
        if site.kind in ATTENDING:
            counts["attention"] += attention(site.layer, with_norm)
        if site.kind in FEEDING:
            counts["feed_forward"] += feed_forward(config.feed_forward_width, with_norm)
        if site.kind == "moe":
            for name, count in experts(with_norm).items():
                counts[name] = counts.get(name, 0) + count
    dictionaries = sum(heads * (config.prototypes * width + 1) for heads, width in dictionary_shapes(config))
    if dictionaries:
        counts["prototypes"] = dictionaries
    edits = sum(edit.parameters(config.heads_of(layer)) for edit, layer in edited_sites(config))
    return counts | ({"edits": edits} if config.edits else {})


def dictionary_shapes(config: DecoderConfig) -> list[tuple[int, int]]:
    """Heads and width of every dictionary of prototypes."""
    whole = [(1, config.width)] * sum(site.kind == "prototypes" for site in config.sites)
    attending = [site.layer for site in config.sites if site.kind in ATTENDING and config.head_prototypes]
    return whole + [(config.heads_of(layer), config.head_width) for layer in attending]


def head_widths(config: DecoderConfig, layer: int) -> tuple[int, int, int]:
    """Of one layer: the joint width of the query heads and of the key-value heads, and how many gates its attention has."""
    heads, width = config.heads_of(layer), config.head_width
    gates = {"none": 0, "head": heads, "element": heads * width}[config.attention_gate]
    return heads * width, config.key_value_heads_of(layer) * width, gates


ATTENDING, FEEDING = ("attention", "parallel"), ("feed_forward", "parallel")  # kinds of sublayers with such a branch


def flops(config: DecoderConfig, length: int) -> Counts:
    """Forward FLOPs per token by part; see :class:`Size`."""
    d, f = config.width, config.feed_forward_width
    widths = [head_widths(config, site.layer) for site in config.sites if site.kind in ATTENDING]
    kinds = [site.kind for site in config.sites]
    feed_forwards = sum(kind in FEEDING for kind in kinds)
    mixtures, shapes = kinds.count("moe"), dictionary_shapes(config)
    expert = 6.0 * mixtures * d * config.expert_feed_forward_width
    mixture = {
        "routed_experts": expert * config.active_experts,
        "shared_experts": expert * config.shared_experts,
        "router": 2.0 * mixtures * d * config.experts,
    }
    return {
        "attention": 2.0 * d * sum(2 * q + 2 * kv + gates for q, kv, gates in widths),
        "attention_scores": 4.0 * length * sum(q for q, _, _ in widths),
        "feed_forward": 2.0 * feed_forwards * d * f * (3 if config.gated else 2),
        **(mixture if mixtures else {}),
        **({"prototypes": sum(dictionary_flops(config, *shape) for shape in shapes)} if shapes else {}),
        "stream": stream_flops(config, length),
        **(
            {"edits": sum(edit_flops(config, *place, length) for place in edited_sites(config))} if config.edits else {}
        ),
        "unembedding": config.head_flops(length),
    }


def dictionary_flops(config: DecoderConfig, heads: int, width: int) -> float:
    """Forward FLOPs per token of a dictionary: tokens with prototypes, their mixture, and that with prototypes again, for the loss."""
    products = 3 if config.prototype_gradient == "through" else 4  # detached: the mixture once more, without a gradient
    return 2.0 * products * heads * config.prototypes * width


def edited_sites(config: DecoderConfig) -> list[tuple[UpdateEdit, int]]:
    """The edit of every site that has one, and its layer."""
    found = []
    for name, edit in config.edits.items():
        layers = edit.chosen(config.depth)
        found += [(edit, site.layer) for site in config.sites if site.kind in EDITS[name][0] and site.layer in layers]
    return found


def edit_flops(config: DecoderConfig, edit: UpdateEdit, layer: int, length: int) -> float:
    """Forward FLOPs per token of one edited site: its dot products, its sum, and the scores again that A_tt is taken from."""
    of_values = edit.space == "value"
    q, kv = head_widths(config, layer)[:2] if of_values else (config.width, config.width)
    across = 1.0 * q if edit.perpendicular != 1 else 0.0
    return 4.0 * q + 2.0 * kv + across + (2.0 * length * q if edit.exclude_self else 0.0)


def stream_flops(config: DecoderConfig, length: int) -> float:
    """Forward FLOPs per token of the connection, its norms included."""
    return _stream_flops(_key(config), length)


def _key(config: DecoderConfig) -> str:
    """What the stream depends on, as text that a cache can hold."""
    values = to_plain(config.stream_values())
    stack = [config.depth, list(config.layers), config.dense_layers]
    return json.dumps([config.connection, config.width, stack, values], sort_keys=True)


def _make(key: str, sites=None) -> connections.Stream:
    name, width, stack, values = json.loads(key)
    return connections.create(name, width=width, sites=sites or layout(*stack), **values)


@functools.lru_cache(maxsize=256)
def _stream(key: str) -> tuple[int, tuple[bool, ...]]:
    """Parameters of the connection, its norms included; and for every site whether it asks for an inner norm there."""
    with torch.device("meta"):
        stream = _make(key)
    count = sum(parameter.numel() for parameter in stream.parameters())
    return count, tuple(stream.requirements(site).inner_norm for site in stream.layout)


@functools.lru_cache(maxsize=256)
def _stream_flops(key: str, length: int) -> float:
    _, width, stack, _ = json.loads(key)
    return cost.measure(lambda sites: _make(key, sites), layout(*stack), width=width, length=length).flops_per_token


def readable(count: float) -> str:
    """Bytes for a person: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
