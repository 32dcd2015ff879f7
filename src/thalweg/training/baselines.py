"""What a classifier must beat, on the same data in the same order: the majority class, and a bag of embeddings."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from thalweg.data.classification import ClassificationTask, wilson
from thalweg.errors import InputError
from thalweg.models.bag import BagOfEmbeddings
from thalweg.training import schedule
from thalweg.training.config import TrainConfig
from thalweg.training.determinism import derive_seed, pick_device, reproducible
from thalweg.training.evaluation import evaluate_split
from thalweg.training.parallel import Ranks, Wrapped, clip

RATES = (2e-3, 5e-3, 1e-2, 2e-2)  # learning rates of the bag; the best on the validation split is taken


@dataclass(frozen=True)
class Baseline:
    """One row of a table beside a model's.

    name; split and sequences that it was evaluated on; accuracy, with its 95 % Wilson interval low..high; loss: nats per sequence, of the
    majority class the cross-entropy under the class shares of training. parameters; lr and step: of what was chosen on the validation
    split; at_edge: whether lr is the smallest or the largest that was tried, so that another may be better.
    """

    name: str
    split: str
    sequences: int
    accuracy: float
    low: float
    high: float
    loss: float
    parameters: int = 0
    lr: float | None = None
    step: int | None = None
    at_edge: bool = False


def classification_baselines(task: ClassificationTask, config: TrainConfig, split: str = "valid") -> list[Baseline]:
    """Both of them on one split."""
    return [majority(task, split), bag_of_embeddings(task, config, split)]


def majority(task: ClassificationTask, split: str = "valid") -> Baseline:
    """Always the class that the train split has most of. Raises: UnknownNameError, InputError."""
    nulls = _classifying(task).nulls_of(split)
    count, share = sum(task.counts(split).values()), nulls["majority_accuracy"]
    return Baseline("majority class", split, count, share, *wilson(round(share * count), count), nulls["chance"])


def bag_of_embeddings(
    task: ClassificationTask, config: TrainConfig, split: str = "valid", rates: tuple[float, ...] = RATES
) -> Baseline:
    """A :class:`thalweg.models.BagOfEmbeddings` of the width of ``config``, trained by AdamW on the batches that a run of it sees.

    As many updates, the same schedule, weight decay of matrices and clipping; of all ``rates`` and all evaluations the one with the lowest
    validation loss is taken, as the best checkpoint of a run is, and then evaluated on ``split``.
    Raises: UnknownNameError for a split that the task does not have; InputError for another kind of task.
    """
    _classifying(task).counts(split)
    device = pick_device(config.device)
    kept: tuple[float, float, int, BagOfEmbeddings] | None = None
    with reproducible(derive_seed(config.seed, 2), device, config.threads):
        for rate in rates:
            loss, step, model = _trained(task, config, rate, device)
            if kept is None or loss < kept[0]:
                kept = loss, rate, step, model
        if kept is None:
            raise InputError("rates must name at least one learning rate, got none")
        _, rate, step, model = kept
        found = _evaluated(model, task, split, config, device)
    return Baseline(
        "bag of embeddings",
        split,
        sum(task.counts(split).values()),
        found["task/accuracy"],
        found["task/accuracy_low"],
        found["task/accuracy_high"],
        found["val/loss"],
        parameters=sum(p.numel() for p in model.parameters()),
        lr=rate,
        step=step,
        at_edge=rate in (min(rates), max(rates)),
    )


def _trained(
    task: ClassificationTask, config: TrainConfig, rate: float, device: torch.device
) -> tuple[float, int, BagOfEmbeddings]:
    """Lowest validation loss, its step, and the model as it was then."""
    generator = torch.Generator().manual_seed(derive_seed(config.seed, 0))
    assert task.classes is not None  # a classification has them
    model = BagOfEmbeddings(task.vocab_size, config.resolved_width, task.classes, generator=generator).to(device)
    groups = [
        {"params": [model.embedding.weight, model.head.weight], "weight_decay": config.weight_decay},
        {"params": [model.head.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=config.betas, eps=config.eps)
    seed = derive_seed(config.seed, 1)
    sampler = task.sampler("train", config.sequence_length, config.batch_size, seed=seed)
    best: tuple[float, int, BagOfEmbeddings] | None = None
    for step in range(1, config.total_steps + 1):
        factor = schedule.factor(
            step,
            steps=config.total_steps,
            warmup=config.warmup_steps,
            kind=config.schedule,
            floor=config.min_lr_ratio,
        )
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        model(**{name: values.to(device) for name, values in sampler.next().items()}).loss.backward()
        clip(model, config.clip)
        optimizer.step()
        optimizer.zero_grad()
        if step % config.eval_every == 0 or step == config.total_steps:
            loss = _evaluated(model, task, "valid", config, device)["val/loss"]
            if best is None or loss < best[0]:
                best = loss, step, copy.deepcopy(model)
    assert best is not None  # the last step is evaluated
    return best


def _evaluated(
    model: BagOfEmbeddings, task: ClassificationTask, split: str, config: TrainConfig, device: torch.device
) -> dict[str, float]:
    wrapped = Wrapped(model, Ranks(), "ddp")  # type: ignore[arg-type]  # called as an encoder is
    return evaluate_split(wrapped, task, split, "", config, device, nullcontext, whole=True)


def _classifying(task: object) -> ClassificationTask:
    if not isinstance(task, ClassificationTask):
        raise InputError(f"baselines are of classifications such as sentiment, got {getattr(task, 'name', task)!r:.60}")
    return task
