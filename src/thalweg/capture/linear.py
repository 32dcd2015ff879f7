"""Linear maps, whatever class they are of."""

from jaxtyping import Float
from torch import Tensor, nn


def linear_weight(module: nn.Module) -> Float[Tensor, "out in"] | None:
    """The weight of y = W x + bias as [out in], a view; None for a class of which it is not known (adapters, packed weights).

    ``Conv1D`` of transformers holds [in out].
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.ndim != 2:
        return None
    if isinstance(module, nn.Linear):
        return weight if weight.shape == (module.out_features, module.in_features) else None
    return weight.T if type(module).__name__ == "Conv1D" and not list(module.children()) else None
