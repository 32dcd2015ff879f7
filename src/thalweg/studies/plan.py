"""Plan files: what is asked, which arms run at which scale, and the rule that will judge them, all fixed before the first run."""

import datetime
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from thalweg import config
from thalweg.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from thalweg.studies.compressed.plan import CompressionPlan
    from thalweg.studies.edits.plan import EditPlan
    from thalweg.studies.experiments.plan import ExperimentPlan

    AnyPlan: TypeAlias = "Plan | EditPlan | CompressionPlan | ExperimentPlan"

PLAN_SCHEMA = 1
KINDS = ("compression", "experiment")  # that a plan states; those of trained arms and of edits are told by their tables
_NAME = re.compile(r"[A-Za-z0-9_-]+")  # of arms and scales: they name files and stand in commands


@dataclass(frozen=True)
class Match:
    """Make an arm equal in size or cost to another: the package picks ``by`` so that parameters or FLOPs per token agree."""

    parameters: str | None = None
    flops: str | None = None
    by: Literal["ffn_width", "width"] = "ffn_width"


@dataclass(frozen=True)
class Arm:
    """One configuration. ``train`` overrides the training table; ``options`` are those of the connection."""

    connection: str
    options: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    match: Match | None = None
    role: Literal["treatment", "baseline", "control"] = "treatment"
    note: str = ""


@dataclass(frozen=True)
class Scale:
    """A size at which the plan can run. ``kind`` says what its verdicts may be.

    confirmatory: at least five seeds and simulated power of 0.8; exploratory: never ``supported``; demo: never judged.
    learning_rates: one grid for all arms, searched on ``tuning_seed`` over ``tuning_fraction`` of the steps; empty: the rate of the
    training table. Where ``tuning_seed`` is several, the lowest mean loss over them wins. While the best rate lies at an edge the grid
    grows by its own ratio, at most ``extend`` times.
    """

    kind: Literal["confirmatory", "exploratory", "demo"]
    seeds: tuple[int, ...]
    train: dict[str, Any] = field(default_factory=dict)
    learning_rates: tuple[float, ...] = ()
    tuning_seed: int | tuple[int, ...] = 1000  # another field here would change the hash of every locked plan
    tuning_fraction: float = 0.5
    extend: int = 2
    arms: tuple[str, ...] = ()  # empty: all
    about: str = ""

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """The seeds on which every learning rate is tried."""
        return self.tuning_seed if isinstance(self.tuning_seed, tuple) else (self.tuning_seed,)


@dataclass(frozen=True)
class Hypothesis:
    """One claim: a contrast of one measure over arms, per seed, against a margin.

    contrast: factor of each arm (``{mgt = 1, post_norm = -1}`` is a paired difference, ``{mgt = 1}`` the value itself).
    at: which value of the measure: ``final`` or ``best`` for logged series; ``last``, ``first``, ``mean``, ``min``, ``trend`` (Spearman
    correlation with depth) or ``layer:K`` for measures by depth; ``final`` for scalars.
    margin: the minimum effect of interest, in the unit of the measure and in the stated direction.
    expected, sd: the effect hoped for and the assumed standard deviation of one contrast, for the power check; ``sd_source`` says whence.
    diverged: the value a diverged arm takes: ``unigram`` (losses: the unigram entropy), ``inconclusive``, or a number.
    """

    id: str
    statement: str
    measure: str
    contrast: dict[str, float]
    direction: Literal["greater", "less"]
    margin: float
    expected: float
    sd: float
    sd_source: str
    at: str = "final"
    diverged: str | float = "inconclusive"
    primary: bool = True
    must_learn: bool = True
    unit: str = ""

    def sign(self) -> float:
        """+1 when a larger contrast favours the statement, -1 when a smaller one does."""
        return 1.0 if self.direction == "greater" else -1.0


def check_head(schema: int, alpha: float) -> None:
    """What plans of every kind begin with. Raises: InputError."""
    if schema != PLAN_SCHEMA:
        raise InputError(
            f"plan schema must be {PLAN_SCHEMA}, got {schema}; this version of thalweg cannot read the plan"
        )
    if not 0 < alpha < 1:
        raise InputError(f"alpha must lie between 0 and 1, got {alpha}")


def check_ids(ids: Iterable[str]) -> None:
    """That every hypothesis can be named. Raises: InputError."""
    ids = list(ids)
    if len(set(ids)) < len(ids):
        raise InputError(f"hypothesis ids must differ, got {', '.join(ids)}")


@dataclass(frozen=True)
class Plan:
    """A whole plan file; see ``thalweg study new`` for a commented one."""

    schema: int
    name: str
    title: str
    question: str
    source: str
    train: dict[str, Any]
    scale: dict[str, Scale]
    arms: dict[str, Arm]
    hypotheses: tuple[Hypothesis, ...]
    alpha: float = 0.05
    multiplicity: Literal["holm", "bonferroni", "none"] = "holm"
    choices: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_head(self.schema, self.alpha)
        for what, table in (("scale", self.scale), ("arms", self.arms), ("hypotheses", self.hypotheses)):
            if not table:
                raise InputError(f"a plan needs at least one entry under {what!r}")
        check_ids(h.id for h in self.hypotheses)
        for hypothesis in self.hypotheses:
            if not hypothesis.contrast:
                raise InputError(f"hypothesis {hypothesis.id} has an empty contrast; name at least one arm")
            for arm in hypothesis.contrast:
                self._known_arm(arm, f"arm in the contrast of {hypothesis.id}:")
        for name, arm in self.arms.items():
            if arm.match is not None:
                targets = [t for t in (arm.match.parameters, arm.match.flops) if t is not None]
                if len(targets) != 1:
                    raise InputError(f"arms.{name}.match names exactly one of parameters and flops, got {len(targets)}")
                self._known_arm(targets[0], f"arm in arms.{name}.match:")
                if self.arms[targets[0]].match is not None:
                    raise InputError(
                        f"arms.{name} is matched to {targets[0]!r}, which is matched itself; match to an arm of fixed size"
                    )
        for name, scale in self.scale.items():
            if len(set(scale.seeds)) < max(len(scale.seeds), 1):
                raise InputError(
                    f"scale.{name}.seeds must be different integers, at least one, got {list(scale.seeds)}"
                )
            if len(set(scale.tuning_seeds)) < max(len(scale.tuning_seeds), 1):
                raise InputError(
                    f"scale.{name}.tuning_seed must be one integer or different ones, got {list(scale.tuning_seeds)}"
                )
            if scale.learning_rates and (both := sorted(set(scale.tuning_seeds) & set(scale.seeds))):
                raise InputError(
                    f"scale.{name}: tuning_seed {both[0]} is one of the seeds; learning rates need a separate seed"
                )
            if not 0 < scale.tuning_fraction <= 1:
                raise InputError(f"scale.{name}.tuning_fraction must lie in (0, 1], got {scale.tuning_fraction}")
            if scale.extend < 0:
                raise InputError(f"scale.{name}.extend must be 0 or more, got {scale.extend}")
            for rate in scale.learning_rates:
                if not (rate > 0 and math.isfinite(rate)):
                    raise InputError(f"scale.{name}.learning_rates must be positive and finite, got {rate}")
            for arm in scale.arms:
                self._known_arm(arm, f"arm in scale.{name}.arms:")

    def _known_arm(self, arm: str, what: str) -> None:
        if arm not in self.arms:
            raise UnknownNameError(what, arm, self.arms)

    def at(self, scale: str) -> Scale:
        """The scale called ``scale``. Raises: UnknownNameError."""
        if scale not in self.scale:
            raise UnknownNameError("scale", scale, self.scale)
        return self.scale[scale]

    def arms_at(self, scale: str) -> list[str]:
        """Names of the arms that run at ``scale``, in the order of the file."""
        chosen = self.at(scale).arms
        return [name for name in self.arms if not chosen or name in chosen]

    def hypotheses_at(self, scale: str) -> list[Hypothesis]:
        """The hypotheses whose arms all run at ``scale``."""
        arms = set(self.arms_at(scale))
        return [h for h in self.hypotheses if arms.issuperset(h.contrast)]

    def hash(self) -> str:
        """Identity of the content: comments, order of keys and white space do not count, every value does."""
        return digest(config.to_plain(self))


def digest(value: Any) -> str:
    """SHA-256 of plain values in canonical JSON."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def load(path: str | Path) -> "AnyPlan":
    """Read a plan file of any kind. Raises: InputError or UnknownNameError naming the key."""
    return parse(config.read_toml(path))


def parse(table: Mapping[str, Any]) -> "AnyPlan":
    """A plan from the tables of its TOML file; one of experiments or compressions if its ``kind`` says so, else one of edits if it has a table
    ``subject``.
    """
    _plain_values(table, "")
    if "kind" in table and table["kind"] not in KINDS:
        raise UnknownNameError(
            "kind of plan", str(table["kind"]), KINDS, more="Plans of trained arms and of edits state none."
        )
    if table.get("kind") == "experiment":
        from thalweg.studies.experiments.plan import parse_experiments

        return parse_experiments(table)
    if "kind" in table:
        from thalweg.studies.compressed.plan import parse_compressions

        return parse_compressions(table)
    if "subject" in table:
        from thalweg.studies.edits.plan import parse_edits

        return parse_edits(table)
    plan = config.build(Plan, table)
    for what, names in (("scale", plan.scale), ("arms", plan.arms)):
        for name in names:
            if not _NAME.fullmatch(name):
                raise InputError(f"{what}: a name holds only letters, digits, _ and - (A-Z, a-z, 0-9), got {name!r}")
    return plan


def _plain_values(value: Any, where: str) -> None:
    """Refuse what has no identity in JSON: numbers that are not finite, dates and times."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _plain_values(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            _plain_values(inner, f"{where}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where} must be a finite number, got {value}")
    elif isinstance(value, datetime.date | datetime.time):
        raise InputError(f"{where} is a date or time, which no key of a plan takes; put it in quotes, got {value}")
