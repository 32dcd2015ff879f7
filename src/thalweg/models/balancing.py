"""Loss-free balancing of experts: the load of a whole batch is gathered, then every router's bias takes one step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thalweg.models.sublayers import MixtureOfExperts
from thalweg.models.transformer import Transformer

Sum = Callable[[Sequence[float]], Sequence[float]]  # numbers -> each of them summed over all ranks


class Balancer:
    """Counts the tokens that each expert of ``decoder`` is sent, and steps the biases once per update.

    Every pass that trains (mode ``train``, gradients on) adds to :attr:`load` [sites experts], None before the first; evaluation, passes
    without gradients and recomputed blocks do not. Call :meth:`step` after the optimiser has stepped; ``total`` sums numbers over the
    ranks that share a batch. :attr:`last` is the load of the last step, over all ranks. A decoder without experts has nothing to balance:
    all of this then does nothing.
    Source: Wang et al. 2024 (arXiv 2408.15664), Algorithm 1: b_i += u sign(mean load - load_i).
    """

    def __init__(self, decoder: Transformer, total: Sum = list):
        self.layers = [layer for layer in decoder.sublayers if isinstance(layer, MixtureOfExperts)]
        self.total = total
        self.load: Tensor | None = None
        self.last: Tensor | None = None
        if self.layers:
            decoder.register_forward_hook(self._count)

    def _count(self, decoder: torch.nn.Module, *_: object) -> None:
        if decoder.training and torch.is_grad_enabled():
            load = torch.stack([layer.load for layer in self.layers if layer.load is not None])
            self.load = load if self.load is None else self.load + load

    def forget(self) -> None:
        """Begin a batch: what was counted so far belongs to none."""
        self.load = None

    def step(self) -> None:
        """Step every bias once, and begin the next batch."""
        if self.load is None:
            return
        summed = self.total(self.load.flatten().tolist())
        self.last = torch.tensor([round(count) for count in summed], device=self.load.device).view_as(self.load)
        for layer, sent in zip(self.layers, self.last, strict=True):
            layer.router.balance(sent)
        self.forget()
