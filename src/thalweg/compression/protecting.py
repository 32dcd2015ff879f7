"""What it costs to leave a layer of the compressed model as it was."""

import math

from thalweg.compression.pairing import Description


def protected_bytes(base: Description, compressed: Description) -> tuple[dict[int, int], str]:
    """Bytes more that the compressed model takes with a layer of the base left as it was -> by layer, and how that was counted.

    By the record of the compression where there is one (matrices in 16 bits instead), else by what both models take as they are loaded. Empty
    where neither is known: a model that holds its values unpacked takes what it took.
    """
    record = compressed.record
    if record is not None and record.linears:
        found: dict[int, float] = {}
        for one in record.linears:
            found[one.layer] = found.get(one.layer, 0.0) + math.prod(one.shape) * (16 - one.bits_per_weight) / 8
        return {
            layer: round(size) for layer, size in sorted(found.items())
        }, "its matrices in 16 bits in place of their bits as recorded"
    kept = record.kept_blocks if record is not None else None
    if kept is not None:
        dense = {layer: size for layer, size in base.bytes.items() if layer not in kept}
        return dense, f"the whole layer, in {' and '.join(base.dtypes)}"
    saved = {layer: base.bytes[layer] - size for layer, size in compressed.bytes.items() if layer in base.bytes}
    if saved and all(size > 0 for size in saved.values()):
        return saved, "bytes of the layer as both models are loaded"
    return {}, "unknown: the compressed model holds its values unpacked, and no record says how many bits they take"
