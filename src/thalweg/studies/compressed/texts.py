"""Three sets of documents that share no piece of text: judged on, errors read on, calibrated on."""

import dataclasses
from dataclasses import dataclass

from thalweg.studies.compressed.plan import CompressionPlan
from thalweg.studies.edits.texts import Reading, cut_reading


@dataclass(frozen=True)
class Readings:
    """judged: fidelity; errors: layer-wise errors; calibration: what compressors that need data see."""

    judged: Reading
    errors: Reading
    calibration: Reading


def readings(plan: CompressionPlan, scale_name: str) -> Readings:
    """The documents of ``plan`` at a scale. Raises: InputError for a text that is too short."""
    scale = plan.at(scale_name)

    def of(offset: int, count: int) -> Reading:
        shifted = dataclasses.replace(scale, skip=scale.skip + offset)
        return cut_reading(plan.text, shifted, scale.tokens, count)

    return Readings(of(0, scale.documents), of(1, scale.documents), of(2, scale.calibration))
