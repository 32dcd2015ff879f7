"""What became of the predictions: KL of the logits, loss of both models, agreement on the likeliest token, by unit of the text."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from thalweg.capture.histogram import POSITIVE
from thalweg.capture.layout import Located
from thalweg.capture.states import Tokens
from thalweg.capture.tables import LEVEL, Entry, Table, Units, add_rows
from thalweg.capture.windows import NOT_SCORED
from thalweg.records import Measurements
from thalweg.statistics import ratio_intervals

CHUNK = 256  # tokens whose logits live at once


@dataclass(frozen=True)
class Unembedding:
    """From what the unembedding is given to logits, with the scale and the soft cap of the model."""

    head: nn.Module
    scale: float
    cap: float | None

    @classmethod
    def of(cls, located: Located) -> "Unembedding":
        """Of a model that has one."""
        assert located.head is not None
        return cls(located.module(located.head), located.logit_scale, located.logit_softcap)

    def __call__(self, hidden: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Logits, in float32 or wider."""
        with torch.no_grad():
            found = self.head(hidden)
        found = found.float() if found.dtype in (torch.bfloat16, torch.float16) else found
        found = found * self.scale if self.scale != 1 else found
        return found if self.cap is None else self.cap * torch.tanh(found / self.cap)


def kl_of(dense: Float[Tensor, "n v"], compressed: Float[Tensor, "n v"]) -> Float[Tensor, " n"]:
    """KL(dense || compressed) of the distributions of two rows of logits, in nats; exactly 0 for equal logits."""
    p, q = F.log_softmax(dense, -1), F.log_softmax(compressed, -1)
    return (p.exp() * (p - q)).double().sum(-1)


class LogitStatistics:
    """Columns by unit: KL, agreement; sums of the losses of both models."""

    def __init__(self, units: Units):
        self.units = units
        self.table = Table({"kl": POSITIVE, "agree": None}, units)
        self.nats = torch.zeros(3, units.count, dtype=torch.float64)  # dense, compressed, scored

    @property
    def bytes(self) -> int:
        return self.table.bytes + self.nats.nbytes

    def add(
        self,
        dense: tuple[Unembedding, Float[Tensor, "b t d"]],
        compressed: tuple[Unembedding, Float[Tensor, "b t d"]],
        tokens: Tokens,
        targets: Tensor,
    ) -> None:
        """Count the tokens of a batch: of both models, the unembedding and what it was given; targets [b t]."""
        (one, mine), (two, theirs) = dense, compressed
        flat = [x.flatten(0, 1) if tokens.real is None else x[tokens.real] for x in (mine, theirs)]
        wanted = (targets.flatten() if tokens.real is None else targets[tokens.real.to(targets.device)]).to(
            flat[0].device
        )
        for start in range(0, len(flat[0]), CHUNK):
            part = slice(start, start + CHUNK)
            a, b = one(flat[0][part]), two(flat[1][part]).to(flat[0].device)
            agree = (a.argmax(-1) == b.argmax(-1)).double()
            self.table.add(torch.stack([kl_of(a, b), agree]), tokens.unit[part].to(a.device))
            scored = wanted[part] != NOT_SCORED
            for row, logits in enumerate((a, b)):
                nats = F.cross_entropy(logits, wanted[part], ignore_index=NOT_SCORED, reduction="none").double()
                self.nats[row].index_add_(0, tokens.unit[part].cpu(), nats.cpu())
            self.nats[2].index_add_(0, tokens.unit[part].cpu(), scored.double().cpu())

    def measurements(self, rule: str, dtype: str) -> Measurements:
        """Rows ``kl``, ``top_token_agreement``, ``loss.dense``, ``loss.compressed`` and ``loss.change``."""
        rows = Measurements()
        entries = [Entry("kl", "kl", unit="nats/token"), Entry("top_token_agreement", "agree")]
        add_rows(rows, self.table, entries, {"dtype": dtype})
        dense, compressed, scored = self.nats.numpy()
        if not scored.sum():
            return rows
        top = np.stack([dense, compressed, compressed - dense], 1)
        low, high = ratio_intervals(top, np.repeat(scored[:, None], 3, 1), level=LEVEL)
        seen = int((scored > 0).sum())
        words = f"{LEVEL:.0%} percentile bootstrap over {seen} {self.units.name} of {int(scored.sum())} scored tokens"
        for i, name in enumerate(("loss.dense", "loss.compressed", "loss.change")):
            ends = {"low": float(low[i]), "high": float(high[i]), "interval": words} if np.isfinite(low[i]) else {}
            value = float(top[:, i].sum() / scored.sum())
            rows.add(name, value, unit="nats/token", n=seen, split=rule, dtype=dtype, **ends)
        return rows
