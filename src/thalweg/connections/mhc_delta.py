"""mHC with erasure: each stream loses, along the direction of the update, a share of what it holds, and is written to."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thalweg.connections import register
from thalweg.connections._many_streams import ManyStreams, ManyStreamsOptions, ManyStreamsSite
from thalweg.connections._stream_references import sigmoid
from thalweg.connections.base import Facts
from thalweg.errors import InputError
from thalweg.ops.precision import full_precision, wide
from thalweg.ops.rank_one import check_direction_eps, direction
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class MHCDeltaOptions(ManyStreamsOptions):
    """The options of mHC, and those of the erasure.

    value: what is written along the direction k of the update: ``update``, the update itself with the write weights of mHC, or
    ``learned``, a number for each stream that the streams decide, as in Deep Delta Learning; it takes the place of the write weights.
    erase_start: first share that is erased, inside (0, 2): 1 erases all that is held along k, above 1 reflects.
    direction_eps: eps of k = u / sqrt(|u|^2 + eps^2).
    """

    value: Literal["update", "learned"] = "update"
    erase_start: float = 0.1
    direction_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.erase_start < 2:
            raise InputError(f"erase_start must be inside (0, 2), got {self.erase_start}: at the ends its gate is dead")
        check_direction_eps(self.direction_eps)


class DeltaCoefficients(NamedTuple):
    """read [b t n], write [b t n], mix [b t to from] of mHC; erase [b t n] in (0, 2); value [b t n], None when the update is written."""

    read: Tensor
    write: Tensor | None
    mix: Tensor
    erase: Tensor
    value: Tensor | None


class MHCDeltaSite(ManyStreamsSite):
    """m = mix x; k = direction(u); x'_o = m_o - erase_o k (k . m_o) + write_o u, or + erase_o k v_o with a learned value."""

    options: MHCDeltaOptions

    def families(self):
        n = (self.options.streams,)
        found = super().families()
        if self.options.value == "learned":
            found.pop("write", None)
            found["value"] = n
        return {**found, "erase": n}

    def starts(self):
        o, share = self.options, self.options.erase_start / 2
        erase = torch.full((o.streams,), math.log(share / (1 - share)))
        return {**super().starts(), "erase": erase, "value": torch.zeros(o.streams)}

    def read(self, state, tokens=None):
        logits = self.all_logits(state)
        learned = logits.get("value")
        plain = self.coefficients(state, logits | ({"write": learned} if learned is not None else {}))
        erase = 2 * torch.sigmoid(logits["erase"])
        write = plain.write if learned is None else None
        return self.gather(state, plain.read), DeltaCoefficients(plain.read, write, plain.mix, erase, learned)

    def write(self, state, update, context):
        update = wide(self.update_norm(update))
        k = direction(update, self.options.direction_eps).unsqueeze(-2)
        with full_precision(state):
            mixed = wide(context.mix) @ wide(state)
            held, erase = torch.linalg.vecdot(mixed, k), wide(context.erase)
            if context.value is None:
                kept = torch.addcmul(mixed, (erase * held).unsqueeze(-1), k, value=-1)
                return torch.addcmul(kept, wide(context.write).unsqueeze(-1), update.unsqueeze(-2)).to(state.dtype)
            return torch.addcmul(mixed, (erase * (wide(context.value) - held)).unsqueeze(-1), k).to(state.dtype)

    def gates(self, state, context, update=None):
        found = {"read": context.read, "erase": context.erase}
        return found if context.write is None else {**found, "write": context.write}


@register(
    "mhc_delta",
    summary="mHC whose streams also lose, along the direction of the update, a share of what they hold (rank-1 erase and write)",
    source="ours: mHC (arXiv 2512.24880) with the rank-1 erasure of Deep Delta Learning (arXiv 2601.00417)",
)
class MHCDelta(ManyStreams):
    """The combination that the manifold-geometric transformer points at, on real streams: mHC mixing and a rank-1 delta on each stream.

    Shapes: state [b t n d]; per token and site read, write, erase [n], mix [to from].
    With the erasure at 0 it is mHC; with n = 1, ``value="learned"`` and the identity mixer it is the vector form of Deep Delta Learning,
    but for its coefficients.
    Source: ours. mHC, arXiv 2512.24880, Eq. 3 and 7-9; Deep Delta Learning, arXiv 2601.00417 v3.
    """

    Options = MHCDeltaOptions
    SiteModule = MHCDeltaSite
    LAST = (
        "after the last site the streams are added up, and a matrix with columns that sum to one changes their sum only as far as they "
        "erase unequally"
    )
    options: MHCDeltaOptions
    facts = Facts(
        source="ours: mHC (arXiv 2512.24880) Eq. 3 and 7-9 with the operator of Deep Delta Learning (arXiv 2601.00417 v3)",
        equation=(
            "m = mix x;  u = F(norm(sum_i read_i x_i));  k = u / sqrt(|u|^2 + eps^2);  erase = 2 sigmoid(alpha h + b)\n"
            "value 'update':  x'_o = m_o - erase_o k (k . m_o) + write_o u\n"
            "value 'learned': x'_o = m_o + erase_o k (v_o - k . m_o)"
        ),
        words=(
            "As in mHC, the streams [b t n d] are read, mixed and written to with weights that they decide. Before an update [b t d] is "
            "added, every stream loses a share, between 0 and 2, of what it holds along the direction of that update."
        ),
        constraint="mixing as in mHC; for fixed k the erasure has eigenvalues 1 (d - 1 times) and 1 - erase, norm at most 1",
        chosen=(
            "the erased share starts at 0.1, so that the start is near mHC and the gate is alive",
            "the learned value starts at 0",
            "no initial weights of sublayers depend on the number of streams",
            "gains, sigma_2, horizon and composites are measured of the mixing matrix alone, without the erasure",
        ),
        verified=(REFERENCE,),
        bibtex="",
    )

    def equals_at_start(self):
        return None  # something is erased from the first step on

    @classmethod
    def variants(cls):
        few = {"mixer_options": {"iterations": 2}}
        return [
            {"value": "learned", "streams": 3, "input_norm": False, **few},
            {"mixer": "identity", "dynamic": False, "streams": 2},
        ]

    def reference_write(self, site, logits, write, mixed, update, to):
        length = torch.sqrt((update * update).sum() + self.options.direction_eps**2)
        k, own = [u / length for u in update], mixed[to]
        held = sum(a * b for a, b in zip(k, own, strict=True))
        erase = 2 * sigmoid(logits["erase"][to])
        if self.options.value == "learned":
            return torch.stack([m + erase * a * (logits["value"][to] - held) for m, a in zip(own, k, strict=True)])
        return torch.stack([m - erase * a * held + write[to] * u for m, a, u in zip(own, k, update, strict=True)])
