"""Pruning: a head whose directional energy stays low is masked away slowly, looked at, and then removed for good or restored."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from thalweg._words import counted
from thalweg.growth.drift import drift
from thalweg.growth.energy import free_energy
from thalweg.growth.events import GrowthEvent, energy_pair
from thalweg.growth.options import GrowthOptions
from thalweg.growth.protocol import Growable
from thalweg.growth.reading import Reading, look, prune_bound

Key = tuple[int, int]  # layer, head


class Pruning:
    """One head of a layer at a time; the last head of a layer stays.

    Low directional energy does not mean that a head does nothing: its symmetric part may matter. So the mask decides: with the head away the
    fit on the probe set may rise by ``allowed_rise`` at most, and the free energy not at all. A head that was restored waits twice as long.
    """

    def __init__(self, options: GrowthOptions):
        self.options = options
        self.low: dict[Key, int] = {}  # checks in a row below the bound
        self.masked: dict[int, tuple[int, int]] = {}  # layer -> head, checks since its mask began to fall
        self.patience: dict[Key, int] = {}  # of those that were restored

    def under_way(self, heads: Mapping[int, int]) -> str:
        """What growth must still wait for, in words, or nothing. heads: how many each layer has. A head that was restored is not waited for."""
        if self.masked:
            return f"head {', '.join(str(head) for head, _ in self.masked.values())} is being masked"
        low = [
            head
            for (layer, head), count in self.low.items()
            if count and (layer, head) not in self.patience and heads.get(layer, 0) > 1
        ]
        return f"{len(low)} heads hold little and may be pruned" if low else ""

    def check(
        self,
        network: Growable,
        reading: Reading,
        directions: Mapping[int, Mapping[int, Tensor]],
        born: Mapping[int, int],
        step: int,
        threshold: float,
    ) -> GrowthEvent | None:
        """Count, mask, judge; the event of this check, if there is one. directions: of every layer, by head; born: of the heads of this one."""
        layer = reading.layer
        if layer in self.masked:
            head, checks = self.masked[layer]
            checks += 1
            self.masked[layer] = (head, checks)
            network.mask_head(layer, head, max(0.0, 1 - checks / self.options.mask_checks))
            return (
                self._judge(network, layer, directions, step, threshold) if checks >= self.options.mask_checks else None
            )
        bound = prune_bound(reading, threshold, self.options)
        dwell = self.options.dwell if isinstance(self.options.dwell, int) else 0
        for head, energy in reading.energies.items():
            settled = step >= born.get(head, 0) + dwell
            self.low[layer, head] = self.low.get((layer, head), 0) + 1 if energy < bound and settled else 0
        ready = [
            head
            for head in reading.energies
            if self.low[layer, head] >= self.patience.get((layer, head), self.options.prune_patience)
        ]
        if not ready or len(reading.heads) < 2:
            return None
        head = min(ready, key=reading.energies.__getitem__)
        self.masked[layer] = (head, 0)
        return GrowthEvent(
            "mask",
            step,
            layer,
            (head,),
            f"directional energy {reading.energies[head]:.3g} below {bound:.3g} for {counted(self.low[layer, head], 'check')}",
            threshold,
            residual_before=reading.residual,
            asymmetry=reading.asymmetry,
            condition=reading.condition,
            heads_after=len(reading.heads),
        )

    def _judge(
        self, network: Growable, layer: int, directions: Mapping[int, Mapping[int, Tensor]], step: int, threshold: float
    ) -> GrowthEvent:
        """The mask is 0: the whole network with and without the head, at one moment and with one normaliser for each layer."""
        o = self.options
        head, _ = self.masked.pop(layer)
        self.low[layer, head] = 0
        every = range(network.layers())
        network.mask_head(layer, head, 1.0)
        fit_with = network.fit()
        before = [look(network, i, directions.get(i, {}), o) for i in every]
        network.mask_head(layer, head, 0.0)
        fit_without = network.fit()
        after = [
            look(
                network,
                i,
                directions.get(i, {}),
                o,
                scale=before[i].operator.scale,
                without=head if i == layer else None,
            )
            for i in every
        ]
        whole, left, own = before[layer], after[layer], directions.get(layer, {})
        with_head = free_energy(fit_with, before, threshold, o.weight)
        without = free_energy(fit_without, after, threshold, o.weight)
        rise = (fit_without - fit_with) / max(abs(fit_with), 1e-12)
        common: dict[str, Any] = {
            "residual_before": whole.residual,
            "residual_after": left.residual,
            "positive_before": whole.positive,
            "positive_after": left.positive,
            "asymmetry": whole.asymmetry,
            "condition": whole.condition,
            "directions": (tuple(own[head].tolist()),) if head in own else (),
        }
        useful = rise > o.allowed_rise or math.isnan(fit_without)
        if useful or not with_head.fell_to(without):
            network.mask_head(layer, head, 1.0)
            self.patience[layer, head] = 2 * self.patience.get((layer, head), o.prune_patience)
            why = (
                f"without it the fit rises by {rise:.2%}, allowed {o.allowed_rise:.2%}"
                if useful
                else f"without it the free energy rises from {with_head.total:.6g} to {without.total:.6g}"
            )
            return GrowthEvent("restore", step, layer, (head,), why, threshold, heads_after=len(whole.heads), **common)
        outputs, parameters = network.outputs().detach().clone(), network.parameters_count()
        network.prune_heads(layer, [head])
        self.low.pop((layer, head), None)
        self.patience.pop((layer, head), None)
        return GrowthEvent(
            "prune",
            step,
            layer,
            (head,),
            f"without it the fit rises by {rise:.2%}, and its price comes back",
            threshold,
            drift=drift(outputs, network.outputs()),
            parameters_before=parameters,
            parameters_after=network.parameters_count(),
            heads_after=len(left.heads),
            must_fall=True,
            **common,
            **energy_pair(with_head, without),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "low": [[*key, count] for key, count in self.low.items()],
            "masked": [[layer, *at] for layer, at in self.masked.items()],
            "patience": [[*key, count] for key, count in self.patience.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.low = {(layer, head): count for layer, head, count in state["low"]}
        self.masked = {layer: (head, checks) for layer, head, checks in state["masked"]}
        self.patience = {(layer, head): count for layer, head, count in state["patience"]}
