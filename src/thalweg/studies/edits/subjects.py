"""The models of a study of edits: opened, or trained first, and fingerprinted."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg import config
from thalweg.capture import at_hand
from thalweg.capture.limits import vocabulary_of
from thalweg.errors import InputError
from thalweg.evaluation.subjects import ids_of
from thalweg.studies.edits.plan import EditPlan, Subject
from thalweg.studies.edits.texts import Reading
from thalweg.studies.resolve import fingerprint
from thalweg.studies.store import Store
from thalweg.training.config import TrainConfig, from_table

# Fields of a training whose defaults count in the identity of a record: those that there were when the first record was made. A field
# that came later counts where it differs from its default, so that old records stay findable.
FIRST = frozenset(
    [
        "accumulation",
        "batch_size",
        "betas",
        "clip",
        "compile",
        "connection",
        "connection_options",
        "data",
        "depth",
        "device",
        "diverge_factor",
        "diverge_patience",
        "diverge_rms",
        "eps",
        "eval_batches",
        "eval_every",
        "feed_forward",
        "geometry",
        "gradient_checkpointing",
        "heads",
        "layers",
        "log_every",
        "lr",
        "min_lr_ratio",
        "model",
        "norm",
        "optimizer",
        "parallel",
        "precision",
        "schedule",
        "seed",
        "sequence_length",
        "steps",
        "threads",
        "warmup",
        "weight_decay",
        "width",
    ]
)


class DivergedSubjectError(InputError):
    """The training of a subject diverged, so that nothing can be done to it; other subjects are none the worse."""


@dataclass(frozen=True)
class OpenSubject:
    """A model that can be edited, its tokenizer, and what a record says of both."""

    model: nn.Module
    tokenizer: Any
    facts: dict[str, Any]
    notes: tuple[str, ...]

    def token_rows(self, reading: Reading) -> list[list[int]]:
        """The tokens of every document that are read. Raises: InputError for a document that is too short."""
        vocabulary, found = vocabulary_of(self.model), []
        for document in reading.documents:
            ids = ids_of(self.tokenizer, document.text, vocabulary, document.name)
            if len(ids) < reading.tokens:
                raise InputError(
                    f"{document.name} has {len(ids)} tokens, the plan reads {reading.tokens}; raise characters in its text"
                )
            found.append(ids[: reading.tokens])
        return found


def recipe(plan: EditPlan, scale: str, name: str) -> TrainConfig | None:
    """How a subject is trained; None for one that is opened. Raises: InputError naming the subject."""
    subject, chosen = plan.subject[name], plan.at(scale)
    if not subject.train or name in chosen.models:
        return None
    try:
        return from_table(config.merge(subject.train, chosen.train))
    except InputError as error:
        raise InputError(f"subject {name}: {error}") from error


def resolved(plan: EditPlan, scale: str, name: str) -> dict[str, Any]:
    """What decides the weights of a subject, as far as it is known before it is opened: for the lock and the fingerprint."""
    subject, made = plan.subject[name], recipe(plan, scale, name)
    common = {"dtype": subject.dtype, "backend": subject.backend}
    if made is not None:
        defaults = config.to_plain(TrainConfig())
        stated = {k: v for k, v in config.to_plain(made).items() if k in FIRST or v != defaults.get(k)}
        return {"train": stated, "run": fingerprint(made), **common}
    where = plan.at(scale).models.get(name, subject.model)
    known = at_hand.MODELS.get(where)
    return {"model": where, **({"sha256": known.sha256} if known else {}), **common}


def label_of(plan: EditPlan, scale: str, name: str) -> str:
    """For the name of a record: the model's, with what a file name cannot hold taken out."""
    made = recipe(plan, scale, name)
    where = made.connection if made else plan.at(scale).models.get(name, plan.subject[name].model)
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(where).name) or name


def open_subject(plan: EditPlan, scale: str, name: str, store: Store, workspace: Path, on_event=None) -> OpenSubject:
    """Open a subject, training it first if its run is not there yet.

    Raises: DivergedSubjectError for a training that diverged; what opening and training raise.
    """
    subject, made = plan.subject[name], recipe(plan, scale, name)
    model, tokenizer, notes = (
        _opened(subject, plan.at(scale).models.get(name, subject.model))
        if made is None
        else _trained(made, store, workspace, on_event)
    )
    facts = {
        "weights": weights_digest(model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "backend": getattr(getattr(model, "config", None), "_attn_implementation", None) or "thalweg",
    }
    return OpenSubject(model, tokenizer, facts, notes)


def _opened(subject: Subject, where: str) -> tuple[nn.Module, Any, tuple[str, ...]]:
    from thalweg.capture.opening import open_model

    opened = open_model(where, dtype=subject.dtype, backend=subject.backend or None)
    return opened.model, opened.require_tokenizer(), opened.notes


def _trained(made: TrainConfig, store: Store, workspace: Path, on_event) -> tuple[nn.Module, Any, tuple[str, ...]]:
    from thalweg.records.run import RunFolder
    from thalweg.training import load_model, train
    from thalweg.training.tasks import load_task

    mark = fingerprint(made)
    folder = workspace / store.path(mark, made.connection, made.seed).stem
    if not (RunFolder.is_run(folder) and RunFolder.open(folder).status in ("done", "diverged")):
        train(made, folder, resume=RunFolder.is_run(folder), on_event=on_event)
    run = RunFolder.open(folder)
    if run.status == "diverged":
        why = run.result.get("reason") or f"see {folder}"
        raise DivergedSubjectError(
            f"the training of the subject {made.connection} diverged ({why}), so there is nothing to edit; its recipe is locked: "
            "write a new plan, under another name, with a lower lr"
        )
    if run.status != "done":
        raise InputError(
            f"the training of the subject {made.connection} is {run.status}, so there is nothing to edit yet; the same command goes on"
        )
    if store.find(mark, made.connection, made.seed) is None:
        store.keep(run, mark, made.connection, made.seed)
    model, _ = load_model(folder, "last")
    return model, load_task(made).tokenizer, (f"trained here: {folder.name}", *run.notes)


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of all weights and their names."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
