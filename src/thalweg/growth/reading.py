"""One look at one layer: its residual operator, what stands out of it, and what its heads hold."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.geometry.directional import CHANCE, DirectionalOperator, asymmetry, energy_of
from thalweg.geometry.eigenpairs import Method, choose, positive_part, spectrum, top_eigenpairs
from thalweg.growth.checks import check_inputs
from thalweg.growth.options import GrowthOptions
from thalweg.growth.protocol import Growable, HeadFactors
from thalweg.records import Measurements

LOOKED_AT = 8  # leading eigenpairs of a look


@dataclass(frozen=True, eq=False)
class Reading:
    """What a look found; eigenvalues over |S|_2 |M|_F.

    values [k], vectors [d k]: leading eigenpairs. residual: Gamma = |A|_F. positive: R, sum of the positive eigenvalues; exact: R is that of
    all of them (Lanczos sums the leading ones). condition: kappa(S). asymmetry: of all heads together. energies: of each live head.
    """

    layer: int
    operator: DirectionalOperator
    heads: tuple[HeadFactors, ...]
    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "d k"]
    residual: float
    positive: float
    exact: bool
    condition: float
    asymmetry: float
    energies: Mapping[int, float]

    @property
    def top(self) -> float:
        return self.values[0].item()

    def rows(self, **fields) -> Measurements:
        """Rows named ``growth.*`` of this layer."""
        rows, here = Measurements(), {"layer": self.layer, "n": len(self.operator.x), **fields}
        rows.add("growth.top", self.top, null=0.0, null_kind="white input", **here)
        rows.add("growth.residual", self.residual, null=0.0, null_kind="white input", **here)
        rows.add("growth.positive", self.positive, **here)
        rows.add("growth.heads", len(self.heads), **here)
        rows.add("growth.condition", self.condition, null=1.0, null_kind="white input", **here)
        rows.add("growth.asymmetry", self.asymmetry, null=CHANCE, null_kind="independent random factors", **here)
        for head, energy in self.energies.items():
            rows.add("growth.energy", energy, head=head, **here)
        return rows


def look(
    network: Growable,
    layer: int,
    directions: Mapping[int, Tensor],
    options: GrowthOptions,
    *,
    scale: float | None = None,
    without: int | None = None,
) -> Reading:
    """Look at one layer of the network as it is now. ``directions``: what each head captured at its birth. scale: a normaliser to keep, so that
    before and after an event compare. without: a head to leave out, with its direction. Raises: InputError."""
    x = network.inputs(layer).detach()
    check_inputs(x, layer)  # in its own dtype, whose rounding it allows for
    x = x.double()
    heads = tuple(head for head in network.heads(layer) if head.id != without)
    operator = operator_of(x, heads, {h: u for h, u in directions.items() if h != without}, options)
    if scale is not None:
        operator.__dict__["scale"] = scale  # in the place of the cached value
    return read(layer, operator, heads, options.method)


def read(layer: int, operator: DirectionalOperator, heads: Sequence[HeadFactors], method: Method) -> Reading:
    """What an operator shows."""
    values, vectors = top_eigenpairs(operator, LOOKED_AT, method)
    whole = spectrum(operator, method=method)
    exact = choose(operator, method) != "lanczos"
    residual = whole.square().sum().sqrt().item() if exact else operator.frobenius()
    energies = {h.id: energy_of(operator, h.query.double(), h.key.double(), operator.scale).item() for h in heads}
    return Reading(
        layer,
        operator,
        tuple(heads),
        values,
        vectors,
        residual,
        positive_part(whole),
        exact,
        operator.condition,
        asymmetry(operator.query, operator.key).item(),
        energies,
    )


def operator_of(
    x: Float[Tensor, "n d"],
    heads: Sequence[HeadFactors],
    directions: Mapping[int, Tensor],
    options: GrowthOptions,
) -> DirectionalOperator:
    """The residual operator of these heads, summed (not averaged); a masked head counts by its mask."""
    query = torch.cat([h.mask * h.query.detach().double() for h in heads], 1)
    key = torch.cat([h.key.detach().double() for h in heads], 1)
    if options.captured == "current":
        directions = {h.id: own_direction(x, h, options) for h in heads if h.mask > 0}
    captured = span([directions[h.id] for h in heads if h.id in directions], x)
    return DirectionalOperator(x, query, key, captured, center=options.center)


def own_direction(x: Float[Tensor, "n d"], head: HeadFactors, options: GrowthOptions) -> Float[Tensor, " d"]:
    """The top direction of one head's own sym(S M_a)."""
    operator = DirectionalOperator(x, head.query, head.key, center=options.center)
    return top_eigenpairs(operator, 1, options.method)[1][:, 0]


def span(directions: Sequence[Float[Tensor, " d"]], like: Tensor) -> Float[Tensor, "d c"] | None:
    """An orthonormal basis of the directions; those that the earlier ones hold already are left out."""
    basis: list[Tensor] = []
    for direction in directions:
        u = direction.to(like)
        for _ in range(2):  # twice is enough
            for b in basis:
                u = u - (b @ u) * b
        size = u.norm().item()
        if size > 1e-6 * direction.norm().item():
            basis.append(u / size)
    return torch.stack(basis, 1) if basis else None


def prune_bound(reading: Reading, threshold: float, options: GrowthOptions) -> float:
    """phi: the energy below which a head is pruned."""
    if options.prune_relative_to == "median":
        return options.prune_level * statistics.median(reading.energies.values())
    return options.prune_level * threshold
