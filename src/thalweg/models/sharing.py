"""Parameters that have more than one name (the tied unembedding, what a connection shares between its sites), and all by their first."""

from torch import Tensor, nn


def shared_parameters(module: nn.Module) -> dict[str, str]:
    """Every further name of a parameter -> its first name."""
    first: dict[int, str] = {}
    further: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            further[name] = first[id(parameter)]
    return further


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter (tied ones under their first name) and persistent buffer, by name."""
    aliases = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in module.state_dict().items() if name not in aliases}
    return {**dict(module.named_parameters()), **buffers}
