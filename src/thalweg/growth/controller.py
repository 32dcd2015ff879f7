"""The controller: while a directional residual remains it adds heads (and layers), it prunes what carries none, and it stops with a reason.

Reconstructed from the reviews of Cirrincione 2026 (INCRT, arXiv 2604.10703; DDCL-INCRT, arXiv 2604.01880), whose texts were not available, and
from public first-party code, whose defects are left out: there heads are averaged (adding one changes the function), every layer is tested on
one input, captured directions outlive the heads that were pruned, and neither thresholds nor dwell are free of scale.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from thalweg._words import counted
from thalweg.errors import InputError, ProofError
from thalweg.geometry.directional import CHANCE
from thalweg.geometry.eigenpairs import canonical_basis, degenerate
from thalweg.growth.birth import at_random, noise_rise, on_the_plane
from thalweg.growth.drift import drift
from thalweg.growth.energy import FreeEnergy, free_energy
from thalweg.growth.events import GrowthEvent, GrowthRecord, energy_pair
from thalweg.growth.options import GrowthOptions, spectral_dwell
from thalweg.growth.protocol import Birth, Growable
from thalweg.growth.pruning import Pruning
from thalweg.growth.reading import Reading, look
from thalweg.records import Measurements

Status = Literal["growing", "converged", "capped", "isotropic", "unstable"]
LEAST_RESIDUAL = 1e-10  # of |S| |M|: below it the interaction has no antisymmetric part that rounding did not make


@dataclass
class LayerState:
    """What the controller remembers of a layer.

    directions, born: by head, for heads that were added, what they captured and when. quiet: the step until which the layer is left alone.
    calm, full: checks in a row with nothing left, and with something left at the cap. since: the step it was first seen. futile: births in
    a row that found no less left than the one before; last_top: what that one found.
    """

    directions: dict[int, Tensor] = field(default_factory=dict)
    born: dict[int, int] = field(default_factory=dict)
    quiet: int = 0
    calm: int = 0
    full: int = 0
    isotropic: bool = False
    since: int = 0
    last_top: float = math.inf
    futile: int = 0


class Controller:
    """Drives one network through growth.

        controller = Controller(network, GrowthOptions(head_width=16))
        for step in ...:
            train(...)
            if controller.due(step):
                for event in controller.check(step):
                    print(event.line())
            if controller.finished: ...

    network: a :class:`thalweg.growth.Growable`. ``check`` looks at every layer on its own input and acts. :attr:`status` and :attr:`reason` say
    where it stands; :attr:`record` holds the events, :attr:`observed` rows of every look. :meth:`state_dict` resumes it exactly.
    Raises: InputError for a probe set that cannot be read; ProofError when an event changed the network's outputs by more than ``drift``.
    """

    def __init__(self, network: Growable, options: GrowthOptions):
        self.network, self.options = network, options
        self.record, self.observed = GrowthRecord(), Measurements()
        self.status: Status = "growing"
        self.reason = "no check yet"
        self.threshold: float | None = None
        self.layers: dict[int, LayerState] = {}
        self.pruning = Pruning(options)
        self.now: dict[int, Reading] = {}  # of this check, events included; nothing of it outlives the check
        self.generator = torch.Generator().manual_seed(options.seed)

    @property
    def finished(self) -> bool:
        """Growth has ended; pruning with it."""
        return self.status != "growing"

    def due(self, step: int) -> bool:
        """Whether this step is one to look at."""
        return not self.finished and step % self.options.check_every == 0

    def check(self, step: int) -> list[GrowthEvent]:
        """Look at every layer and act; the events of this step. A network that has diverged since the first check ends as ``unstable``."""
        if self.finished:
            return []
        before = len(self.record)
        try:
            readings = [self._look(layer, step) for layer in range(self.network.layers())]
        except InputError as error:
            if self.threshold is None:
                raise
            self._end("unstable", str(error))
            return []
        fit = self.network.fit()
        if not math.isfinite(fit):
            self._end("unstable", f"the fit on the probe set is {fit} at step {step}; the network has diverged")
            return []
        if self.threshold is None and not self._calibrate(readings):
            return []
        assert self.threshold is not None
        self.now = {reading.layer: reading for reading in readings}
        self.observed.extend(self._energy(fit).rows(step=step))
        for reading in readings:
            self._act(reading, step, fit)
            if self.finished:
                break
        if not self.finished:
            self._judge(readings, step)
        self.now = {}
        return self.record.events[before:]

    def diverged(self, step: int, reason: str) -> None:
        """Training ended by divergence: growth that was under way is ``unstable``; growth that had ended keeps its status, and says so."""
        if self.finished:
            self.reason = f"{self.reason}; training diverged later, at step {step}"
        else:
            self._end("unstable", f"training diverged at step {step}: {reason}")

    def decisions(self) -> list[tuple[str, str, str]]:
        """What each size is decided by: (what, who, how), for the report."""
        o = self.options
        theta = "not set yet" if self.threshold is None else f"{self.threshold:.3g} of |S| |M|"
        if o.most_layers is None:
            who, how = "the user", "no rule of growth is on for it"
        else:
            rule = f"a calm top layer with asymmetry above {o.asymmetry_level:g} (chance {CHANCE:.3f}) gets one on top, up to {o.most_layers}"
            who, how = "a rule", f"{rule}; heads born on planes have asymmetry 1, so that many of them alone satisfy it"
        heads = (
            f"directions with more than theta = {o.threshold:g} x the first residual ({theta}) left; "
            f"the share is the user's and sets the count; cap {o.most_heads}"
        )
        return [
            ("heads per layer", "the data, at the user's threshold", heads),
            ("depth", who, how),
            ("head width", "the user", f"{o.head_width}"),
            ("dictionary size", "the user", "prototypes per head do not grow; see effective prototypes"),
        ]

    def state_dict(self) -> dict[str, Any]:
        """Everything that :meth:`load_state_dict` needs, tensors and plain values."""
        return {
            "status": self.status,
            "reason": self.reason,
            "threshold": self.threshold,
            "layers": {
                layer: {
                    **{k: v for k, v in vars(s).items() if k not in ("directions", "born")},
                    "directions": {h: u.clone() for h, u in s.directions.items()},
                    "born": dict(s.born),
                }
                for layer, s in self.layers.items()
            },
            "pruning": self.pruning.state_dict(),
            "events": [event.to_table() for event in self.record],
            "observed": [row.to_row() for row in self.observed],
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.status, self.reason, self.threshold = state["status"], state["reason"], state["threshold"]
        self.layers = {int(layer): LayerState(**values) for layer, values in state["layers"].items()}
        self.pruning.load_state_dict(state["pruning"])
        self.record = GrowthRecord(GrowthEvent.from_table(dict(table)) for table in state["events"])
        self.observed = Measurements()
        for row in state["observed"]:
            self.observed.add(**row)
        self.generator.set_state(state["generator"])

    def _look(self, layer: int, step: int) -> Reading:
        state = self.layers.setdefault(layer, LayerState(since=step))
        reading = look(self.network, layer, state.directions, self.options)
        state.isotropic = reading.condition < self.options.least_condition
        self.observed.extend(reading.rows(step=step))
        return reading

    def _calibrate(self, readings: list[Reading]) -> bool:
        seeing = [reading.residual for reading in readings if not self.layers[reading.layer].isotropic]
        if not seeing:
            self._end("isotropic", self._isotropy(readings))
            return False
        if max(seeing) < LEAST_RESIDUAL:
            self.threshold = 0.0
            self._end(
                "converged",
                "the interaction of queries and keys has no antisymmetric part, so nothing directional is left",
            )
            return False
        self.threshold = self.options.threshold * max(seeing)
        return True

    def _isotropy(self, readings: list[Reading]) -> str:
        worst = max(reading.condition for reading in readings)
        return (
            f"the inputs look alike in every direction (condition number {worst:.3f}, below {self.options.least_condition:g}), and on "
            "such inputs the residual is 0 whatever is left; test before any whitening"
        )

    def _energy(self, fit: float) -> FreeEnergy:
        assert self.threshold is not None
        return free_energy(fit, self.now.values(), self.threshold, self.options.weight)

    def _act(self, reading: Reading, step: int, fit: float) -> None:
        state = self.layers[reading.layer]
        assert self.threshold is not None
        # One change of a layer at a time: a mask lowers |M|, by which eigenvalues are divided, so what is left would seem more.
        if step >= state.quiet and reading.layer not in self.pruning.masked:
            left = not state.isotropic and reading.top > self.threshold
            room = self.options.most_heads - len(reading.heads)
            if left and room > 0:
                state.calm = state.full = 0
                if self._pays(state, reading):
                    self._grow(reading, step, fit, room)
                return
            state.calm, state.full = (0, state.full + 1) if left else (state.calm + 1, 0)
        if not self.options.prune:
            return
        directions = {layer: other.directions for layer, other in self.layers.items()}
        found = self.pruning.check(self.network, reading, directions, state.born, step, self.threshold)
        if found is not None:
            self._prove(self.record.add(found))
            if found.kind == "prune":
                for head in found.heads:
                    state.directions.pop(head, None)
                    state.born.pop(head, None)
                state.quiet, state.calm = step + self._dwell(reading), 0

    def _pays(self, state: LayerState, reading: Reading) -> bool:
        """Whether births lower what the next one finds: otherwise heads would run away, and the run ends."""
        state.futile = state.futile + 1 if reading.top >= state.last_top else 0
        state.last_top = reading.top
        if state.futile >= self.options.stall:
            births = f"{state.futile} births" if state.futile > 1 else "birth"
            self._end(
                "unstable",
                f"layer {reading.layer}: the last {births} did not lower the largest eigenvalue ({reading.top:.3g}, "
                f"threshold {self.threshold:.3g}); heads would be added without end",
            )
        return not self.finished

    def _dwell(self, reading: Reading) -> int:
        if self.options.dwell != "gap":
            return self.options.dwell
        values = reading.values
        second = values[1].item() if len(values) > 1 else 0.0
        return spectral_dwell(reading.top, second, values.abs().max().item())

    def _grow(self, reading: Reading, step: int, fit: float, room: int) -> None:
        """Heads on the leading direction, or on all that share its eigenvalue."""
        o, layer, state = self.options, reading.layer, self.layers[reading.layer]
        assert self.threshold is not None
        many = min(degenerate(reading.values, o.degeneracy), int((reading.values > self.threshold).sum()), room)
        vectors = canonical_basis(reading.vectors[:, : max(many, 1)])
        births = [self._birth(reading, vectors[:, i], reading.values[i].item()) for i in range(vectors.shape[1])]
        outputs, parameters = self.network.outputs().detach().clone(), self.network.parameters_count()
        ids = self.network.add_heads(layer, births)
        for head, birth in zip(ids, births, strict=True):
            state.directions[head], state.born[head] = birth.direction, step
        state.quiet = step + self._dwell(reading)
        before, scale = self._energy(fit), reading.operator.scale
        after = self.now[layer] = look(self.network, layer, state.directions, o, scale=scale)
        fit_after = self.network.fit()
        stays = fit_after <= fit + 1e-6 * max(abs(fit), 1e-3)  # heads with dictionaries of their own bring these' loss
        event = GrowthEvent(
            "birth",
            step,
            layer,
            tuple(ids),
            f"top eigenvalue {reading.top:.3g}, above the threshold {self.threshold:.3g}",
            self.threshold,
            eigenvalues=tuple(reading.values[: len(ids)].tolist()),
            next_eigenvalue=reading.values[len(ids)].item() if len(reading.values) > len(ids) else None,
            residual_before=reading.residual,
            residual_after=after.residual,
            positive_before=reading.positive,
            positive_after=after.positive,
            directions=tuple(tuple(birth.direction.tolist()) for birth in births),
            captured=tuple(birth.captured / scale for birth in births),
            condition=reading.condition,
            asymmetry=reading.asymmetry,
            drift=drift(outputs, self.network.outputs()),
            parameters_before=parameters,
            parameters_after=self.network.parameters_count(),
            heads_after=len(after.heads),
            degenerate=len(ids) > 1,
            must_fall=o.birth == "plane"
            and o.captured == "birth"
            and after.exact
            and stays
            and sum(
                reading.values[i].item() - self.threshold - noise_rise(b, reading.operator)
                for i, b in enumerate(births)
            )
            > 0,
            **energy_pair(before, self._energy(fit_after)),
        )
        self._prove(self.record.add(event))

    def _birth(self, reading: Reading, direction: Tensor, eigenvalue: float) -> Birth:
        o = self.options
        if o.birth == "random":
            return at_random(reading.operator, direction, eigenvalue, o.head_width, generator=self.generator)
        return on_the_plane(
            reading.operator, direction, eigenvalue, o.head_width, noise=o.noise, generator=self.generator
        )

    def _prove(self, event: GrowthEvent) -> None:
        if (
            event.drift is not None
            and not event.drift <= self.options.drift
            and event.kind in ("birth", "prune", "layer")
        ):
            raise ProofError(
                f"step {event.step}, layer {event.layer}: the {event.kind} changed the outputs by {event.drift:.2e} (relative), "
                f"allowed {self.options.drift:g}; new heads need a zero output map and a sum over heads"
            )

    def _judge(self, readings: list[Reading], step: int) -> None:
        """Whether growth has ended, and why; or a new layer."""
        states = [self.layers[reading.layer] for reading in readings]
        o = self.options
        if all(state.isotropic for state in states):
            self._end("isotropic", self._isotropy(readings))
            return
        unsettled = sum(state.calm < o.patience and state.full < o.patience for state in states)
        pruning = self.pruning.under_way({reading.layer: len(reading.heads) for reading in readings})
        if unsettled or pruning:
            self.reason = (
                f"step {step}: {unsettled} of {counted(len(states), 'layer')} not calm yet"
                if unsettled
                else f"step {step}: {pruning}"
            )
            return
        capped = [str(reading.layer) for reading, state in zip(readings, states, strict=True) if state.full]
        if not capped and self._deepen(readings, step):
            return
        blind = [str(reading.layer) for reading, state in zip(readings, states, strict=True) if state.isotropic]
        where = f"layer{'s' * (len(blind) > 1)} {', '.join(blind)} {'have' if len(blind) > 1 else 'has'}"
        unseen = f"; {where} isotropic inputs, where nothing can be seen" if blind else ""
        largest = max(reading.top for reading in readings)
        if capped:
            self._end(
                "capped",
                f"the cap of {o.most_heads} heads was reached in layer{'s' * (len(capped) > 1)} {', '.join(capped)}, the top "
                f"eigenvalue is {largest:.3g}, above the threshold {self.threshold:.3g}: cap reached, not converged{unseen}",
            )
            return
        self._end(
            "converged",
            f"the top eigenvalue is at most {largest:.3g} in every layer, below the threshold {self.threshold:.3g}, "
            f"at {counted(o.patience, 'check')}{' in a row' * (o.patience > 1)}" + unseen,
        )

    def _deepen(self, readings: list[Reading], step: int) -> bool:
        """A layer on top, where the rule for depth is on and holds."""
        o, top = self.options, readings[-1]
        if o.most_layers is None or len(readings) >= o.most_layers or top.asymmetry <= o.asymmetry_level:
            return False
        if step - self.layers[top.layer].since < o.layer_dwell:
            self.reason = f"step {step}: the top layer is calm and directional, and lives since step {self.layers[top.layer].since} only"
            return True
        before, parameters = self._energy(self.network.fit()), self.network.parameters_count()
        outputs = self.network.outputs().detach().clone()
        layer = self.network.add_layer()
        assert self.threshold is not None
        reading = self.now[layer] = self._look(layer, step)
        self._prove(
            self.record.add(
                GrowthEvent(
                    "layer",
                    step,
                    layer,
                    tuple(head.id for head in reading.heads),
                    f"the top layer is calm, its asymmetry {top.asymmetry:.3f} above {o.asymmetry_level:g} (chance {CHANCE:.3f})",
                    self.threshold,
                    residual_after=reading.residual,
                    positive_after=reading.positive,
                    condition=reading.condition,
                    asymmetry=top.asymmetry,
                    drift=drift(outputs, self.network.outputs()),
                    parameters_before=parameters,
                    parameters_after=self.network.parameters_count(),
                    heads_after=len(reading.heads),
                    **energy_pair(before, self._energy(self.network.fit())),
                )
            )
        )
        return True

    def _end(self, status: Status, reason: str) -> None:
        self.status, self.reason = status, reason
