"""What a probe of the continuous picture is, the registry of probes, and what all of them share.

    probe.applies(subject)                        # None, or why not, in words
    probe.run(subject, text, options)             # -> Finding: rows with nulls, caveats, figures, one line

A probe that only looks on while the model reads the text leaves ``run`` alone and shares one pass with the others that do:

    probe.collect(subject, text, options)         # -> Collector: what it needs of the pass, and what it keeps
    probe.finish(collector, subject, text, options)   # -> Finding

One file is one probe: a subclass of :class:`Probe` under ``@register(name, summary=..., source=...)``. ``source`` says which numbers the
source has and which are derived by us. A probe changes nothing: weights stay bitwise the same and hooks are gone when it returns or raises.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from thalweg.capture.layout import Located
from thalweg.capture.tables import LEVEL, Units
from thalweg.capture.windows import Batch, Text
from thalweg.continuum.passes import Collector, read
from thalweg.errors import InputError
from thalweg.records import Measurements
from thalweg.records.findings import Figure, Finding
from thalweg.registry import Entry, Registry
from thalweg.statistics import ratio_intervals

ENOUGH = 8192  # real tokens; rows of fewer are a sketch
SKETCH = "sketch"  # begins the field ``split`` of every row of a sketch


@dataclass(frozen=True)
class Subject:
    """What a probe looks at: a located model, or a trajectory of weights (the other one is None).

    tokenizer: of the model, or None. name: for people; it is stamped into the rows by whoever runs the probe, not by the probe.
    """

    located: Located | None = field(default=None, repr=False)
    trajectory: Any = field(default=None, repr=False)
    tokenizer: Any = field(default=None, repr=False)
    name: str = ""

    @property
    def model(self) -> nn.Module:
        """The model. Raises: InputError for a trajectory."""
        return self.place.model

    @property
    def place(self) -> Located:
        """The located model. Raises: InputError for a trajectory."""
        if self.located is None:
            raise InputError("this probe looks at a model, got a trajectory; run it on a model")
        return self.located

    @property
    def kind(self) -> Literal["model", "trajectory"]:
        return "model" if self.located is not None else "trajectory"


@dataclass(frozen=True)
class ProbeOptions:
    """Options of every probe; a probe's own dataclass extends it.

    seed: of everything random. batch_size: windows in one pass, 0: as many as keep the logits small.
    """

    seed: int = 0
    batch_size: int = 0

    def __post_init__(self) -> None:
        """Raises: InputError. One of a subclass calls it too."""
        self.at_least(batch_size=0, seed=0)

    def at_least(self, **least: float) -> None:
        """Raises: InputError, which names the probe and the option, for one that lies below its least value or is no number."""
        for name, value in least.items():
            if not getattr(self, name) >= value:
                of = [entry.name for entry in entries() if entry.value.Options is type(self)]
                whose = of[0] if len(of) == 1 else "a probe"  # several may share their options
                raise InputError(f"{name} of {whose} must be at least {value}, got {getattr(self, name)}")


class Probe:
    """One probe; subclass it, once a file.

    kind: what it looks at. text: whether it reads one (then ``run`` is given a :class:`thalweg.capture.windows.Text`, else None).
    Options: its frozen dataclass of options. title: for people, the head of its part of a report.
    """

    kind: ClassVar[Literal["model", "trajectory"]] = "model"
    text: ClassVar[bool] = True
    Options: ClassVar[type[ProbeOptions]] = ProbeOptions
    title: ClassVar[str] = ""

    def applies(self, subject: Subject) -> str | None:
        """None, or in one clause why the probe has nothing to say of this subject (``it has no RMSNorm``)."""
        return None

    def run(self, subject: Subject, text: Text | None, options: Any) -> Finding:
        """Look, and say what was found. ``Finding.probe``, ``title``, ``source``, ``seconds`` and ``sketch`` are filled in by the caller.

        By default one pass over the text for what :meth:`collect` gives, then :meth:`finish`; a probe with passes of its own overrides it.
        Raises: ThalwegError; the caller makes it the ``failed`` of the finding and goes on with the other probes.
        """
        assert text is not None
        collector = self.collect(subject, text, options)
        size, padding = batch_of(text, options, subject)
        for error in read(subject.place, text, {"": collector}, size, padding).failed.values():
            raise error
        return self.finish(collector, subject, text, options)

    def collect(self, subject: Subject, text: Text, options: Any) -> Collector:
        """What keeps the probe's part of one pass over the text, which other probes may share. Raises: ThalwegError."""
        raise NotImplementedError

    def finish(self, collector: Any, subject: Subject, text: Text, options: Any) -> Finding:
        """What was found, from a collector of :meth:`collect` that has seen the pass. As :meth:`run`."""
        raise NotImplementedError


registry: Registry[type[Probe]] = Registry("probe", package="thalweg.continuum", group="thalweg.probes")
register = registry.register


def names() -> list[str]:
    """Names of all probes, those of third parties included."""
    return registry.names()


def entries() -> Iterator[Entry[type[Probe]]]:
    """Every probe with its summary and source."""
    return registry.entries()


class UnitMeans:
    """Means of many columns over tokens, with intervals over the units (documents or windows) that the tokens come from.

    ``add(unit, values, weight)``: values [n columns] of n tokens (or sums of several: then ``weight`` [n] or [n columns] counts them) and the
    unit [n] of each. Kept: two numbers for each unit and column.
    """

    def __init__(self, units: Units, columns: int):
        self.units = units
        self.sums, self.weights = (torch.zeros(units.count, columns, dtype=torch.float64) for _ in range(2))

    def add(self, unit: Tensor, values: Tensor, weight: Tensor | None = None) -> None:
        values = values.detach().double().cpu()
        weight = torch.ones_like(values) if weight is None else weight.detach().double().cpu()
        weight = weight[:, None] if weight.ndim == 1 else weight
        unit = unit.cpu()
        self.sums.index_add_(0, unit, values)
        self.weights.index_add_(0, unit, weight.expand_as(values).contiguous())

    @property
    def tokens(self) -> int:
        """The largest weight of a column."""
        return int(self.weights.sum(0).max())

    def rows(self, rows: Measurements, names: Sequence[str], fields: Sequence[dict[str, Any]]) -> None:
        """Add one row a column: the mean, its interval over units, ``n`` (units that have weight) and the fields of the column."""
        low, high = ratio_intervals(self.sums.numpy(), self.weights.numpy(), level=LEVEL)
        total, weight = self.sums.sum(0).numpy(), self.weights.sum(0).numpy()
        for i, (name, own) in enumerate(zip(names, fields, strict=True)):
            if not weight[i]:
                continue
            seen = int((self.weights[:, i] > 0).sum())
            words = f"{LEVEL:.0%} percentile bootstrap over {seen} {self.units.name} of {int(weight[i])} values"
            ends = {"low": low[i], "high": high[i], "interval": words} if np.isfinite(low[i]) else {}
            rows.add(name, total[i] / weight[i], n=seen, **ends, **own)


def batch_of(text: Text, options: ProbeOptions, subject: Subject) -> tuple[int, int]:
    """How many windows go in one batch, as the options say, and the token that pads them."""
    from thalweg.capture.limits import vocabulary_of
    from thalweg.capture.plan import rows_of_a_batch

    size = options.batch_size or rows_of_a_batch(text.length, vocabulary_of(subject.model) or 0)
    return size, getattr(subject.tokenizer, "pad_token_id", None) or 0


def batches(text: Text, options: ProbeOptions, subject: Subject) -> Iterator[Batch]:
    """The batches of a text, for a probe with passes of its own."""
    return text.batches(*batch_of(text, options, subject))


__all__ = [
    "ENOUGH",
    "SKETCH",
    "Collector",
    "Entry",
    "Figure",
    "Finding",
    "Probe",
    "ProbeOptions",
    "Subject",
    "UnitMeans",
    "batch_of",
    "batches",
    "entries",
    "names",
    "register",
    "registry",
]
