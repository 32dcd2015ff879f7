"""The proof that two models are the same function, or the measure of how far they are not: their logits on the same tokens."""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from thalweg.config import to_plain
from thalweg.models import Decoder, DecoderCache
from thalweg.models.look import IGNORED
from thalweg.models.transformer import Transformer
from thalweg.surgery.text import UNITS, Sample, objective_of
from thalweg.surgery.wide import running

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}  # largest difference of a logit
SHORT = 24  # tokens of the passes that are padded
CHUNK = 64  # tokens whose probabilities are held at once: vocabularies are large
STEPS = 6  # tokens that are decoded one by one


@dataclass(frozen=True)
class Case:
    """One way of running both models: name, tokens compared, largest difference of a logit."""

    name: str
    tokens: int
    difference: float


@dataclass(frozen=True)
class Proof:
    """What a conversion did to the function of a model.

    claim: ``equal``, or ``warm start`` where the connection cannot begin as the model was. passed: whether every case stayed within
    ``tolerance`` (largest absolute difference of a logit); of a warm start, whether the model in our terms did, before its connection was
    changed. imported: that difference (None where the proof passed and nobody asked). difference, mean_difference: largest and mean
    absolute difference of a logit between the model and the result. kl: mean over tokens of KL(model || result), in nats; of a
    classification over sequences. loss_before, loss_after: mean on the text, in ``unit``; None where an encoder has nothing to answer.
    cases: the ways of running them. notes: what the result does not carry over.
    """

    source: str
    family: str
    connection: str
    connection_options: dict[str, Any]
    claim: Literal["equal", "warm start"]
    passed: bool
    dtype: str
    tolerance: float
    difference: float
    mean_difference: float
    kl: float
    loss_before: float | None
    loss_after: float | None
    imported: float | None
    tokens: int
    text: str
    text_sha256: str
    cut_by: str
    cases: tuple[Case, ...] = ()
    notes: tuple[str, ...] = ()
    unit: str = UNITS["next_token"]
    thalweg: str = ""
    schema: int = 1

    def plain(self) -> dict[str, Any]:
        """As it stands in ``proof.json``."""
        return to_plain(self)

    def lines(self) -> list[str]:
        """For people."""
        verdict = {
            ("equal", True): "equal",
            ("equal", False): "NOT equal",
            ("warm start", True): "warm start, not equal",
            ("warm start", False): "warm start of a model that was NOT read correctly",
        }[self.claim, self.passed]
        bound = f" (allowed: {self.tolerance:g})" if self.claim == "equal" else ""
        gaps = f"largest difference of a logit {self.difference:.2e}{bound}, mean {self.mean_difference:.2e}"
        return [
            f"{verdict}: {gaps}, in {self.dtype} on {self.tokens} tokens of {self.text}",
            line_of(self.loss_before, self.loss_after, self.unit, self.kl),
            *(f"note: {note}" for note in self.notes),
        ]


@dataclass(frozen=True)
class Comparison:
    """Two models on the same tokens; see :class:`Proof`."""

    cases: tuple[Case, ...]
    mean_difference: float
    kl: float
    loss_before: float | None
    loss_after: float | None
    tokens: int

    @property
    def difference(self) -> float:
        return largest(case.difference for case in self.cases)


def line_of(before: float | None, after: float | None, unit: str, kl: float) -> str:
    """Losses and KL, for people."""
    loss = "no loss" if before is None else f"loss {before:.6f} -> {after:.6f} {unit.replace('/', ' per ')}"
    return f"{loss}, KL {kl:.2e}"


def largest(values: Any) -> float:
    """The maximum, where a NaN is more than any number."""
    found = torch.tensor(list(values), dtype=torch.float64)
    return float(found.max())  # torch's maximum keeps NaN


def compare(theirs: nn.Module, ours: Transformer, sample: Sample, dtype: torch.dtype) -> Comparison:
    """Run both models in ``dtype`` on the rows of the sample: whole, short, padded on either side, and (decoders) with a cache in pieces,
    each against the other run in the same way."""
    device = next(ours.parameters()).device
    ids = sample.ids.to(device)
    length, causal = ids.shape[1], isinstance(ours, Decoder)
    cases, sums = [], torch.zeros(4, dtype=torch.float64, device=device)
    with running(dtype, theirs, ours):
        for i, (row, more, answers) in enumerate(examples(sample, causal, device)):
            before, after = logits_of(theirs, row, **more), logits_of(ours, row, **more)
            cases.append(Case(f"row {i}, {length} tokens", length, gap(before, after)))
            sums += torch.stack([(before - after).abs().mean(dtype=torch.float64), *scores(before, after, answers)])
            if i == 0:
                cases += [
                    Case(f"{n} tokens", n, gap(logits_of(theirs, row[:, :n]), logits_of(ours, row[:, :n])))
                    for n in sorted({1, 2, length // 2})
                ]
            if causal:
                cases.append(
                    Case(f"row {i}, cached", length, largest(map(gap, in_pieces(theirs, row), in_pieces(ours, row))))
                )
        for side, mask in padded(ids[:, : min(SHORT, length)]):
            short = ids[:, : mask.shape[1]]
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            before = logits_of(theirs, short, attention_mask=mask, position_ids=positions)
            after = logits_of(ours, short, attention_mask=mask)
            cases.append(Case(f"padded on the {side}", int(mask.sum()), gap(before, after, mask.bool())))
    mean, kl, *losses = (float(value) for value in sums / len(ids))
    if not causal and sample.labels is None:
        losses = [None, None]
    return Comparison(tuple(cases), mean, kl, losses[0], losses[1], sample.tokens)


def examples(
    sample: Sample, causal: bool, device: torch.device
) -> Iterator[tuple[Int[Tensor, "1 t"], dict[str, Tensor], Int[Tensor, " n"]]]:
    """Every row, what it is called with beside, and what each of its logits is to say, -100 where it says nothing that is known.

    Of a decoder's row the real tokens alone.
    """
    for i, row in enumerate(sample.ids.to(device)):
        more = {} if sample.mask is None else {"attention_mask": sample.mask[i : i + 1].to(device)}
        if causal:
            said = row if sample.labels is None else sample.labels[i].to(device)
            if sample.mask is not None:
                real = more.pop("attention_mask")[0].bool()
                row, said = row[real], said[real]
            answers = F.pad(said[1:], (0, 1), value=IGNORED)
        elif sample.labels is None:
            answers = torch.full_like(row, IGNORED)
        else:
            answers = sample.labels[i].to(device).reshape(-1)
        yield row[None], more, answers


def logits_of(model: nn.Module, ids: Tensor, **more: Tensor) -> Float[Tensor, "b ... v"]:
    """The logits of a model of transformers or of ours, in whatever dtype it gives them: by token, or of a classification by sequence."""
    return model(ids, **more).logits


def padded(ids: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Masks that take the first or the last third of the last row away."""
    cut = max(1, ids.shape[1] // 3)
    for side, where in (("left", slice(0, cut)), ("right", slice(ids.shape[1] - cut, None))):
        mask = torch.ones_like(ids)
        mask[-1, where] = 0
        yield side, mask


def in_pieces(model: nn.Module, row: Tensor) -> Iterator[Float[Tensor, "1 t v"]]:
    """The logits of one row with a cache: those of half of it, of the next tokens one by one, and of the rest."""
    half = row.shape[1] // 2
    steps = min(STEPS, row.shape[1] - half - 1)
    edges = [0, half, *range(half + 1, half + steps + 1), row.shape[1]]
    cache: Any = DecoderCache() if isinstance(model, Decoder) else DynamicCache(config=model.config)  # type: ignore[arg-type]
    return (model(row[:, a:b], cache=cache).logits for a, b in itertools.pairwise(edges) if a < b)


def gap(
    before: Float[Tensor, "b ... v"], after: Float[Tensor, "b ... v"], real: Bool[Tensor, "b t"] | None = None
) -> float:
    """Largest absolute difference of a logit, over the real tokens; NaN where either side has one."""
    found = (before - after).abs().amax(-1)
    return float((found if real is None or found.ndim == 1 else found[real]).max())


def scores(
    before: Float[Tensor, "1 ... v"], after: Float[Tensor, "1 ... v"], answers: Int[Tensor, " n"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one row: mean KL(before || after), and the mean losses of both where an answer is known (NaN: nowhere); nats, in float64, a few
    tokens at a time."""
    before, after = (logits.flatten(0, -2) for logits in (before, after))
    sums = torch.zeros(3, dtype=torch.float64, device=before.device)
    for some in torch.arange(len(before), device=before.device).split(CHUNK):
        first, second = (torch.log_softmax(logits[some].double(), -1) for logits in (before, after))
        kl = (first.exp() * (first - second)).sum()
        losses = (F.nll_loss(part, answers[some], ignore_index=IGNORED, reduction="sum") for part in (first, second))
        sums += torch.stack([kl, *losses])
    known = (answers != IGNORED).sum()
    return sums[0] / len(before), sums[1] / known, sums[2] / known


def prove(
    source: dict[str, str],
    found: Comparison,
    sample: Sample,
    *,
    ours: Transformer,
    equal: bool,
    imported: float | None,
    dtype: torch.dtype,
    notes: tuple[str, ...],
) -> Proof:
    """The proof that a comparison amounts to. ``imported``: the difference before the connection was changed."""
    from thalweg._version import __version__

    tolerance = TOLERANCE[dtype]
    return Proof(
        **source,
        connection=ours.config.connection,
        connection_options=to_plain(ours.config.connection_options),
        claim="equal" if equal else "warm start",
        passed=(found.difference if equal or imported is None else imported) <= tolerance,
        dtype=str(dtype).removeprefix("torch."),
        tolerance=tolerance,
        difference=found.difference,
        imported=imported,
        text=sample.text,
        text_sha256=sample.sha256,
        cut_by=sample.cut_by,
        notes=notes,
        unit=UNITS[objective_of(ours.config)],
        thalweg=__version__,
        **{f.name: getattr(found, f.name) for f in dataclasses.fields(found)},
    )
