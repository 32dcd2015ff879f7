"""A probe in other people's training loops: on every k-th step, the geometry of the updates in the training pass itself."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.capture.layout import Located
from thalweg.capture.locating import locate
from thalweg.capture.proof import TOLERANCE, Replay, dtype_name, dtype_of
from thalweg.capture.states import RANKS, STATE_MEASURES, StateStatistics
from thalweg.capture.statistics import LAYER_MEASURES, UPDATE_MEASURES, Statistics, StatisticsOptions
from thalweg.capture.tables import Units
from thalweg.capture.watching import Event, Recorder
from thalweg.errors import (
    CaptureError,
    InputError,
    ProofError,
    ThalwegError,
    ThalwegWarning,
    UnknownNameError,
    first_line,
)
from thalweg.records import Measurement, Measurements
from thalweg.records.export import FORMATS, check_format, export
from thalweg.records.files import append_lines
from thalweg.records.measurements import HEADER

MEASURES = (
    *STATE_MEASURES,
    *RANKS,
    *(f"{name}.{kind}" for kind in ("raw", "step") for name in UPDATE_MEASURES),
    *LAYER_MEASURES,
    "state_cosine",
)
DEFAULT = (
    "parallel_coefficient.raw",
    "parallel_over_perpendicular.raw",
    "parallel_fraction.raw",
    "relative_update.raw",
    "update_rms.raw",
    "layer_drop_cosine",
    "rms",
    "anisotropy",
)
RANKS_MEASURED = ("first", "all")
CAPTURE_ERROR = "capture_error"


class Probe:
    """Measures a model while somebody trains it, without a pass of its own.

        with thalweg.Probe(model, every=100) as probe:
            for batch in loader:
                ...                      # forward, backward, optimizer
                probe.step()             # once per step of the optimizer
        probe.save("geometry.parquet")

    On steps 0, ``every``, 2 ``every`` ... the first forward pass in training mode with gradients is watched: one microbatch. Passes in
    evaluation mode, the other microbatches of an accumulated step and what gradient checkpointing repeats in the backward pass are not
    counted. What is seen is detached; gradients, random numbers and training mode stay as they are, bit for bit. On a watched step
    compiled code runs uncompiled (see ``notes``); a wrapper of torch that cannot be looked into is refused.

    The first measured pass is also replayed at every site: next state = what the site makes of state and update. Where that fails, as
    with dropout between a sublayer and the addition, :meth:`step` raises. Troubles later on (a state that is not finite) are warnings, and
    that step has no rows.

    model: any that :func:`thalweg.capture.locate` finds a stream in; inside DistributedDataParallel and torch.compile too. every: steps from
    one measured step to the next. measures: names to keep (``MEASURES``; ``DEFAULT`` where None); those of effective rank cost an
    eigenvalue problem of the model's width at up to nine depths. map: of the layers. path: a file of JSON lines that every measured step is
    appended to; memory then does not grow. ranks: of a distributed run, measure on the ``first`` only or on ``all``, whose rows then say
    ``run="rank 3"`` and whose file is ``NAME-rank3.jsonl``. first_step: number of the step that comes next. name: of the model, in every row.
    tolerance: of the replay; None takes that of the dtype. Raises: InputError, CaptureError, UnknownNameError.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        *,
        measures: Sequence[str] | None = None,
        map: Any = None,
        path: str | Path | None = None,
        ranks: str = "first",
        first_step: int = 0,
        name: str = "",
        tolerance: float | None = None,
    ):
        for label, value, least in (("every", every, 1), ("first_step", first_step, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{label} must be a whole number of at least {least}, got {value!r}")
        if ranks not in RANKS_MEASURED:
            raise UnknownNameError("choice of ranks", ranks, RANKS_MEASURED)
        self.every, self.number, self.name, self.tolerance = every, first_step, name, tolerance
        self.measures = frozenset(_checked(measures))
        self.located = locate(model, map)
        self.rank, world = _rank()
        self.measuring = ranks == "all" or self.rank == 0
        self.run = f"rank {self.rank}" if ranks == "all" and world > 1 else ""
        self.path = None if path is None else _path_of(path, self.rank if self.run else None)
        self.notes: list[str] = ["compiled code runs uncompiled on measured steps"] if _is_compiled(model) else []
        self.proved: float | None = None
        self._rows = Measurements()
        self._latest = Measurements()
        self._attached: ExitStack | None = None
        self._watching: _Watching | None = None
        self._started = self._stepped = False
        self._warned: set[str] = set()

    # a probe is started, stepped and stopped

    def start(self) -> "Probe":
        """Begin to watch; the next step is number ``first_step``. Raises: InputError where it has begun already."""
        if self._started:
            raise InputError("the probe has been started already; stop it first")
        self._started, self._stepped = True, False
        self._attach()
        return self

    def stop(self) -> None:
        """Take every hook away. A measured step that :meth:`step` did not close is left out. Stopping twice does nothing.

        Warns where the model was trained and :meth:`step` was never called, so that nothing could be measured.
        """
        self._end(silent=not self.measuring)

    def _end(self, *, silent: bool) -> None:
        never = self._started and not self._stepped and self._watching is not None and self._watching.done
        self._detach()
        self._watching, self._started = None, False
        if never and not silent:
            line = "step() was never called, so nothing was measured; call it once per step of the optimizer"
            self.notes.append(line)
            warnings.warn(f"probe: {line}", ThalwegWarning, stacklevel=3)

    def __enter__(self) -> "Probe":
        return self.start()

    def __exit__(self, *error: object) -> None:
        self._end(silent=not self.measuring or error[0] is not None)

    def step(self) -> Measurements | None:
        """Close a step: its rows, or None where it was not measured. Call it once per step of the optimizer.

        Raises: InputError before :meth:`start`; ProofError, CaptureError where the first measured pass could not be replayed (the probe
        is stopped then); InputError where ``path`` cannot be written.
        """
        if not self._started:
            raise InputError("the probe has not been started; use it as a context manager or call start()")
        self._stepped = True
        found = self._close()
        self.number += 1
        self._attach()
        return found

    def _attach(self) -> None:
        if not self.measuring or self.number % self.every:
            return
        self._watching = _Watching(self)
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for handle in self._watching.attach():
                stack.callback(handle.remove)
            self._attached = stack.pop_all()

    def _detach(self) -> None:
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.close()

    def _close(self) -> Measurements | None:
        self._detach()
        watching, self._watching = self._watching, None
        if watching is None:
            return None
        trouble, rows = watching.trouble, Measurements()
        if trouble is None and watching.statistics is None:
            self._warn("no forward pass of the model in training mode was seen; is it this model that is trained?")
            return None
        if trouble is None and watching.statistics is not None:
            try:
                rows = watching.statistics.measurements()
            except ThalwegError as error:
                trouble = error
        if trouble is not None:
            if self.proved is None and isinstance(trouble, CaptureError | ProofError):
                self.stop()
                raise trouble
            self._warn(first_line(trouble))
            return None
        if watching.replay is not None:
            self.proved = max(watching.replay.errors.values())
            rows.add(CAPTURE_ERROR, self.proved, dtype=dtype_name(self.located.model))
        return self._keep(rows)

    def _keep(self, rows: Measurements) -> Measurements:
        kept = Measurements(row for row in rows if row.measure in self.measures or row.measure == CAPTURE_ERROR)
        self._latest = kept.stamped(step=self.number, split="train", model=self.name, run=self.run)
        if self.path is None:
            self._rows.extend(self._latest)
        else:
            append_lines(self.path, self._latest.lines()[1:], header=HEADER)
        return self._latest

    def _warn(self, line: str) -> None:
        """One warning for each kind of trouble; every one is noted."""
        self.notes.append(f"step {self.number}: {line}")
        if line not in self._warned:
            self._warned.add(line)
            warnings.warn(f"probe, step {self.number}: not measured: {line}", ThalwegWarning, stacklevel=4)

    # what was measured

    @property
    def measurements(self) -> Measurements:
        """All rows so far; those of ``path`` where there is one."""
        if self.path is None:
            return self._rows
        return Measurements.load(self.path) if self.path.exists() else Measurements()

    def summary(self, rows: Measurements | None = None) -> "Summary":
        """For a log: the mean over the sites of a kind, ``parallel_fraction.raw/attention``; printed, it is a table.

        rows: None takes the last measured step.
        """
        rows = self._latest if rows is None else rows
        groups: dict[str, list[float]] = {}
        for row in rows:
            groups.setdefault("/".join(part for part in (row.measure, _kind(row)) if part), []).append(row.value)
        steps = sorted({row.step for row in rows if row.step is not None})
        return Summary({key: sum(values) / len(values) for key, values in groups.items()}, steps)

    def to_pandas(self) -> Any:
        """A table, one row per measurement. Raises: MissingExtraError without pandas."""
        return self.measurements.to_pandas()

    def save(self, path: str | Path) -> None:
        """Write all rows: ``.jsonl``, ``.parquet`` or ``.csv``. Raises: InputError, also where there is no such folder; MissingExtraError."""
        _check_folder(check_format(path))
        export(self.measurements, path)


class Summary(dict[str, float]):
    """``MEASURE/KIND`` -> mean over the sites of that kind; as text a table, one line for each measure."""

    def __init__(self, values: Mapping[str, float], steps: Sequence[int]):
        super().__init__(values)
        self.steps = tuple(steps)

    def __str__(self) -> str:
        if not self:
            return "nothing was measured yet; step() closes a measured step, once per step of the optimizer"
        cells = {key: (*key.split("/", 1), "")[:2] for key in self}
        kinds = list(dict.fromkeys(kind for _, kind in cells.values() if kind))
        table = [["mean over sites", *kinds, *([""] if any(not kind for _, kind in cells.values()) else [])]]
        for measure in dict.fromkeys(measure for measure, _ in cells.values()):
            found = {kind: self[key] for key, (name, kind) in cells.items() if name == measure}
            table.append(
                [
                    measure,
                    *(f"{found[kind]:.4g}" if kind in found else "" for kind in [*kinds, ""][: len(table[0]) - 1]),
                ]
            )
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in table
        ]
        when = (
            f"steps {self.steps[0]:,} to {self.steps[-1]:,}"
            if len(self.steps) > 1
            else f"step {self.steps[0]:,}"
            if self.steps
            else ""
        )
        return "\n".join([*([when] if when else []), *(line.rstrip() for line in lines)])


class _Watching(Recorder):
    """One measured step: hooks that count the first training pass and never raise inside somebody's forward."""

    def __init__(self, probe: Probe):
        super().__init__(probe.located, self.see_site)
        self.statistics: Statistics | None = None
        self.trouble: ThalwegError | None = None
        self.replay = None if probe.proved is not None else Replay(probe.located, _allowed(probe))
        self.ranked = bool(probe.measures & set(RANKS))
        self.done = self.inside = False

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inside = not self.done and model.training and torch.is_grad_enabled()
        if self.inside:
            super().begin(model, args, kwargs)

    def finish(self, model: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if not self.inside:
            return
        self.inside, broken = False, result is None
        try:
            super().finish(model, args, None if self.trouble is not None else result)
        except CaptureError as error:
            self.trouble = error
        if broken:  # the pass itself raised: nothing of it counts, and a repeated one may
            self.statistics, self.trouble = None, None
            if self.replay is not None:
                self.replay = Replay(self.located, self.replay.allowed)
        self.done = not broken

    def see_site(self, event: Event) -> None:
        if self.trouble is not None:
            return
        try:
            if self.replay is not None:
                self.replay(event)
            if self.statistics is None:
                self.statistics = _statistics(self.located, len(event.real), self.ranked)
                self.statistics.begin(torch.arange(len(event.real)))
            self.statistics(event)
        except ThalwegError as error:
            self.trouble = error
        except (RuntimeError, ValueError, IndexError) as error:  # of tensors: out of memory, not finite
            self.trouble = InputError(first_line(error))


def _statistics(located: Located, rows: int, ranked: bool) -> Statistics:
    units = Units(rows, "sequences")
    made = Statistics(located, units, StatisticsOptions())
    if not ranked:
        made.states = [
            StateStatistics(located.width, units, moments=False, entered=i > 0) for i in range(len(made.states))
        ]
    return made


def _allowed(probe: Probe) -> float:
    dtype = dtype_of(probe.located.model)
    if probe.tolerance is not None:
        return probe.tolerance
    if dtype not in TOLERANCE:
        raise InputError(f"a replay in {dtype} has no stated tolerance; give one by tolerance")
    return TOLERANCE[dtype]


def _checked(measures: Sequence[str] | None) -> Sequence[str]:
    if isinstance(measures, str):
        raise InputError(f"measures must be a list of names, got the text {measures!r}")
    for name in measures or ():
        if name not in MEASURES:
            raise UnknownNameError("measure of a probe", name, MEASURES)
    return DEFAULT if measures is None else measures


def _path_of(path: str | Path, rank: int | None) -> Path:
    found = Path(path)
    if found.suffix != ".jsonl":
        raise InputError(f"path must end in .jsonl, got {found}; write other formats ({', '.join(FORMATS)}) by save()")
    _check_folder(found)
    return found if rank is None else found.with_name(f"{found.stem}-rank{rank}.jsonl")


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}; make it or choose another place")


def _kind(row: Measurement) -> str:
    return "" if row.measure == CAPTURE_ERROR else row.branch or row.site


def _rank() -> tuple[int, int]:
    """Rank and size of a distributed run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _is_compiled(model: nn.Module) -> bool:
    return any(type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in model.modules())
