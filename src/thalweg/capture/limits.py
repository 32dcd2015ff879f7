"""What a model can take: the most tokens of a row, and the tokens that it has."""

from typing import Any

from torch import nn

from thalweg.errors import InputError

_LENGTHS = ("max_length", "n_positions", "max_position_embeddings", "n_ctx")
_UNSET = 10**9  # tokenizers say more than this when they know no length


def longest_of(model: nn.Module) -> int | None:
    """The most tokens that a model takes, by its config; None where it does not say.

    Less what a table of positions spends on padding: RoBERTa and its kin count from the padding's position on, 514 entries for 512 tokens.
    """
    config = _config(model)
    ours = type(config).__module__.startswith("thalweg.")
    names = _LENGTHS if ours else _LENGTHS[1:]  # max_length of transformers is about generation
    found = (getattr(config, name, None) for name in names)
    most = next((n for n in found if isinstance(n, int) and 0 < n < _UNSET), None)
    return None if most is None else min([most, *_counted_from_padding(model)])


def _counted_from_padding(model: nn.Module) -> list[int]:
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    return [
        t.num_embeddings - t.padding_idx - 1
        for t in tables
        if isinstance(t, nn.Embedding) and t.padding_idx is not None
    ]


def window_length(longest: int | None, asked: int | None, usual: int, who: str = "the model") -> int:
    """Tokens of a window: as many as asked; else the usual number, or what the model takes. Raises: InputError for more than it takes."""
    if asked is None:
        return min(usual, longest or usual)
    if longest is not None and isinstance(asked, int) and asked > longest:
        raise InputError(f"{who} takes {longest} tokens at most, got a length of {asked}; give {longest} or less")
    return asked


def check_room(model: nn.Module, given: int, added: int) -> None:
    """Raises: InputError where a prompt and what is added to it are more than the model says it takes."""
    most = longest_of(model)
    if most is not None and given + added > most:
        raise InputError(
            f"{given} + {added} tokens are more than the {most} that this model takes; give fewer --tokens"
        )


def vocabulary_of(model: nn.Module) -> int | None:
    """Entries of the embedding, else of the vocabulary that the config names; None where neither can be told."""
    embed: Any = getattr(model, "get_input_embeddings", None)
    try:
        table = embed() if embed is not None else getattr(model, "embedding", None)
    except (NotImplementedError, AttributeError):
        table = None
    found = getattr(table, "num_embeddings", None) or getattr(_config(model), "vocab_size", None)
    return found if isinstance(found, int) and found > 0 else None


def _config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "text_config", None) or config
