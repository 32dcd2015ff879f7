"""A wider model that computes what the narrow one computes: more units in its feed-forward sublayers, more coordinates in its stream.

Coordinates are appended. With RMSNorm they hold zeros: the mean square over d' coordinates is d/d' of that over d, so that with the eps times
d/d' and the scale times sqrt(d/d') every norm gives what it gave, and zero on the new ones. LayerNorm takes the mean away too, and the mean
of zeros is not that of the stream; so there the new coordinates hold the mean of the old ones: it then stays the mean of all, the variance
is d/d' of what it was, and the norm gives zero on the new ones again. Whatever reads them reads zeros, and its weights may be any.
"""

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.errors import InputError
from thalweg.models.config import DecoderConfig
from thalweg.models.sharing import named_weights
from thalweg.models.sublayers import FeedForward, MixtureOfExperts, Prototypes
from thalweg.ops.norms import Norm
from thalweg.ops.prototypes import LOG_TEMPERATURE
from thalweg.surgery.change import NEW, Grown, ParameterMap, rebuild, whole_decoder_of

STREAM = "stream."  # where a model keeps its connection
REPLAYED = 1e-10  # relative difference in float64 up to which two streams are the same


def grow_width(
    model: Any,
    *,
    width: int | None = None,
    ffn_width: int | None = None,
    expert_width: int | None = None,
    generator: torch.Generator | None = None,
    in_place: bool = False,
) -> Grown:
    """A wider model that computes what ``model`` computes; ``model`` itself is not changed unless ``in_place``.

    width: of the stream; heads keep their number and width (:func:`grow_heads` adds some). ffn_width: units of every feed-forward sublayer.
    expert_width: units of every expert (shared ones grow with it). None: as it is. New units write zero; new coordinates are zero, or with
    LayerNorm the mean of the old ones; what reads them starts as in a fresh model. The options of the connection get an eps of their own.
    Before a wider stream is returned it is replayed in float64 on random states against the old one, and refused unless they are equal.
    generator, in_place: as in :func:`grow_heads`.
    Raises: InputError for sizes that do not grow, inner norms (Sub-LN) over units, norms whose eps is not the connection's, connections that
    see the added coordinates (LayerNorm on updates or after them, LayerNorm with coefficients for each coordinate), prototypes with
    LayerNorm or at the end of their range of temperatures.
    """
    decoder = whole_decoder_of(model)
    config: DecoderConfig = decoder.config
    after = wider(decoder, width, ffn_width, expert_width)
    if after.width > config.width:
        check_prototypes(decoder, after.width, centred=uses_layernorm(decoder))
    before = named_weights(decoder)
    norms = {name: module for name, module in decoder.named_modules() if isinstance(module, Norm)}
    mean = uses_layernorm(decoder)

    def maps(name: str, fresh: Tensor) -> ParameterMap:
        old = before[name]
        taken = {
            axis: appended(old.shape[axis], size, config.width, after.width, name)
            for axis, size in enumerate(fresh.shape)
            if size != old.shape[axis]
        }
        owner, _, part = name.rpartition(".")
        shrunk = taken and after.width > config.width
        scaled = shrunk and (
            (owner in norms and part == "weight") or (part == "projection" and owner.startswith(STREAM))
        )
        return ParameterMap(name, taken, math.sqrt(config.width / after.width) if scaled else 1.0)

    def finish(new: Any) -> None:
        for old_part, part in zip(decoder.modules(), new.modules(), strict=True):
            if isinstance(part, FeedForward | MixtureOfExperts) and isinstance(
                old_part, FeedForward | MixtureOfExperts
            ):
                part.down.weight[..., old_part.down.in_features :] = 0
        if after.width > config.width:
            check_eps(norms, new, config.width / after.width)
            for tensor, axis, held in writers(new, mean):
                fill_axis(tensor, axis, config.width, held)
            for sublayer in new.sublayers:
                if isinstance(sublayer, Prototypes):  # distances are divided by the width
                    sublayer.dictionary.log_temperature.add_(math.log(config.width / after.width))
            scaled = {name: maps(name, value) for name, value in named_weights(new).items() if name.startswith(STREAM)}
            prove_stream(decoder.stream, new.stream, mean, scaled)

    sizes = [
        f"{what} {old} to {new}"
        for what, old, new in (
            ("width", config.width, after.width),
            ("feed-forward", config.feed_forward_width, after.feed_forward_width),
            ("experts", config.expert_feed_forward_width, after.expert_feed_forward_width),
        )
        if old != new and (what != "experts" or "moe" in config.layers)
    ]
    return rebuild(model, after, f"grew {', '.join(sizes)}", maps, None, finish, generator=generator, in_place=in_place)


def wider(decoder: Any, width: int | None, ffn_width: int | None, expert_width: int | None) -> DecoderConfig:
    """The new configuration, every size that followed from another written out. Raises: InputError."""
    config: DecoderConfig = decoder.config
    feeds = any(site.kind in ("feed_forward", "parallel") for site in config.sites)
    mixes = "moe" in {site.kind for site in config.sites}
    if width is None and ffn_width is None and expert_width is None:
        raise InputError("nothing grows: give width, ffn_width or expert_width")
    now = {
        "width": config.width,
        "ffn_width": config.feed_forward_width,
        "expert_width": config.expert_feed_forward_width,
    }
    for name, value in (("width", width), ("ffn_width", ffn_width), ("expert_width", expert_width)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value <= now[name]):
            raise InputError(f"{name} grows from {now[name]}, got {value!r}; give a larger whole number")
    if ffn_width is not None and not feeds:
        raise InputError(f"layers {', '.join(config.layers)} have no feed-forward sublayer; leave ffn_width out")
    if expert_width is not None and not mixes:
        raise InputError(f"layers {', '.join(config.layers)} have no experts; leave expert_width out")
    for module in decoder.modules():
        grows = ffn_width if isinstance(module, FeedForward) else expert_width
        if (
            isinstance(module, FeedForward | MixtureOfExperts)
            and module.inner_norm.kind != "none"
            and grows is not None
        ):
            raise InputError(
                f"{config.connection!r} norms all units of a sublayer together before its last map, so new units change the old ones; "
                "leave ffn_width and expert_width out"
            )
    changes: dict[str, Any] = {"ffn_width": ffn_width or (config.feed_forward_width if feeds else config.ffn_width)}
    changes["expert_width"] = expert_width or (config.expert_feed_forward_width if mixes else config.expert_width)
    if width is not None:
        options = decoder.stream.options
        share = config.width / width
        smaller = {
            name: getattr(options, name) * share
            for name in ("norm_eps", "coefficient_eps")
            if name in {f.name for f in dataclasses.fields(options)}
        }
        changes |= {
            "width": width,
            "head_size": config.head_width,
            "connection_options": {**config.connection_options, **smaller},
        }
    return config.replace(**changes)


def uses_layernorm(decoder: Any) -> bool:
    """Whether a norm of the stream's slots takes the mean away."""
    options = decoder.stream.options
    return options.norm == "layernorm" and any(
        norm.kind == "layernorm" and norm.width == decoder.config.width for norm in slots_of(decoder.stream)
    )


def slots_of(stream: Any) -> Iterator[Norm]:
    """The norms before sublayers and at the end."""
    yield stream.final_norm
    for site in stream.sites:
        yield site.input_norm


def appended(old: int, new: int, narrow: int, wide: int, name: str) -> Tensor:
    """Old index of each new one along an axis that grew: at its end, or at the end of each stream where all of them stand in a row."""
    streams = old // narrow if name.startswith(STREAM) and old % narrow == 0 else 1
    if new != streams * wide:
        streams = 1
    size = new // streams
    taken = torch.full((streams, size), NEW)
    taken[:, : old // streams] = torch.arange(old).view(streams, -1)
    return taken.flatten()


def writers(decoder: Any, mean: bool) -> Iterator[tuple[Tensor, int, bool]]:
    """Every tensor whose axis is the coordinates of what is written to the stream, and whether new ones hold the mean of the old ones."""
    for module in decoder.modules():
        if isinstance(module, nn.Embedding):
            yield module.weight, 1, mean
    for sublayer in decoder.sublayers:
        for linear in (m.linear for m in sublayer.maps() if m.last):
            yield linear.weight, linear.weight.ndim - 2, mean
            if linear.bias is not None:
                yield linear.bias, 0, mean
        if isinstance(sublayer, Prototypes):
            yield sublayer.dictionary.prototypes, 2, mean
    for tensor, axis in gates_of(decoder.stream):
        yield tensor, axis, True


def gates_of(stream: Any) -> Iterator[tuple[Tensor, int]]:
    """Maps whose output has a LayerNorm over the coordinates, with the axis of the output."""
    for site in stream.sites:
        if getattr(site, "gate_norm", None) is not None:
            yield site.gate_matrix, 0


def fill_axis(tensor: Tensor, axis: int, old: int, mean: bool) -> None:
    """Zeros, or the mean of the first ``old`` entries, in the others."""
    rest = tensor.narrow(axis, old, tensor.shape[axis] - old)
    rest.copy_(tensor.narrow(axis, 0, old).mean(axis, keepdim=True).expand_as(rest)) if mean else rest.zero_()


def check_eps(norms: dict[str, Norm], new: nn.Module, share: float) -> None:
    """Raises: InputError for a norm over the stream that the options of the connection do not govern."""
    for name, module in new.named_modules():
        if not isinstance(module, Norm) or module.kind == "none" or module.width == norms[name].width:
            continue
        if not math.isclose(module.eps, norms[name].eps * share, rel_tol=1e-9):
            raise InputError(
                f"the norm {name} has an eps of its own, which a wider stream cannot keep exact; width must stay"
            )


def check_prototypes(decoder: Any, width: int, *, centred: bool) -> None:
    """Raises: InputError where dictionaries in place of the feed-forward sublayer cannot go along."""
    shift = math.log(decoder.config.width / width)
    for sublayer in decoder.sublayers:
        if not isinstance(sublayer, Prototypes):
            continue
        if centred:
            raise InputError(
                "prototypes measure distances, which the mean that LayerNorm needs on new coordinates changes; width must stay"
            )
        found = sublayer.dictionary.log_temperature
        if bool((found + shift < LOG_TEMPERATURE[0]).any()) or bool((found > LOG_TEMPERATURE[1]).any()):
            raise InputError(
                "a temperature of the prototypes would leave its range, since distances are divided by the width; width must stay"
            )


def replay_length(stream: Any) -> int:
    """Tokens of a replay: enough that what looks back over a window of tokens has a full one."""
    return 5 + max((int(getattr(stream.options, name, 0)) for name in ("window", "kernel")), default=0)


@torch.no_grad()
def prove_stream(old: Any, new: Any, mean: bool, maps: Mapping[str, ParameterMap]) -> None:
    """Run both streams in float64 on random states with the same random sublayers, the wide ones fed by what they read of new coordinates too.

    What was rounded to the dtype of the model (scales of norms, means) is made anew in float64 first, so that rounding is not taken for a
    difference. Raises: InputError unless they are the same function.
    """
    narrow, wide = old.width, new.width
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (copy.deepcopy(stream).cpu().double() for stream in (old, new))
    before = named_weights(ours)
    for name, value in named_weights(theirs).items():
        map = maps[STREAM + name]
        map.carry(before[map.old.removeprefix(STREAM)], value, map.factor)
    for tensor, axis in gates_of(theirs):
        fill_axis(tensor, axis, narrow, True)
    weights = [torch.randn(narrow, narrow, generator=generator, dtype=torch.float64) / narrow**0.5 for _ in ours.sites]
    embedding = torch.randn(2, replay_length(old), narrow, generator=generator, dtype=torch.float64)

    def padded(x: Tensor) -> Tensor:
        added = x.new_zeros(*x.shape[:-1], wide - narrow)
        return torch.cat([x, added + x.mean(-1, keepdim=True) if mean else added], -1)

    small = ours(embedding, [lambda x, w=w: torch.tanh(x @ w) for w in weights])
    large = theirs(
        padded(embedding),
        [
            lambda x, w=w: padded(torch.tanh((x[..., :narrow] + x[..., narrow:].sum(-1, keepdim=True)) @ w))
            for w in weights
        ],
    )
    error = float(
        torch.cat([large[..., :narrow] - small, large[..., narrow:]], -1).norm() / small.norm()
    )  # the head reads zeros
    if not error <= REPLAYED:
        why = " with LayerNorm" if mean else ""
        raise InputError(
            f"{type(old).__name__}{why} sees added coordinates (the stream differs by {error:.2g} of its norm), so its width must stay"
        )
