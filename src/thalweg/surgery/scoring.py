"""Measured scores of heads, by which a person chooses those that go: what a head writes, what it could write, what it turns, what it costs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from thalweg.errors import InputError, UnknownNameError
from thalweg.geometry.directional import DirectionalOperator, energy_of
from thalweg.models import Decoder
from thalweg.models.sublayers import Attention
from thalweg.models.transformer import Transformer
from thalweg.surgery.change import attentions, whole_decoder_of
from thalweg.surgery.heads import mask_heads

BATCH = 4  # rows of a pass
SHORT = 32  # of a classification, which has no logits by token


@dataclass(frozen=True)
class HeadScore:
    """heads: one query head, or the group that shares keys and values, of ``layer``; score: the lower, the less the heads do."""

    layer: int
    heads: tuple[int, ...]
    score: float


def head_scores(
    model: Any,
    ids: Int[Tensor, "b t"],
    by: str = "output",
    *,
    mask: Int[Tensor, "b t"] | None = None,
    labels: Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[HeadScore]:
    """A score of every head (of every group that shares keys and values) on tokens ``ids``, by layer.

    by, one of ``SCORES``:
    ``output``: rms length of what the heads write to the update, over that of the whole update without its bias. Range 0 up; they may cancel.
    ``weight``: Frobenius norm of W_O W_V, over the root of the sum of its squares in the layer: what the heads could write, of unit input.
    ``energy``: |S M_a|_F / (|S|_2 |M|_F), the directional energy that the growth controller prunes by
    (:func:`thalweg.geometry.directional.head_energy`); rotary angles and norms of queries and keys are not in it.
    ``loss``: rise of the mean loss [nats per scored prediction] with the heads masked; one pass for each.
    mask: nonzero where a token is real (None: everywhere). labels: what the model shall answer, for ``loss``: a decoder's are ``ids`` if none
    are given; those of an encoder are its classes [b], or the hidden tokens [b t], -100 elsewhere.
    progress: called with the passes that are done and how many there are.
    Raises: InputError, UnknownNameError.
    """
    if by not in SCORES:
        raise UnknownNameError("score", by, SCORES)
    decoder = whole_decoder_of(model)
    if not attentions(decoder):
        raise InputError(f"layers {', '.join(decoder.config.layers)} have no heads to score")
    training = decoder.training
    decoder.eval()
    try:
        with torch.no_grad():
            values = SCORES[by](decoder, Rows(decoder, ids, mask, labels), progress or (lambda done, total: None))
    finally:
        decoder.train(training)
    group = decoder.config.head_group
    return [
        HeadScore(layer, tuple(range(i * group, (i + 1) * group)), score)
        for layer, scores in values.items()
        for i, score in enumerate(scores)
    ]


def lowest(scores: list[HeadScore], count: int) -> dict[int, list[int]]:
    """The ``count`` heads of the lowest scores, by layer; one head or group of every layer stays. Raises: InputError.

    Scores of different layers are compared as they are.
    """
    group = len(scores[0].heads)
    units: dict[int, int] = {}
    for score in scores:
        units[score.layer] = units.get(score.layer, 0) + 1
    most = group * (sum(units.values()) - len(units))
    if count < 1 or count % group or count > most:
        multiple = f", a multiple of {group} (these share keys and values)" if group > 1 else ""
        raise InputError(f"1 to {most} heads can go, since one of a layer stays{multiple}; got {count}")
    found: dict[int, list[int]] = {}
    for score in sorted(scores, key=lambda s: (s.score, s.layer, s.heads)):
        if units[score.layer] > 1 and count:
            found.setdefault(score.layer, []).extend(score.heads)
            units[score.layer] -= 1
            count -= group
    return {layer: sorted(heads) for layer, heads in sorted(found.items())}


@dataclass
class Rows:
    """Token ids [b t] with their mask and labels, a few at a time; ``now``: the mask of those that the model has before it."""

    decoder: Transformer
    ids: Tensor
    mask: Tensor | None
    labels: Tensor | None
    now: Tensor | None = field(default=None, init=False)

    def parts(self) -> list[dict[str, Tensor]]:
        """What the model is called with, batch by batch, without labels."""
        device = next(self.decoder.parameters()).device
        size = SHORT if getattr(self.decoder.config, "classes", None) is not None else BATCH
        ids = [some.to(device) for some in self.ids.split(size)]
        if self.mask is None:
            return [{"input_ids": some} for some in ids]
        masks = self.mask.split(size)
        return [{"input_ids": a, "attention_mask": b.to(device)} for a, b in zip(ids, masks, strict=True)]

    def real(self, x: Tensor) -> Tensor:
        """[b t d] -> the rows of real tokens [n d]."""
        return x.flatten(0, 1) if self.now is None else x[self.now.bool()]

    def run(self, progress: Callable[[int, int], None]) -> None:
        """Run the model on all of them."""
        parts = self.parts()
        for i, part in enumerate(parts):
            progress(i, len(parts))
            self.now = part.get("attention_mask")
            self.decoder(**part)
        progress(len(parts), len(parts))

    def loss(self) -> float:
        """Mean nats per scored prediction over all rows."""
        first, nats, scored = 0, 0.0, 0.0
        for part in self.parts():
            ids = part["input_ids"]
            labels = ids if self.labels is None else self.labels[first : first + len(ids)].to(ids.device)
            found = self.decoder.losses(self.decoder(**part).logits, labels)
            nats, scored, first = nats + float(found.nats.sum()), scored + float(found.scored.sum()), first + len(ids)
        return nats / scored


@contextmanager
def inputs_of(modules: Mapping[int, torch.nn.Module], see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside it, ``see`` is called with the layer and what its module is given."""

    def watch(layer: int) -> Callable[[Any, Any], None]:
        return lambda _, args: see(layer, args[0])

    hooks = [module.register_forward_pre_hook(watch(layer)) for layer, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def only(decoder: Any) -> dict[int, Attention]:
    """Layer -> its attention. Raises: InputError where a layer has several."""
    found = attentions(decoder)
    if any(len(modules) > 1 for modules in found.values()):
        raise InputError("a layer with several attention sublayers has no one score for a head")
    return {layer: modules[0][1] for layer, modules in found.items()}


def by_output(decoder: Any, rows: Rows, progress: Any) -> dict[int, list[float]]:
    modules = only(decoder)
    sums: dict[int, Tensor] = {}
    grams = {layer: gram(module, decoder.config.head_group) for layer, module in modules.items()}

    def see(layer: int, y: Tensor) -> None:
        y = rows.real(y).double()
        parts = y.unflatten(1, (len(grams[layer][0]), -1)).transpose(0, 1)  # [units n g*w]
        squares = ((parts @ grams[layer][0]) * parts).sum((1, 2))
        whole = ((y @ grams[layer][1]) * y).sum()
        found = torch.cat([squares, whole[None]])
        sums[layer] = sums[layer] + found if layer in sums else found

    with inputs_of({layer: module.output for layer, module in modules.items()}, see):
        rows.run(progress)
    return {layer: (s[:-1] / s[-1].clamp(min=1e-300)).clamp(min=0).sqrt().tolist() for layer, s in sums.items()}


def gram(module: Attention, group: int) -> tuple[Tensor, Tensor]:
    """W_O^T W_O of every unit [units g*w g*w], and of all of them [h*w h*w]."""
    weight = module.output.weight.double()
    parts = weight.unflatten(1, (module.heads // group, -1)).transpose(0, 1)
    return parts.mT @ parts, weight.T @ weight


def by_weight(decoder: Any, rows: Rows, progress: Any) -> dict[int, list[float]]:
    found = {}
    for layer, module in only(decoder).items():
        value = module.value.weight.double().unflatten(0, (module.kv_heads, -1))  # [kv w d]
        out = module.output.weight.double().T.unflatten(0, (module.kv_heads, -1, module.head_width))  # [kv g w d]
        squares = ((out @ out.mT) * (value @ value.mT)[:, None]).sum((1, 2, 3)).clamp(min=0)
        found[layer] = (squares / squares.sum().clamp(min=1e-300)).sqrt().tolist()
    return found


def by_energy(decoder: Any, rows: Rows, progress: Any) -> dict[int, list[float]]:
    seen: dict[int, list[Tensor]] = {}
    modules = only(decoder)
    with inputs_of(modules, lambda layer, x: seen.setdefault(layer, []).append(rows.real(x).cpu())):
        rows.run(progress)
    found = {}
    for layer, module in modules.items():
        query, key = factors(module)
        x = torch.cat(seen[layer]).double()
        operator = DirectionalOperator(x, torch.cat(query, 1), torch.cat(key, 1))
        found[layer] = [energy_of(operator, q, k, operator.scale).item() for q, k in zip(query, key, strict=True)]
    return found


def factors(module: Attention) -> tuple[list[Tensor], list[Tensor]]:
    """Query and key factors [d g*w] of every unit, on the CPU in float64; the key of a group stands once beside each of its queries."""
    group = module.heads // module.kv_heads
    query = module.query.weight.detach().cpu().double().unflatten(0, (module.kv_heads, -1))
    key = module.key.weight.detach().cpu().double().unflatten(0, (module.kv_heads, -1))
    return [q.T for q in query], [k.T.repeat(1, group) for k in key]


def by_loss(decoder: Any, rows: Rows, progress: Any) -> dict[int, list[float]]:
    if rows.labels is None and not isinstance(decoder, Decoder):
        raise InputError(
            "score 'loss' needs what an encoder shall answer (labels): classes with their texts, or a tokenizer with a mask token to hide "
            "tokens by; give them, or take another score"
        )
    group, before = decoder.config.head_group, rows.loss()
    modules = only(decoder)
    total, done, found = sum(m.heads // group for m in modules.values()), 0, {}
    for layer, module in modules.items():
        kept, found[layer] = module.head_mask, []
        for unit in range(module.heads // group):
            progress(done, total)
            mask_heads(decoder, {layer: {unit * group + i: 0.0 for i in range(group)}})
            found[layer].append(rows.loss() - before)
            module.head_mask = kept
            done += 1
    progress(done, total)
    return found


SCORES: dict[str, Callable[..., dict[int, list[float]]]] = {
    "output": by_output,
    "weight": by_weight,
    "energy": by_energy,
    "loss": by_loss,
}
