"""Did it move? What is looked at in every run: learned maps against their start, gradients by depth, the size of the stream."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from thalweg.connections.base import Site, Stream
from thalweg.models.retained import Edit, edits_of
from thalweg.models.trace import StreamTrace
from thalweg.models.transformer import Transformer
from thalweg.records import Measurement
from thalweg.training.optim import EDIT, STREAM, layer_of
from thalweg.training.parallel import norm, whole

NORM_SLOTS = ("enter_norm", "input_norm", "update_norm", "output_norm", "final_norm")


def connection_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The stream's own parameters, without the norms that every connection has and the edits that hang on them."""
    return {
        name: p
        for name, p in model.named_parameters()
        if name.startswith(STREAM) and not any(slot in name.split(".") for slot in NORM_SLOTS)
    }


class Movement:
    """The start of a connection's parameters, to tell later how far they moved. Empty for a connection that has none."""

    def __init__(self, model: nn.Module):
        self.start = {name: whole(p.detach()).clone() for name, p in connection_parameters(model).items()}

    def follow(self, model: nn.Module) -> None:
        """Go on with a model of another shape: what is new in it, or has another shape, starts now."""
        now = {name: whole(p.detach()) for name, p in connection_parameters(model).items()}
        kept = {name: start for name, start in self.start.items() if name in now and now[name].shape == start.shape}
        self.start = {name: kept[name] if name in kept else value.clone() for name, value in now.items()}

    def metrics(self, model: nn.Module, scale: float = 1.0) -> dict[str, float]:
        """Euclidean distance of all of them from their start, the same over the size of the start, and the gradient norm into them.

        scale: what clipping multiplied the gradients with; norms are given as before clipping.
        """
        if not self.start:
            return {}
        parameters = connection_parameters(model)
        distance = norm(whole(p.detach()) - self.start[name] for name, p in parameters.items())
        size = norm(self.start.values())
        values = {
            "moved/connection": distance,
            "gradient/connection": norm(p.grad for p in parameters.values()) / scale,
        }
        return values | ({"moved/connection_relative": distance / size} if size else {})

    def by_layer(self, model: Transformer, step: int) -> list[Measurement]:
        """One distance per layer, summed over its sites."""
        layout = model.stream.layout
        parts: dict[int, list[Tensor]] = {}
        for name, p in connection_parameters(model).items():
            owner = name.removeprefix(STREAM).split(".")
            if owner[0] == "sites":
                parts.setdefault(layout[int(owner[1])].layer, []).append(whole(p.detach()) - self.start[name])
        return [
            Measurement("connection_distance", norm(x), layer=layer, step=step) for layer, x in sorted(parts.items())
        ]

    def by_coefficient(self, model: Transformer, step: int, scale: float = 1.0) -> list[Measurement]:
        """For sites that mix streams: each kind of parameter of each layer by itself, ``branch`` naming it (``mix.bias``).

        Its distance from the start, the same over the size of the start where that is not 0, and the norm of the gradient into it before
        clipping. scale: as for :meth:`metrics`.
        """
        sites = list(model.stream.sites)
        parts: dict[tuple[int, str], list[tuple[str, nn.Parameter]]] = {}
        for name, p in connection_parameters(model).items():
            owner = name.removeprefix(STREAM).split(".")
            if owner[0] == "sites" and sites[int(owner[1])].mixes:
                kind = ".".join(owner[2:][-2:])
                parts.setdefault((model.stream.layout[int(owner[1])].layer, kind), []).append((name, p))
        rows = []
        for (layer, kind), found in sorted(parts.items()):
            where = {"layer": layer, "branch": kind, "step": step}
            distance = norm(whole(p.detach()) - self.start[name] for name, p in found)
            rows.append(Measurement("coefficient_distance", distance, **where))
            if size := norm(self.start[name] for name, _ in found):
                rows.append(Measurement("coefficient_distance.relative", distance / size, **where))
            rows.append(Measurement("coefficient_gradient_norm", norm(p.grad for _, p in found) / scale, **where))
        return rows


def edit_metrics(model: nn.Module, scale: float = 1.0) -> dict[str, float]:
    """How far the learned scales of edits are from 1, all of them together, and the gradient norm into them; empty without any.

    scale: what clipping multiplied the gradients with.
    """
    learned = {name: p for name, p in model.named_parameters() if EDIT.search(name)}
    if not learned:
        return {}
    return {
        "moved/edit": norm(whole(p.detach()) for p in learned.values()),
        "gradient/edit": norm(p.grad for p in learned.values()) / scale,
    }


@torch.no_grad()
def retained_by_layer(model: Transformer, step: int) -> list[Measurement]:
    """The retained scales that are not fixed: by layer, by head where they are, ``branch`` naming sublayer and part."""
    rows = []
    for site, place in edited_places(model):
        for part in ("parallel", "perpendicular"):
            held = getattr(place, part)
            if held.fixed is None:
                found = whole(held(next(model.parameters()))).double().flatten().tolist()
                heads = range(len(found)) if len(found) > 1 else (None,)
                where = {"layer": site.layer, "branch": f"{site.kind}.{part}", "step": step}
                rows += [Measurement("retained_scale", s, head=h, **where) for h, s in zip(heads, found, strict=True)]
    return rows


def edited_places(model: Transformer) -> list[tuple[Site, Edit]]:
    """Every edit with the site that it stands at."""
    found = []
    for site, at, sublayer in zip(model.stream.layout, model.stream.sites, model.sublayers, strict=True):
        found += [(site, edit) for module in (sublayer, at.update_norm) for edit in edits_of(module).values()]
    return found


def gradient_by_layer(model: nn.Module, step: int, scale: float = 1.0) -> list[Measurement]:
    """Euclidean norm of the gradient of each layer's sublayer weights, before clipping."""
    parts: dict[int, list[Tensor | None]] = {}
    for name, p in model.named_parameters():
        layer = layer_of(name)
        if layer is not None:
            parts.setdefault(layer, []).append(p.grad)
    return [
        Measurement("weight_gradient_norm", norm(x) / scale, layer=layer, step=step)
        for layer, x in sorted(parts.items())
    ]


@torch.no_grad()
def stream_by_layer(stream: Stream, run: Callable[[StreamTrace], None], step: int) -> list[Measurement]:
    """Root mean square of the state after each layer on one batch; ``run`` calls the model on it with the trace that it is given."""
    trace = StreamTrace()
    run(trace)
    last = {record.site.layer: record.state_after for record in trace.records}
    return [
        Measurement("stream_rms", _rms(stream.observe(state)), layer=layer, step=step, split="valid")
        for layer, state in sorted(last.items())
    ]


def largest(rows: Iterable[Measurement]) -> float:
    """The largest value; NaN if any is."""
    values = torch.tensor([row.value for row in rows], dtype=torch.float64)
    return float(values.max()) if len(values) else 0.0


def _rms(state: Tensor) -> float:
    return float(state.double().square().mean().sqrt())  # NaN and infinity are findings here, not errors
