"""Which block of one model is which of another, by their weights: a sample of entries of every matrix, the same of all blocks."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.capture.layout import Located
from thalweg.capture.weights import shown
from thalweg.errors import InputError

SAMPLE = 2048  # entries of a matrix
ALIKE = 0.5  # cosine from which two blocks are said to be related
CLEARLY = 0.2  # by how much another block must be more alike than the own one


def sketch(located: Located) -> dict[str, Float[Tensor, "layers entries"]]:
    """Entries of every matrix that all blocks have, by its name inside the block, layers stacked; float32 on the CPU.

    Vectors (norms, biases) are left out: those of different blocks are alike. Packed weights that do not show their values are left out too.
    """
    blocks = [dict(located.module(name).named_parameters()) for name in located.blocks]
    found: dict[str, Tensor] = {}
    for name in blocks[0] if blocks else ():
        rows = [shown(block.get(name)) for block in blocks]
        if all(row is not None and row.ndim >= 2 and row.shape == rows[0].shape for row in rows):  # type: ignore[union-attr]
            count = rows[0].numel()  # type: ignore[union-attr]
            picked = torch.randint(count, (min(SAMPLE, count),), generator=torch.Generator().manual_seed(count))
            found[name] = torch.stack([row.reshape(-1)[picked.to(row.device)].float().cpu() for row in rows])  # type: ignore[union-attr]
    return found


def block_cosines(
    base: Mapping[str, Tensor], compressed: Mapping[str, Tensor]
) -> Float[Tensor, "compressed base"] | None:
    """Mean cosine over matrices of the weights of every two blocks; None where no matrix can be compared."""
    names = [n for n in compressed if n in base and base[n].shape[1] == compressed[n].shape[1]]
    if not names:
        return None
    return torch.stack([_unit(compressed[n]) @ _unit(base[n]).T for n in names]).mean(0)


def check_order(cosines: Tensor, layer_of: Mapping[int, int], base: str, compressed: str) -> list[str]:
    """Refuse blocks in another order. Notes where blocks are not alike at all. Raises: InputError."""
    unlike = []
    for layer, own in layer_of.items():
        best = int(cosines[layer].argmax())
        mine, other = float(cosines[layer, own]), float(cosines[layer, best])
        if best != own and other > ALIKE and other > mine + CLEARLY:
            raise InputError(
                f"block {layer} of {compressed} is block {best} of {base} by its weights (cosine {other:.2f}, with block {own} {mine:.2f}): "
                f"the blocks stand in another order; give models whose blocks stand in one order, or name the blocks that were kept in "
                f"thalweg_compression.json (kept_blocks)"
            )
        if mine < ALIKE:
            unlike.append(layer)
    if not unlike:
        return []
    return [
        f"{len(unlike)} of {len(layer_of)} blocks are not alike by their weights (cosine below {ALIKE}): unrelated models?"
    ]


def weight_errors(
    base: Mapping[str, Tensor], compressed: Mapping[str, Tensor], layer_of: Mapping[int, int]
) -> dict[int, float]:
    """||W' - W|| / ||W|| over the matrices of every layer of the base, on the sampled entries: needs no text at all."""
    names = [n for n in compressed if n in base and base[n].shape[1] == compressed[n].shape[1]]
    found = {}
    for layer, own in layer_of.items():
        if not names:
            continue
        off = sum(float((compressed[n][layer] - base[n][own]).double().square().sum()) for n in names)
        size = sum(float(base[n][own].double().square().sum()) for n in names)
        found[own] = (off / size) ** 0.5 if size else 0.0
    return found


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def block_bytes(located: Located, layers: Sequence[int] | None = None) -> dict[int, int]:
    """Bytes of the parameters and buffers of every block, as loaded."""
    chosen = range(len(located.blocks)) if layers is None else layers
    return {
        layer: sum(
            t.numel() * t.element_size()
            for t in (
                *located.module(located.blocks[layer]).parameters(),
                *located.module(located.blocks[layer]).buffers(),
            )
        )
        for layer in chosen
    }
