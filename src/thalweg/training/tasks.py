"""The data that a configuration asks for."""

from pathlib import Path

from thalweg import data
from thalweg.data import Task
from thalweg.training.config import TrainConfig


def load_task(config: TrainConfig, cache_dir: str | Path | None = None) -> Task:
    """The task that ``config`` names, with its tokenizer and objective. Raises: as :func:`thalweg.data.load`."""
    return data.load(
        config.data,
        tokenizer=config.tokenizer,
        vocab_size=config.vocab_size,
        cache_dir=cache_dir,
        objective=config.objective,
    )
