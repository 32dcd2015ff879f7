"""What a compression will take, said before anything is touched."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from thalweg.compression.calibration import Calibration
from thalweg.compression.targets import Target

KEPT = 4  # bytes of a number of what is gathered


@dataclass(frozen=True)
class CompressionPlan:
    """matrices in ``layers`` layers, ``weights`` numbers. tokens: of the calibration; block_passes: runs of one block over all of it. model,
    states, gathered: bytes of the weights, of the states of one depth for all samples, and of what is kept of the inputs of one layer.
    """

    matrices: int
    layers: int
    weights: int
    samples: int
    tokens: int
    block_passes: int
    model: int
    states: int
    gathered: int

    @property
    def lines(self) -> list[str]:
        """For a person."""
        found = [
            f"{self.matrices} matrices in {self.layers} layers, {self.weights:,} weights, changed in place ({_mib(self.model)} of model)"
        ]
        if self.tokens:
            found.append(
                f"calibration: {self.samples} samples, {self.tokens:,} tokens; the model once over all of it, then "
                f"{self.block_passes} runs of one block"
            )
            found.append(
                f"beside the model {_mib(self.states)} for the states of one depth, {_mib(self.gathered)} for the inputs of one layer"
            )
        return found


def plan_of(
    model: nn.Module, targets: Sequence[Target], width: int, streams: int, calibration: Calibration | None
) -> CompressionPlan:
    """Sizes from shapes alone; of a layer every matrix is counted as if it had inputs of its own."""
    layers = sorted({target.layer for target in targets})
    parameters = {id(p): p.nbytes for p in model.parameters()}
    by_layer = [sum(KEPT * t.shape[1] ** 2 for t in targets if t.layer == layer) for layer in layers]
    tokens = 0 if calibration is None else calibration.tokens
    item = targets[0].weight.element_size() if targets else KEPT
    return CompressionPlan(
        matrices=len(targets),
        layers=len(layers),
        weights=sum(t.shape[0] * t.shape[1] for t in targets),
        samples=0 if calibration is None else len(calibration.samples),
        tokens=tokens,
        block_passes=layers[-1] + len(layers) if tokens else 0,
        model=sum(parameters.values()),
        states=2 * tokens * width * streams * item,
        gathered=max(by_layer, default=0) if tokens else 0,
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
