"""Parameters that have more than one name: the tied unembedding, and what a connection shares between its sites."""

from torch import nn


def shared_parameters(module: nn.Module) -> dict[str, str]:
    """Every further name of a parameter -> its first name."""
    first: dict[int, str] = {}
    further: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            further[name] = first[id(parameter)]
    return further
