"""Several probes over one model and text, each apart from the others: what does not apply says why, what fails says how, the rest goes on."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from thalweg import config
from thalweg.capture.limits import longest_of, vocabulary_of, window_length
from thalweg.capture.locating import locate
from thalweg.capture.measure import LENGTH, check_ids, encoder_of, padding_of, prove_rows
from thalweg.capture.windows import Text, cut
from thalweg.continuum.base import ENOUGH, SKETCH, Collector, Finding, Probe, Subject, batch_of, registry
from thalweg.continuum.passes import read
from thalweg.errors import InputError, ThalwegError, first_line
from thalweg.records import Measurement, Measurements

NO_TEXT = "it reads a text, and none was given"
OF = {"model": "a model", "trajectory": "a trajectory of weights"}

Listener = Callable[[str, Finding | None], Any]


def probe(
    subject: Any, texts: Iterable[Any] | None = None, only: Sequence[str] | None = None, **more: Any
) -> Measurements:
    """The rows of all probes that apply to a model or a :class:`thalweg.continuum.Trajectory`.

    only: names of probes (None: all of its kind). A probe that does not apply leaves the row ``NAME.not_applicable``, one that failed
    ``NAME.failed``: their value is NaN, the reason stands in ``null_kind``. more: as for :func:`findings`, which gives words and figures too.
    Raises: as :func:`findings`.
    """
    rows = Measurements()
    for found in findings(subject, texts, only, **more):
        rows.extend(found.rows)
        for name in ("not_applicable", "failed"):
            if why := getattr(found, name):
                rows.add(f"{found.probe}.{name}", math.nan, null_kind=why)
    return rows


def findings(
    subject: Any,
    texts: Iterable[Any] | None = None,
    only: Sequence[str] | None = None,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    tokenizer: Any = None,
    length: int | None = None,
    tokens: int | None = ENOUGH,
    bos: int | None = None,
    map: Any = None,
    allow_unverified: bool = False,
    name: str = "",
    listen: Listener | None = None,
) -> tuple[Finding, ...]:
    """What every probe found, in the order of their names or of ``only``; of a model first the proof of its capture, as ``capture``.

    subject: a model, a place that :func:`thalweg.capture.open_model` opens, or a trajectory of weights. texts: documents, strings or lists of
    token ids, read in disjoint windows of ``length`` tokens (None: 512, or what the model takes) until ``tokens`` are read; rows of fewer than
    8,192 tokens are stamped ``sketch``. options: by probe, plain values for its ``Options``. listen(name, finding): called with None
    before a probe begins, then with what it found; the proof comes first, as ``capture``. The model is left as it was: weights, modes, hooks.
    Raises: InputError, UnknownNameError for what cannot be probed at all; ProofError where the capture of the model cannot be proved.
    """
    made = chosen_options(only, options)
    chosen = list(made)
    seen = subject_of(subject, tokenizer, name, map)
    if only is None:
        chosen = [one for one in chosen if registry[one].kind == seen.kind]
    text, found = None, []
    if seen.kind == "model" and texts is not None:
        text = _text(seen, texts, length, tokens, bos)
        found.append(_proved(seen, text, allow_unverified))
        if listen is not None:
            listen("capture", found[-1])
    elif texts is not None:
        raise InputError("a trajectory of weights is probed without a text; leave it out")
    shared = Shared(seen, text, made)
    for one in chosen:
        if listen is not None:
            if shared.due(one):
                listen(shared.words, None)
                shared.make()
            listen(one, None)
        found.append(run_one(one, seen, text, made[one], shared))
        if listen is not None:
            listen(one, found[-1])
    return tuple(found)


class Shared:
    """The pass over the text that several probes share: those that leave :meth:`Probe.run` alone and read batches of one size.

    It is made once, when the first of them is due. A probe whose collector cannot be made or raises is left to itself: it is run alone, and
    says then what is wrong. So are all where the pass itself fails.
    """

    def __init__(self, subject: Subject, text: Text | None, options: Mapping[str, Any]):
        self.subject, self.text, self.options, self.made = subject, text, options, False
        self.seconds: dict[str, float] = {}
        self.collectors: dict[str, Collector] = {}
        sharing: dict[int, list[str]] = {}
        for name, own in options.items():
            if text is not None and registry[name].run is Probe.run and not _silent(registry[name](), subject, text):
                sharing.setdefault(batch_of(text, own, subject)[0], []).append(name)
        self.names = max(sharing.values(), key=len, default=[])
        if len(self.names) < 2:
            self.names = []

    @property
    def words(self) -> str:
        return f"one pass over the text for {', '.join(self.names)}"

    def due(self, name: str) -> bool:
        """Whether the pass should be made before this probe."""
        return name in self.names and not self.made

    def make(self) -> None:
        """Read the text."""
        self.made = True
        text, subject = self.text, self.subject
        assert text is not None
        for name in self.names:
            probe, began = registry[name](), time.perf_counter()
            try:
                self.collectors[name] = probe.collect(subject, text, self.options[name])
            except Exception:  # it says so when it is run alone
                continue
            self.seconds[name] = time.perf_counter() - began
        if len(self.collectors) < 2:
            self.collectors.clear()
            return
        size, padding = batch_of(text, self.options[self.names[0]], subject)
        try:
            reading = read(subject.place, text, self.collectors, size, padding)
        except Exception:
            self.collectors.clear()
            return
        share = reading.rest / len(self.collectors)
        self.seconds = {name: self.seconds[name] + reading.seconds[name] + share for name in self.collectors}
        for name in reading.failed:
            del self.collectors[name]


def run_one(name: str, subject: Subject, text: Text | None, options: Any, shared: Shared | None = None) -> Finding:
    """One probe. What it raises becomes ``failed``: a probe never takes another with it.

    shared: a pass that has been made. ``seconds`` hold what the probe took of it, and an equal part of what the model took.
    """
    entry = registry.entry(name)
    probe, began = entry.value(), time.perf_counter()
    collector = None if shared is None else shared.collectors.pop(name, None)
    before = 0.0 if collector is None or shared is None else shared.seconds[name]
    head: dict[str, Any] = {"probe": entry.name, "title": probe.title or entry.summary, "source": entry.source}
    try:
        why = _why_not(probe, subject, text)
        if why:
            return Finding(**head, not_applicable=why)
        if collector is not None and text is not None:
            found = probe.finish(collector, subject, text, options)
        else:
            found = probe.run(subject, text if probe.text else None, options)
    except ThalwegError as error:
        found = Finding(name, failed=str(error))
    except Exception as error:  # also a bug of a third party's probe leaves the others alone
        found = Finding(name, failed=f"{type(error).__name__}: {first_line(error)}")
    sketch = found.sketch or bool(probe.text and text is not None and text.tokens < ENOUGH)
    words = f"{SKETCH}: {text.tokens if text is not None else 0:,} of {ENOUGH:,} tokens" if sketch else ""
    rows = Measurements(_stamped(row, subject.name, words) for row in found.rows)
    seconds = before + time.perf_counter() - began
    return dataclasses.replace(found, **head, rows=rows, sketch=sketch, seconds=seconds)


def subject_of(subject: Any, tokenizer: Any = None, name: str = "", map: Any = None) -> Subject:
    """A model, a place or a trajectory as a :class:`Subject`. Raises: InputError, CaptureError."""
    if isinstance(subject, Subject):
        return subject
    if isinstance(subject, str | Path):
        from thalweg.capture.opening import open_model

        opened = open_model(subject, tokenizer=tokenizer)
        subject, tokenizer, name = opened.model, opened.tokenizer, name or opened.name
    if isinstance(subject, nn.Module):
        called = name or getattr(getattr(subject, "config", None), "name_or_path", "") or type(subject).__name__
        return Subject(locate(subject, map), tokenizer=tokenizer, name=called)
    from thalweg.continuum.trajectory import Trajectory

    if isinstance(subject, Trajectory):
        return Subject(trajectory=subject, name=name)
    raise InputError(
        f"a probe looks at a model (a torch module, a folder, a name) or a Trajectory, got {type(subject).__name__}"
    )


def chosen_options(only: Sequence[str] | None, options: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    """The options of every probe that is asked for, in the order of the probes.

    Raises: InputError, UnknownNameError for a name or an option that is not there, or for options of a probe that is not asked for.
    """
    chosen, given = _chosen(only), {registry.entry(one).name: values for one, values in (options or {}).items()}
    for one in given:
        if one not in chosen:
            raise InputError(
                f"there are options for the probe {one!r}, which is not among those asked for ({', '.join(chosen)}); "
                f"ask for it too, or leave its options out"
            )
    return {one: config.build(registry[one].Options, given.get(one, {}), where=one) for one in chosen}


def _chosen(only: Sequence[str] | None) -> list[str]:
    if only is None:
        return registry.names()
    if isinstance(only, str):
        raise InputError(f"only is a list of names of probes, got the text {only!r}")
    found = list(dict.fromkeys(registry.entry(one).name for one in only))
    if not found:
        raise InputError(f"only names no probe; known: {', '.join(registry.names())}")
    return found


def _why_not(probe: Probe, subject: Subject, text: Text | None) -> str | None:
    if probe.kind != subject.kind:
        return f"it looks at {OF[probe.kind]}, and this is {OF[subject.kind]}"
    why = probe.applies(subject)
    return why or (NO_TEXT if probe.text and text is None else None)


def _silent(probe: Probe, subject: Subject, text: Text) -> bool:
    """Whether a probe has nothing to look at; of one that cannot even say so it is said when it is run."""
    try:
        return _why_not(probe, subject, text) is not None
    except Exception:
        return True


def _text(subject: Subject, texts: Iterable[Any], length: int | None, tokens: int | None, bos: int | None) -> Text:
    window = window_length(longest_of(subject.place.model), length, LENGTH)
    text = cut(texts, encoder_of(subject.tokenizer), window, tokens, bos)
    check_ids(text, vocabulary_of(subject.model) or 0)
    return text


def _proved(subject: Subject, text: Text, allow_unverified: bool) -> Finding:
    rows, first = Measurements(), next(text.batches(2, padding_of(subject.tokenizer)))
    words = prove_rows(subject.place, first, allow_unverified, rows)
    return Finding("capture", "Proof of the capture", words, rows=rows.stamped(model=subject.name))


def _stamped(row: Measurement, model: str, words: str) -> Measurement:
    split = "; ".join(part for part in (words, row.split) if part)
    return dataclasses.replace(row, model=row.model or model, split=split)
