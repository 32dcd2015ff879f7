"""Our decoders and encoders as something that can grow: seen on one fixed probe set, changed by surgery that keeps what they compute."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from thalweg.data import Batch
from thalweg.errors import CheckpointError, InputError
from thalweg.growth.protocol import Birth, HeadFactors
from thalweg.models.sublayers import Attention
from thalweg.models.sublayers.prototypes import dictionaries, dictionary_loss
from thalweg.models.trace import StreamTrace
from thalweg.models.transformer import Transformer
from thalweg.surgery.change import Change
from thalweg.surgery.heads import grow_heads, mask_heads, prune_heads
from thalweg.surgery.wide import running
from thalweg.training.parallel import Ranks

APART = 0.1  # of the size of a query map: how much the queries of one new group differ, which would else learn alike


class Seen(NamedTuple):
    """One pass over this rank's share of the probe set: what each layer's attention read [n d], padding left out, and the loss."""

    inputs: list[Tensor]
    nats: float
    scored: float
    dictionaries: float


class TransformerNetwork:
    """A :class:`thalweg.growth.Growable` over a :class:`thalweg.models.Decoder` or ``Encoder``.

    model: the model, which every change replaces (:attr:`model`). batch: the probe set, at least two sequences: ``input_ids`` [b t],
    ``labels``, ``attention_mask`` where there is padding. All looks run in evaluation mode, in the model's dtype, and outputs in float64, so
    that drift is that of the change and not of another order of summation. changed: told the new model and the change after every event,
    so that optimisers can follow. ranks: share the probe set among them; what was seen is gathered in the order of the ranks, so that all
    decide alike. dictionary_weight: of the loss of dictionaries, in the fit. seed: of value maps and further columns of new heads.

    M of a head is W_q W_k^T: biases, rotary angles, norms of queries and keys and the scale of the scores are not in it. Where queries share
    keys, one head here is a whole group. Identifiers are counted up for each layer and never used again.
    Raises: InputError for a model without attention, with several attentions in a layer, or with heads that cannot be taken apart.
    """

    def __init__(
        self,
        model: Transformer,
        batch: Batch,
        *,
        changed: Callable[[Transformer, Change], None] | None = None,
        ranks: Ranks | None = None,
        dictionary_weight: float = 0.0,
        seed: int = 0,
    ):
        if not isinstance(model, Transformer):
            raise InputError(f"a decoder or encoder of thalweg is needed, got {type(model).__name__}")
        self.model, self.batch, self.changed = model, batch, changed
        self.ranks, self.dictionary_weight = ranks or Ranks(), dictionary_weight
        self.generator = torch.Generator().manual_seed(seed)
        self.group = model.config.head_group
        attentions_of(model)
        self.ids = [list(range(self.count(layer))) for layer in range(model.config.depth)]
        self.next = [len(ids) for ids in self.ids]
        self.masks: dict[tuple[int, int], float] = {}
        self._seen: tuple[Any, Seen] | None = None

    # what is seen

    def layers(self) -> int:
        return self.model.config.depth

    def count(self, layer: int) -> int:
        """Heads of a layer, groups counted once."""
        return self.model.config.heads_of(layer) // self.group

    def heads(self, layer: int) -> list[HeadFactors]:
        attention = attentions_of(self.model)[layer]
        w, g = attention.head_width, self.group
        queries = attention.query.weight.detach().T.split(g * w, 1)
        keys = attention.key.weight.detach().T.split(w, 1)
        return [
            HeadFactors(head, query, key.repeat(1, g), self.masks.get((layer, head), 1.0))
            for head, query, key in zip(self.ids[layer], queries, keys, strict=True)
        ]

    def inputs(self, layer: int) -> Float[Tensor, "n d"]:
        found = self.ranks.collect(self.look().inputs[layer].cpu())
        return torch.cat(found)

    def outputs(self) -> Tensor:
        """Logits in float64, of a copy: padded places, which nobody reads, are 0."""
        wide = copy.deepcopy(self.model).double()
        with running(torch.float64, wide):
            ids, more, real = self._share()
            logits = wide(ids, **more).logits.cpu()
            if logits.ndim == 3 and real is not None:
                logits = logits.masked_fill(~real.cpu()[..., None], 0.0)
        return torch.cat(self.ranks.collect(logits))

    def fit(self) -> float:
        parts = self.ranks.collect(self.look()[1:])
        nats, scored, held = (math.fsum(part[i] for part in parts) for i in range(3))
        return nats / scored + self.dictionary_weight * held / len(parts)

    def parameters_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def look(self) -> Seen:
        """One pass, kept until a parameter, the model or a mask is another."""
        stamp = (id(self.model), tuple(p._version for p in self.model.parameters()), tuple(self.masks.items()))
        if self._seen is None or self._seen[0] != stamp:
            self._seen = (stamp, self._look())
        return self._seen[1]

    def forget(self) -> None:
        """Let the last pass go; for whoever changes weights behind torch's back, through ``.data``."""
        self._seen = None

    @torch.no_grad()
    def _look(self) -> Seen:
        model, was, trace = self.model, self.model.training, StreamTrace()
        model.eval()
        try:
            ids, more, real = self._share()
            labels = self._mine(self.batch["labels"]).to(ids.device)
            out = model(ids, trace=trace, **more)
            losses = model.losses(out.logits, labels)
            held = dictionary_loss(model).item() if self.dictionary_weight else 0.0
        finally:
            model.train(was)
        reads = [record.input for record in trace.records if record.site.kind in ATTENDING]
        inputs = [x.flatten(0, 1) if real is None else x[real] for x in reads]
        return Seen(inputs, losses.nats.double().sum().item(), losses.scored.double().sum().item(), held)

    def _share(self) -> tuple[Tensor, dict[str, Tensor], Bool[Tensor, "b t"] | None]:
        device = next(self.model.parameters()).device
        mask = self.batch.get("attention_mask")
        if mask is None:
            return self._mine(self.batch["input_ids"]).to(device), {}, None
        mask = self._mine(mask).to(device)
        return self._mine(self.batch["input_ids"]).to(device), {"attention_mask": mask}, mask.bool()

    def _mine(self, x: Tensor) -> Tensor:
        return x[self.ranks.rank :: self.ranks.world]

    @torch.no_grad()
    def run_whole(self) -> None:
        """One pass over the whole probe set, on every rank, that nobody keeps: for hooks."""
        model, was = self.model, self.model.training
        device = next(model.parameters()).device
        model.eval()
        try:
            given = {"input_ids", "attention_mask"} & self.batch.keys()
            model(**{name: self.batch[name].to(device) for name in sorted(given)})
        finally:
            model.train(was)

    def dictionary_tokens(self) -> dict[str, Tensor]:
        """Name of each dictionary -> what reaches it on the probe set, [h n w], padding left out."""
        found: dict[str, Tensor] = {}

        def seer(name: str) -> Any:
            def see(layer: Any, args: Any) -> None:
                real = args[1] if len(args) > 1 else None
                found[name] = layer.tokens(args[0] if real is None else args[0][real]).detach()

            return see

        hooks = [layer.register_forward_pre_hook(seer(name)) for name, layer in dictionaries(self.model)]
        try:
            self.run_whole()
        finally:
            for hook in hooks:
                hook.remove()
        return found

    # what is changed

    def add_heads(self, layer: int, births: Sequence[Birth]) -> list[int]:
        grown = grow_heads(self.model, {layer: [self._factors(birth) for birth in births]}, generator=self.generator)
        new = [self.next[layer] + i for i in range(len(births))]
        self.ids[layer] += new
        self.next[layer] += len(births)
        self._take(grown.model, grown.change)
        self._start(layer, len(births))
        return new

    @torch.no_grad()
    def _start(self, layer: int, count: int) -> None:
        """Dictionaries of the last ``count`` heads (groups) of a layer, from what reaches them: random ones would have another size."""
        dictionary = attentions_of(self.model)[layer].dictionary
        if dictionary is not None:
            names = {id(part): name for name, part in dictionaries(self.model)}
            tokens = self.dictionary_tokens()[names[id(dictionary)]]
            last = range(len(tokens) - count * self.group, len(tokens))
            dictionary.start_from(tokens.movedim(0, -2), self.generator, heads=last)
            self.forget()

    def _factors(self, birth: Birth) -> tuple[Tensor, Tensor]:
        """Query and key factors of a group, whose queries sum to those of the birth and differ a little, or they would learn alike."""
        d, w = birth.query.shape
        if w != self.model.config.head_width:
            raise InputError(
                f"new heads have a width of {w}, those of the model have another; give head_width {self.model.config.head_width}"
            )
        if self.group == 1:
            return birth.query, birth.key
        noise = torch.randn(self.group, d, w, generator=self.generator, dtype=torch.float64).to(birth.query)
        noise = (noise - noise.mean(0)) * APART * birth.query.square().mean().sqrt()
        each = birth.query / self.group + noise
        return each.movedim(0, 1).reshape(d, self.group * w), birth.key

    def mask_head(self, layer: int, head: int, value: float) -> None:
        first = self._place(layer, head) * self.group
        mask_heads(self.model, {layer: {first + i: value for i in range(self.group)}})
        self.masks.pop((layer, head), None)
        if value != 1:
            self.masks[layer, head] = value

    def prune_heads(self, layer: int, heads: Sequence[int]) -> None:
        places = [self._place(layer, head) for head in heads]
        gone = [place * self.group + i for place in places for i in range(self.group)]
        pruned = prune_heads(self.model, {layer: gone})
        self.ids[layer] = [head for head in self.ids[layer] if head not in heads]
        for head in heads:
            self.masks.pop((layer, head), None)
        self._take(pruned.model, pruned.change)

    def add_layer(self) -> int:
        """A layer on top with one head (group), which writes nothing yet."""
        from thalweg.surgery.depth import grow_depth

        grown = grow_depth(self.model, heads=self.group, generator=self.generator)
        self.ids.append([0])
        self.next.append(1)
        self._take(grown.model, grown.change)
        self._start(self.layers() - 1, 1)
        return self.layers() - 1

    def _place(self, layer: int, head: int) -> int:
        try:
            return self.ids[layer].index(head)
        except (IndexError, ValueError):
            raise InputError(f"layer {layer} has no head {head}") from None

    def _take(self, model: Transformer, change: Change) -> None:
        self.model = model
        self.forget()
        if self.changed is not None:
            self.changed(model, change)

    # going on

    def state_dict(self) -> dict[str, Any]:
        """Identifiers, masks and the generator; the weights are the model's own to keep."""
        return {
            "ids": [list(ids) for ids in self.ids],
            "next": list(self.next),
            "masks": [[*key, value] for key, value in self.masks.items()],
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any], model: Transformer) -> None:
        """Go on with ``model``, which has the shape of that time. Raises: CheckpointError for another shape."""
        self.model = model
        self.ids, self.next = [list(ids) for ids in state["ids"]], list(state["next"])
        if [len(ids) for ids in self.ids] != [self.count(layer) for layer in range(self.layers())]:
            raise CheckpointError("the record of heads does not fit the model beside it; use another checkpoint")
        self.masks = {}
        self.generator.set_state(state["generator"])
        for layer, head, value in state["masks"]:
            self.mask_head(layer, head, value)
        self.forget()


ATTENDING = ("attention", "parallel")


def attentions_of(model: Transformer) -> list[Attention]:
    """The attention of every layer. Raises: InputError unless each layer has one, with heads that are independent of each other."""
    found = []
    for layer, block in enumerate(model.blocks):
        here = [module for module in block.modules() if isinstance(module, Attention)]
        if len(here) != 1:
            raise InputError(
                f"a model grows by the heads of one attention in each layer, layer {layer} has {len(here)}; choose other layers"
            )
        if here[0].inner_norm.kind != "none":
            raise InputError(
                f"connection {model.config.connection!r} norms all heads of a layer together, so a new one would change all; choose another"
            )
        found += here
    return found
