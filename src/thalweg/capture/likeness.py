"""How alike the states of different layers are: linear CKA and cosines of every pair, over a stream of batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.geometry.alignment import cka_of, hsic
from thalweg.records import Measurements

TOKENS = 256  # of a batch, evenly spaced: a Gram matrix holds their squares
LEAST = 4  # an unbiased estimate needs as many


class Likeness:
    """Every pair of the states at ``places``.

    Kept: two places x places matrices; during a batch, for each place a Gram matrix of 256 tokens and the directions of 256 tokens.
    """

    def __init__(self, places: Sequence[int], width: int):
        self.places, self.width = list(places), width
        self.joint, self.cosine = (torch.zeros(len(places), len(places), dtype=torch.float64) for _ in range(2))
        self.batches, self.tokens = 0, 0
        self.grams: list[Tensor] = []
        self.units: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """During a batch."""
        per_place = 8 * TOKENS**2 + 4 * TOKENS * self.width
        return self.joint.nbytes + self.cosine.nbytes + len(self.places) * per_place

    def add(self, index: int, x: Tensor) -> None:
        """The states [n d] at a place; places that were not asked for are passed over."""
        if index not in self.places or len(x) < LEAST:
            return
        if index == self.places[0]:
            self.grams, self.units = [], []
        chosen = torch.linspace(0, len(x) - 1, min(TOKENS, len(x)), device=x.device).long()
        x = x[chosen]
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        peak = size.amax().clamp(min=torch.finfo(x.dtype).tiny)
        scaled = (x - x.mean(0)) / peak  # CKA does not see either
        self.grams.append((scaled @ scaled.T).cpu())
        self.units.append((x / torch.where(size > 0, size, 1.0)).cpu().flatten())

    def close(self) -> None:
        """The batch is over."""
        if len(self.grams) != len(self.places):
            return
        grams, units = torch.stack(self.grams), torch.stack(self.units)
        self.joint += hsic(grams)
        self.cosine += (units @ units.T).double()
        self.batches, self.tokens = self.batches + 1, self.tokens + grams.shape[1]
        self.grams, self.units = [], []

    def measurements(self, named: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> Measurements:
        """One row for each pair, at the site of the first and with the second after a colon."""
        rows = Measurements()
        if not self.batches:
            return rows
        cka, cosine = cka_of(self.joint), self.cosine / self.tokens
        for i, a in enumerate(self.places):
            for j, b in enumerate(self.places):
                if i < j:
                    where = {**fields, "site": f"{named[a]['site']}:{named[b]['site']}", "layer": named[a]["layer"]}
                    rows.add("linear_cka", cka[i, j].item(), n=self.tokens, null=0.0, null_kind="independent", **where)
                    null = {"null": 0.0, "null_kind": "independent directions"}
                    rows.add("layer_cosine", cosine[i, j].item(), n=self.tokens, **null, **where)
        return rows
