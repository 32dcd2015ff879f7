"""Running a study of compressions: what is missing, one after the other, resumable at any moment."""

from typing import Any

from thalweg.errors import InputError
from thalweg.studies.compressed.observe import trials
from thalweg.studies.compressed.plan import CompressionArm, CompressionPlan, CompressionScale
from thalweg.studies.compressed.texts import readings
from thalweg.studies.edits.study import EditStudy, Group
from thalweg.studies.edits.texts import Reading
from thalweg.studies.judging import Trial


class CompressionStudy(EditStudy):
    """A plan of compressions at a scale with its records, which lie in ``compressions/`` and have the form of records of edits."""

    counts = "compressions"
    folder = "compressions"
    plan: CompressionPlan  # type: ignore[assignment]  # of the same shape
    scale: CompressionScale  # type: ignore[assignment]

    def checked(self, plan: Any) -> Any:
        if not isinstance(plan, CompressionPlan):
            raise InputError(f"{self.path.name} is no plan of compressions; open it with studies.study")
        return plan

    def evaluation(self) -> dict[str, Any]:
        scale, text = self.scale, readings(self.plan, self.scale_name)
        table = {"kind": "compression", "buckets": 1, "choices": scale.choices, "kl_documents": scale.kl_documents}
        return {**table, "errors": text.errors.facts, "calibration": text.calibration.facts}

    def reading(self, family: str) -> Reading:
        return readings(self.plan, self.scale_name).judged

    def bench(self, subject: Any, group: Group) -> Any:
        from thalweg.studies.compressed.measuring import Bench

        return Bench.of(subject, self.plan, self.scale_name)

    def rank(self, arm: CompressionArm) -> int:  # type: ignore[override]
        return 0 if arm.noop else 2 if arm.protect else 1

    def trials(self) -> list[Trial]:
        return trials(self.plan, self.scale_name, self.records())
