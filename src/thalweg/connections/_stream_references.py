"""One token at a time, in loops: what the references of streams side by side share."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from thalweg.connections._stream_coefficients import Logits

if TYPE_CHECKING:
    from thalweg.connections._many_streams import ManyStreams, ManyStreamsSite


def everywhere(function: Callable[[int, int], Any], like: Tensor) -> list[list[Any]]:
    """``function(batch entry, token)`` at every token; for the references."""
    return [[function(i, t) for t in range(like.shape[1])] for i in range(like.shape[0])]


def rows_of(function: Callable[[int, int], Any], like: Tensor) -> Tensor:
    """The same, where the function gives rows [d]: [b t d]."""
    return torch.stack([torch.stack(row) for row in everywhere(function, like)])


def sigmoid(z: Any) -> Any:
    """From its definition; for the references."""
    return 1 / (1 + torch.exp(-z))


def reference_logits(site: "ManyStreamsSite", rows: list[Tensor]) -> dict[str, list[Tensor]]:
    """The logits of every family at one token, from its n streams [d]; for the reference."""
    o, n = site.options, len(rows)
    flat = torch.cat(rows)

    def normed(x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).sum() / len(x) + o.coefficient_eps)

    def logit(family: Logits, k: int) -> Tensor:
        if family.projection is None or family.alpha is None:
            return family.bias[k]
        alpha = [family.alpha[g] for g, size in enumerate(family.groups) for _ in range(size)][k]
        if o.coefficients == "concatenated":
            product = (family.projection[k] * normed(flat)).sum()
        else:  # the logit [to, from]: row ``to`` of the projection, stream ``from``
            product = (family.projection[k // n] * normed(rows[k % n])).sum()
        return alpha * (torch.tanh(product) if o.tanh else product) + family.bias[k]

    families = cast("dict[str, Logits]", dict(site.logits.items()))
    return {name: [logit(family, k) for k in range(family.count)] for name, family in families.items()}


def reference_maps(site: "ManyStreamsSite", logits: dict[str, list[Tensor]]) -> tuple[list[Any], list[Any], Tensor]:
    """read [n], write [n] and mix [n n] of one token; for the reference."""
    o, n = site.options, site.options.streams
    read: list[Any] = [1 / n] * n
    if o.read != "mean":
        read = [sigmoid(z) + o.read_eps if o.read == "sigmoid" else z for z in logits["read"]]
    write: list[Any] = [1.0] * n
    if o.write != "ones":
        write = [2 * sigmoid(z) if o.write == "double_sigmoid" else z for z in logits.get("write", [])]
    like = next(iter(site.parameters()), torch.zeros(()))
    mix = torch.stack(logits["mix"]) if "mix" in logits else torch.zeros(0, dtype=like.dtype)
    return read, write, site.mixer.reference(mix)


def reference_contraction(stream: "ManyStreams", rows: list[Tensor]) -> Any:
    n, head, o = len(rows), stream.head, stream.options
    if head is None:
        return sum(rows) / n if o.contraction == "mean" else sum(rows)
    flat = torch.cat(rows)
    flat = flat / torch.sqrt((flat * flat).sum() / len(flat) + o.coefficient_eps)
    assert head.projection is not None and head.alpha is not None
    logits = [head.alpha[0] * (head.projection[k] * flat).sum() + head.bias[k] for k in range(n)]
    return sum((sigmoid(z) + o.read_eps) * row for z, row in zip(logits, rows, strict=True))
