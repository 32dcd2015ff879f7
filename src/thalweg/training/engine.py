"""The machine of a run: model, optimisers and data together, one update at a time. Writes nothing to the disk."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg import config as configs
from thalweg.data import Batch, Task
from thalweg.errors import CheckpointError, InputError
from thalweg.geometry.routing import max_over_mean
from thalweg.models.balancing import Balancer
from thalweg.models.decoder import Decoder
from thalweg.models.making import KINDS, make
from thalweg.models.retained import count_one_update
from thalweg.models.sharing import named_weights
from thalweg.models.sublayers.prototypes import dictionary_loss
from thalweg.models.trace import StreamTrace
from thalweg.models.transformer import Transformer
from thalweg.records.measurements import Measurement
from thalweg.training import checkpoint, initial, schedule
from thalweg.training.config import TrainConfig
from thalweg.training.determinism import derive_seed, random_state, set_random_state
from thalweg.training.diagnostics import Movement, edit_metrics, gradient_by_layer, retained_by_layer, stream_by_layer
from thalweg.training.evaluation import evaluate, held_out_length
from thalweg.training.optim import Optimizers, dictionary_scales, make_groups
from thalweg.training.parallel import Ranks, Wrapped, clip, like, whole


@dataclass(frozen=True)
class Gradients:
    """What one backward pass over a global batch came to.

    loss: in nats per prediction that is scored; norm: of the gradient before clipping; scale: what clipping multiplied it with.
    """

    loss: float
    norm: float
    scale: float


class Engine:
    """Builds a run's parts and moves them; call it inside :func:`thalweg.training.determinism.reproducible`.

    Raises: InputError for a batch that cannot be shared by the ranks, or data that does not fit the model.
    """

    def __init__(self, config: TrainConfig, task: Task, device: torch.device, ranks: Ranks):
        self.config, self.task, self.device, self.ranks = config, task, device, ranks
        longest = max(held_out_length(task, split, config) for split in task.splits)
        generator = torch.Generator().manual_seed(derive_seed(config.seed, 0))
        self.model = make(config.network(task, longest), generator=generator).to(device)
        if config.init_from is not None:
            initial.load(self.model, config.init_from)
        self.movement = Movement(self.model)
        self._hold()
        self.optimizers = self._optimizers()
        self.sampler = task.sampler(
            "train",
            config.sequence_length,
            config.batch_size // config.accumulation,
            seed=derive_seed(config.seed, 1),
            rank=ranks.rank,
            world=ranks.world,
        )

    def _hold(self) -> None:
        """What is made anew for every model: its copy for the ranks, the balancer of its experts."""
        config, ranks = self.config, self.ranks
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.connection_parameters = sum(p.numel() for p in self.movement.start.values())
        if config.compile:
            self.model.compile_blocks()
        self.wrapped = Wrapped(self.model, ranks, config.parallel, bfloat16=config.precision == "bfloat16")
        self.balancer = Balancer(self.model, lambda loads: ranks.sum(*loads, device=self.device))

    def _optimizers(self) -> Optimizers:
        config = self.config
        groups = make_groups(
            self.model.named_parameters(),
            self.model.stream.group_hints(),
            optimizer=config.optimizer,
            weight_decay=config.weight_decay,
            scales=dictionary_scales(self.model) if config.dictionary_weight else None,
        )
        return Optimizers(self.model, groups, betas=config.betas, eps=config.eps, momentum=config.momentum)

    def adopt(self, model: Transformer, carry: Callable[[Optimizers], object] | None = None) -> None:
        """Train ``model`` from now on in the place of the one before, of which it is another shape.

        carry: lets the optimisers go on with the parameters of ``model``, with the state of those that they came from (None: they begin anew).
        """
        self.model = model.to(self.device).train(self.model.training)
        self.movement.follow(self.model)
        self._hold()
        if carry is None:
            self.optimizers = self._optimizers()
        else:
            carry(self.optimizers)

    def autocast(self) -> AbstractContextManager:
        """The region in which the model runs; coefficients of connections step out of it by themselves."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16")

    def on_device(self, batch: Batch) -> Batch:
        """A batch as the model is called with it."""
        return {name: values.to(self.device) for name, values in batch.items()}

    def gradients(self) -> Gradients:
        """Forward and backward over the next global batch, gradients clipped.

        The loss is the mean over all that is scored in the global batch (tokens, or sequences of a classification), however that is spread
        over ranks and micro-batches: each micro-batch is weighted by its share, and by the number of ranks, since gradients are averaged
        over ranks.
        """
        self.optimizers.zero_grad()
        self.balancer.forget()
        batches = [self.sampler.next() for _ in range(self.config.accumulation)]
        scored = [self.task.scored(batch) for batch in batches]
        (total,) = self.ranks.sum(sum(scored), device=self.device)
        if not total:
            raise InputError(
                f"a batch of {self.task.name} has no scored token (all labels are -100); nothing can be learned from it"
            )
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro, (batch, count) in enumerate(zip(batches, scored, strict=True)):
            with self.wrapped.backward_of(micro, len(batches) - 1):
                with self.autocast():
                    inputs = self.on_device(batch)
                    out = self.wrapped(inputs.pop("input_ids"), **inputs)
                loss = out.loss if count else out.logits.float().sum() * 0.0  # the mean over no token is NaN
                aim = loss
                if self.config.dictionary_weight:
                    aim = loss + self.config.dictionary_weight * dictionary_loss(self.model)
                (aim * (count * self.ranks.world / total)).backward()
            nats += loss.detach().double() * count
        (nats_everywhere,) = self.ranks.sum(nats.item(), device=self.device)
        return Gradients(nats_everywhere / total, *clip(self.model, self.config.clip))

    def learning_rate(self, step: int) -> float:
        """The run's learning rate for the update that completes ``step``."""
        config = self.config
        return config.lr * schedule.factor(
            step, steps=config.total_steps, warmup=config.warmup_steps, kind=config.schedule, floor=config.min_lr_ratio
        )

    def update(self, step: int) -> None:
        """Apply the gradients, then even out the load of experts, and let the schedules of edits take a step."""
        self.optimizers.step(self.learning_rate(step))
        self.balancer.step()
        count_one_update(self.model)

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics; every rank gets the same."""
        return evaluate(self.wrapped, self.task, self.config, self.device, self.autocast)

    def look(self, step: int, gradients: Gradients) -> tuple[dict[str, float], list[Measurement], list[Measurement]]:
        """Diagnostics after an update: numbers of the whole model, rows by layer on movement and gradients, rows on the stream's size."""
        batch = self.task.unpadded("valid", held_out_length(self.task, "valid", self.config), 1)

        inputs = self.on_device(batch)
        del inputs["labels"]

        def run(trace: StreamTrace) -> None:
            with self.autocast():
                self.model(**inputs, trace=trace)

        values = self.movement.metrics(self.model, gradients.scale) | edit_metrics(self.model, gradients.scale)
        if self.balancer.last is not None:
            values["experts/max_over_mean"] = max_over_mean(self.balancer.last).max().item()
        rows = [*self.movement.by_layer(self.model, step), *gradient_by_layer(self.model, step, gradients.scale)]
        rows += [*self.movement.by_coefficient(self.model, step, gradients.scale), *retained_by_layer(self.model, step)]
        return values, rows, stream_by_layer(self.model.stream, run, step)

    # what a checkpoint holds; all ranks call these together

    def weights(self) -> dict[str, Tensor]:
        """Name -> whole tensor."""
        return whole(named_weights(self.model))

    def state(self) -> dict[str, Any]:
        return {
            "optimizers": whole(self.optimizers.state_dict()),
            "sampler": self.sampler.state_dict(),
            "random": self.ranks.collect(random_state(self.device)),
        }

    def load(self, saved: checkpoint.Checkpoint, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. Raises: CheckpointError if it does not fit."""
        weights = saved.weights()
        if self.config.growth is not None and saved.manifest["model"] != configs.to_plain(self.model.config):
            shape = configs.build(type(self.model.config), saved.manifest["model"], where="model")
            self.adopt(type(self.model)(shape, generator=torch.Generator().manual_seed(0)))
        checkpoint.check_fit(weights, self.model, saved.path)
        named = named_weights(self.model)
        checkpoint.load_weights(
            self.model, {name: like(weights[name], target) for name, target in named.items()}, saved.path
        )
        self.optimizers.load_state_dict(state["optimizers"], saved.path / checkpoint.STATE)
        self.sampler.load_state_dict(state["sampler"])
        if self.ranks.rank < len(state["random"]):  # with more ranks than before the new ones keep their seed
            set_random_state(state["random"][self.ranks.rank], self.device)


def load_model(run: str | Path, which: str | int = "best") -> tuple[Transformer, dict[str, Any]]:
    """The model of a run, decoder or encoder, and the manifest of its checkpoint.

    run: a run folder; which: ``best``, ``last`` or a step. Raises: CheckpointError.
    """
    saved = checkpoint.read(checkpoint.find(Path(run) / "checkpoints", which))
    if "model" not in saved.manifest:
        raise CheckpointError(f"{saved.path} does not say what model it holds; train again with this version")
    kind = saved.manifest.get("architecture", "decoder")  # which older versions did not write
    if kind not in KINDS:
        raise CheckpointError(f"{saved.path} holds a model of another kind, {kind!r}; use the version that wrote it")
    model = make(configs.build(KINDS[kind].made_of, saved.manifest["model"], where="model"))
    checkpoint.load_weights(model, saved.weights(), saved.path)
    return model.eval(), saved.manifest


def load_decoder(run: str | Path, which: str | int = "best") -> tuple[Decoder, dict[str, Any]]:
    """:func:`load_model` for what only a decoder can do. Raises: CheckpointError; InputError for a run of an encoder."""
    model, manifest = load_model(run, which)
    if not isinstance(model, Decoder):
        raise InputError(f"{run} holds an encoder, which predicts no next token; give a run of a decoder")
    return model, manifest
