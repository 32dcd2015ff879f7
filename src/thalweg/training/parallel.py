"""One process or many: who this process is, how the model is replicated or sharded, and how numbers and tensors are gathered.

Started by ``torchrun``, which sets RANK, WORLD_SIZE and LOCAL_RANK. Every collective runs over parameters in the order of their names in
the model, never over a set, so that all ranks agree.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from thalweg.models.sublayers.moe import Router
from thalweg.models.transformer import Transformer

ParallelKind = Literal["ddp", "fsdp"]
SITE_VERBS = ("read", "write", "advance")


@dataclass(frozen=True)
class Ranks:
    """This process among all that train one model."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def sum(self, *values: float, device: torch.device) -> list[float]:
        """The values, each summed over all ranks, in float64."""
        if self.world == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return total.tolist()

    def any(self, flag: bool, *, device: torch.device) -> bool:
        """Whether the flag is set on some rank; every rank gets the same answer."""
        return self.sum(float(flag), device=device)[0] > 0

    def collect(self, value: Any) -> list[Any]:
        """The value of every rank, in order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.world > 1:
            dist.barrier()

    def first_does(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` on the first rank and give its result, or its error, to all."""
        if self.world == 1:
            return action()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = action()
            except Exception as error:  # re-raised below, on every rank
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            self.wait()  # an error ends the process, and with it a connection that others may still read from
            raise outcome[1]
        return outcome[0]


@contextmanager
def process_group(device: torch.device) -> Iterator[Ranks]:
    """The ranks of this run. Under ``torchrun`` the process group is made here and ended here; one that exists already is used.

    The ranks leave together: one that leaves early may close a connection that another still reads from. After an error none waits, since
    it may be the error of one.
    """
    if dist.is_available() and dist.is_initialized():
        yield Ranks(dist.get_rank(), dist.get_world_size())
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
    )
    try:
        ranks = Ranks(dist.get_rank(), dist.get_world_size())
        yield ranks
        ranks.wait()
    finally:
        dist.destroy_process_group()


class Wrapped:
    """A model as the ranks hold it. ``model`` is the bare one, whose parameters train; calling this object runs it for training."""

    def __init__(self, model: Transformer, ranks: Ranks, kind: ParallelKind, *, bfloat16: bool = False):
        self.model, self.ranks = model, ranks
        self.kind: ParallelKind | None = kind if ranks.world > 1 else None
        self._call: nn.Module = model
        if self.kind == "fsdp":
            shard(model, bfloat16=bfloat16)
        elif self.kind == "ddp":
            self._call = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def backward_of(self, micro: int, last: int) -> AbstractContextManager[None]:
        """Where micro-batch ``micro`` runs: gradients are averaged over the ranks in the ``last`` one only."""
        if isinstance(self._call, DistributedDataParallel) and micro < last:
            return self._call.no_sync()
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(micro == last)
        return nullcontext()

    def share(self, batches: Sequence[Any]) -> Sequence[Any]:
        """The evaluation batches of this rank. Sharded models call together, so there every rank takes all of them."""
        return batches if self.kind == "fsdp" else batches[self.ranks.rank :: self.ranks.world]

    def evaluated(self, sums: dict[str, float]) -> list[dict[str, float]]:
        """The sums of every rank that took a share of an evaluation, in the same order everywhere, so that all ranks add up alike."""
        return self.ranks.collect(sums) if self.kind == "ddp" else [sums]


def shard(model: Transformer, *, bfloat16: bool = False) -> None:
    """FSDP2 for a model: the sites of its stream first, then its blocks, then what is left.

    Sites keep their parameters in float32 and whole once gathered: their ``read``, ``write`` and ``advance`` are registered because FSDP
    acts on ``forward`` only, and they cast inside by themselves. Blocks gather in bfloat16 where asked, which is what autocast would make
    of their weights anyway, but for routers, which stay in float32; nothing casts the stream or a context that passes through. Gradients
    are reduced in float32.
    """
    island = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    narrow = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bfloat16 else torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for site in model.stream.sites:
        if any(True for _ in site.parameters()):
            fully_shard(site, mp_policy=island, reshard_after_forward=False)
            for verb in SITE_VERBS:
                register_fsdp_forward_method(site, verb)
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, Router):
                fully_shard(module, mp_policy=island, reshard_after_forward=False)
        fully_shard(block, mp_policy=narrow)
    fully_shard(model, mp_policy=island)


def whole(tree: Any) -> Any:
    """Every sharded tensor of a tree as a whole one (all ranks must call it); others as they are."""
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, tree)


def like(value: Tensor, target: Tensor) -> Tensor:
    """A whole tensor sharded as ``target`` is, if it is."""
    if isinstance(target, DTensor) and value.shape == target.shape:
        return distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
    return value


def norm(tensors: Iterable[Tensor | None]) -> float:
    """Euclidean norm of all tensors together, in float64; None counts as zero."""
    squares = [whole(x.detach().double().square().sum()) for x in tensors if x is not None]
    return torch.stack(squares).sum().sqrt().item() if squares else 0.0


def clip(model: nn.Module, largest: float) -> tuple[float, float]:
    """Scale the gradients so that their global norm is at most ``largest`` (0: leave them); gives the norm before, and the scale."""
    parameters = list(model.parameters())
    total = whole(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if not largest:
        return total.item(), 1.0
    nn.utils.clip_grads_with_norm_(parameters, largest, total)
    return total.item(), min(1.0, largest / (total.item() + 1e-6))  # the scale as torch computes it


def is_main() -> bool:
    """Whether this process is the one that speaks, before any process group is made."""
    return os.environ.get("RANK", "0") == "0"
