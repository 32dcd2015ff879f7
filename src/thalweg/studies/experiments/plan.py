"""Plans of experiments: which experiments run, on which seeds, and the rule that judges their rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from thalweg import config
from thalweg.errors import InputError, UnknownNameError
from thalweg.studies.experiments.base import AT, registry
from thalweg.studies.given import check_claim, check_names
from thalweg.studies.plan import Hypothesis, check_head, check_ids, digest


@dataclass(frozen=True)
class Use:
    """An experiment by name with options of its own."""

    experiment: str
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class ExperimentScale:
    """A size at which the plan can run. options: by experiment, put over those of its table. experiments: those that run; empty: all."""

    kind: Literal["confirmatory", "exploratory", "demo"]
    seeds: tuple[int, ...]
    experiments: tuple[str, ...] = ()
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    about: str = ""


@dataclass(frozen=True)
class ExperimentHypothesis(Hypothesis):
    """One claim: a contrast of one measure over columns ``EXPERIMENT.ARM``, per seed, against a margin.

    One column is a one-sample claim against the margin; two are paired by seed. at: ``only`` the one row of a column, or ``mean``, ``median``,
    ``min``, ``max`` over its rows. against: ``null``: every row less the null that it states. sd: of the contrast over seeds, for the power
    check; 0: none is stated. identity: algebra gives it, so that it checks the code and is no finding; never primary.
    """

    expected: float = 0.0
    sd: float = 0.0
    sd_source: str = ""
    at: str = "only"
    against: Literal["value", "null"] = "value"
    identity: bool = False


@dataclass(frozen=True)
class ExperimentPlan:
    """A whole plan file; see ``thalweg study new --kind experiment``."""

    schema: int
    name: str
    title: str
    question: str
    source: str
    kind: Literal["experiment"]
    experiments: dict[str, Use]
    scale: dict[str, ExperimentScale]
    hypotheses: tuple[ExperimentHypothesis, ...]
    alpha: float = 0.05
    multiplicity: Literal["holm", "bonferroni", "none"] = "holm"
    threads: int = 1
    choices: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_head(self.schema, self.alpha)
        if self.threads < 1:
            raise InputError(f"threads must be at least 1, got {self.threads}")
        for what, table in (("experiments", self.experiments), ("scale", self.scale), ("hypotheses", self.hypotheses)):
            if not table:
                raise InputError(f"a plan needs at least one entry under {what!r}")
        for what, names in (("experiments", self.experiments), ("scale", self.scale)):
            check_names(what, names)
        for name, scale in self.scale.items():
            self._check_scale(name, scale)
        check_ids(h.id for h in self.hypotheses)
        for h in self.hypotheses:
            self._check_hypothesis(h)

    def _check_scale(self, name: str, scale: ExperimentScale) -> None:
        if not scale.seeds or len(set(scale.seeds)) < len(scale.seeds) or min(scale.seeds) < 0:
            raise InputError(
                f"scale.{name}.seeds must be different whole numbers from 0, at least one, got {list(scale.seeds)}"
            )
        for one in (*scale.experiments, *scale.options):
            if one not in self.experiments:
                raise UnknownNameError(f"experiment in scale.{name}:", one, self.experiments)
        for one in self.experiments:
            self.options(one, name)

    def _check_hypothesis(self, h: ExperimentHypothesis) -> None:
        check_claim(h, "column")
        if h.at not in AT:
            raise UnknownNameError(f"at of {h.id}:", h.at, AT)
        if h.sd < 0:
            raise InputError(f"hypothesis {h.id}: sd must not be negative, got {h.sd:g}")
        if h.identity and h.primary:
            raise InputError(
                f"hypothesis {h.id} is an identity, which algebra gives; no finding can rest on it: set primary = false"
            )
        for column in h.contrast:
            name, _, arm = column.partition(".")
            if name not in self.experiments:
                raise UnknownNameError(
                    f"experiment in the contrast of {h.id} (EXPERIMENT.ARM):", name, self.experiments
                )
            columns = registry[self.experiments[name].experiment].columns
            if h.measure not in columns:
                raise UnknownNameError(
                    f"measure of {h.id} (of {self.experiments[name].experiment}):", h.measure, columns
                )
            if arm not in columns[h.measure]:
                raise UnknownNameError(f"arm of {h.measure} in the contrast of {h.id}:", arm, columns[h.measure])

    def options(self, name: str, scale: str) -> Any:
        """The options of an experiment at a scale. Raises: InputError, UnknownNameError naming the key."""
        use = self.experiments[name]
        values = config.merge(use.options, self.scale[scale].options.get(name, {}))
        return registry[use.experiment].options(values, where=f"experiments.{name}.options")

    def at(self, scale: str) -> ExperimentScale:
        """The scale called ``scale``. Raises: UnknownNameError."""
        if scale not in self.scale:
            raise UnknownNameError("scale", scale, self.scale)
        return self.scale[scale]

    def experiments_at(self, scale: str) -> list[str]:
        """Names of the experiments that run at ``scale``: those that primary hypotheses rest on first, else in the order of the file."""
        chosen = self.at(scale).experiments
        names = [name for name in self.experiments if not chosen or name in chosen]
        first = {name for h in self.hypotheses if h.primary for name in behind(h)}
        return sorted(names, key=lambda name: name not in first)

    def hypotheses_at(self, scale: str) -> list[ExperimentHypothesis]:
        """The hypotheses whose experiments all run at ``scale``."""
        names = set(self.experiments_at(scale))
        return [h for h in self.hypotheses if names.issuperset(behind(h))]

    def hash(self) -> str:
        """Identity of the content: comments, order of keys and white space do not count, every value does."""
        return digest(config.to_plain(self))


def behind(h: ExperimentHypothesis) -> list[str]:
    """The experiments that a hypothesis rests on."""
    return [column.partition(".")[0] for column in h.contrast]


def parse_experiments(table: Mapping[str, Any]) -> ExperimentPlan:
    """A plan from the tables of its TOML file; ``[experiment]`` is one that goes by the name of its experiment.

    Raises: InputError or UnknownNameError naming the key.
    """
    if "experiment" in table:
        if "experiments" in table:
            raise InputError("a plan has one table [experiment], or several [experiments.NAME], not both")
        one = table["experiment"]
        if not isinstance(one, Mapping) or not isinstance(one.get("experiment"), str):
            raise InputError('the table [experiment] names its experiment: experiment = "NAME"')
        table = {**{k: v for k, v in table.items() if k != "experiment"}, "experiments": {one["experiment"]: one}}
    return config.build(ExperimentPlan, table)
