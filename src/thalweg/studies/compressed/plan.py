"""Plans whose arms are compressions: subjects, text, compressors with their strengths, protected layers, and the hypotheses."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

from thalweg import config
from thalweg.errors import InputError, UnknownNameError
from thalweg.studies.edits.plan import NOOP, Subject
from thalweg.studies.given import check_claim, check_known, check_least, check_tables
from thalweg.studies.plan import Hypothesis, check_ids, digest

BRANCHES = ("attention", "mlp", "block")
ERRORS = ("total", "perpendicular", "parallel", "noise", "cosine")  # of every document and layer, of one branch
CONTROLS = ("weights", "chance")  # needs no data; a fixed random order of the arms or layers
PREDICTORS = (*ERRORS, "kl", *CONTROLS)
FIDELITY = ("loss_change", "kl", "accuracy_drop")
OVER_ARMS = (*FIDELITY, "error")
OVER_PREDICTORS = ("rank", "layer_rank")
CORRELATED = ("perpendicular", "parallel", "null")
MEASURES = (*OVER_ARMS, *OVER_PREDICTORS, "correlation")
STEP = 3  # pieces of text: one is judged on, one the errors are read on, one calibrates


@dataclass(frozen=True)
class Source:
    """What is read: likelihoods of pieces of a text, made as in a plan of edits."""

    file: str = ""
    characters: int = 1000
    evaluation: ClassVar[Literal["likelihood"]] = "likelihood"
    buckets: ClassVar[int] = 1


@dataclass(frozen=True)
class CompressionScale:
    """A size at which the plan can run.

    documents: how many are judged on, the units of every interval, and how many others the layer-wise errors are read on; tokens: of each.
    skip, every: piece skip + every * i of the text is document i, the next piece the i-th one that errors are read on, the one after
    that the i-th that calibrates. calibration: how many. kl_documents: documents on which the layer-wise KL is measured (0: it is not).
    choices: endings of the cloze task, the true one among them (0: none). models, train, arms, file, characters: as in a plan of edits.
    """

    kind: Literal["confirmatory", "exploratory", "demo"]
    documents: int
    tokens: int
    skip: int = 0
    every: int = STEP
    calibration: int = 16
    kl_documents: int = 0
    choices: int = 4
    models: dict[str, str] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    arms: tuple[str, ...] = ()
    file: str = ""
    characters: int = 0
    about: str = ""


@dataclass(frozen=True)
class Protect:
    """Layers that are left dense: the ``count`` with the largest ``by`` in the arm ``of`` of the same subject, on ``branch``.

    seed: of ``chance``.
    """

    by: str
    of: str
    count: int
    branch: str = "block"
    seed: int = 0


@dataclass(frozen=True)
class Family:
    """Compressions by one method. options: shared ones; vary: one option and its strengths, one arm for each.

    subjects: whose models (empty: all). each_layer: of the one arm, so many more, each of one layer alone. protect: layers left dense.
    ranked: whether its arms are among those that predictors are ranked over.
    Arms are called SUBJECT.FAMILY-STRENGTH (-layerK), the no-op of a subject SUBJECT.noop.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    vary: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    subjects: tuple[str, ...] = ()
    each_layer: int = 0
    protect: Protect | None = None
    ranked: bool = True
    role: Literal["treatment", "baseline", "control"] = "treatment"
    note: str = ""


@dataclass(frozen=True)
class CompressionHypothesis(Hypothesis):
    """A claim over documents.

    measure: of arms, ``loss_change``, ``kl`` (both nats/token, against the subject itself), ``accuracy_drop`` (cloze) or ``error`` (mean over
    layers of ``part`` on ``branch``, relative to the dense update). Of predictors, ``rank`` (Spearman's correlation, over the ranked arms
    of ``subject``, of a predictor with what the document says of ``fidelity``) and ``layer_rank`` (the same over the single layers of
    ``family``, a full arm family name such as ``smollm2.alone``). ``correlation``: of ``arm``, Spearman's correlation over layers but the
    first and the last of the total error with its ``perpendicular`` or ``parallel`` part, or with the perpendicular part of a random
    error of the same size (``null``). contrast: factors of arms, predictors or parts.
    Predictors are read on other documents than fidelity.
    """

    subject: str = ""
    family: str = ""
    arm: str = ""
    branch: str = "block"
    part: str = "total"
    fidelity: str = "loss_change"
    must_learn: bool = False


@dataclass(frozen=True)
class CompressionArm:
    """One compression of one subject. alone: the layer, where it is a single one."""

    name: str
    family: str
    method: str
    options: dict[str, Any]
    protect: Protect | None = None
    ranked: bool = True
    noop: bool = False
    alone: int | None = None

    @property
    def identity(self) -> str:
        """Two arms of one identity are the same compression in other words."""
        return digest(self.plain())

    def plain(self) -> dict[str, Any]:
        """What is done to the subject."""
        protect = config.to_plain(self.protect) if self.protect else None
        table = {"method": self.method, "options": config.to_plain(self.options), "layer": self.alone}
        return {**table, "protect": protect} if protect else table


@dataclass(frozen=True)
class CompressionPlan:
    """A whole plan file; see ``docs/studies.md``."""

    schema: int
    name: str
    title: str
    question: str
    source: str
    kind: Literal["compression"]
    subject: dict[str, Subject]
    scale: dict[str, CompressionScale]
    arms: dict[str, Family]
    hypotheses: tuple[CompressionHypothesis, ...]
    text: Source = field(default_factory=Source)
    alpha: float = 0.05
    multiplicity: Literal["holm", "bonferroni", "none"] = "holm"
    threads: int = 1
    choices: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_tables(self)
        for name, family in self.arms.items():
            self._check_family(name, family)
        for name, scale in self.scale.items():
            self._check_scale(name, scale)
        for arm in self.edits.values():
            if arm.protect and (arm.protect.of not in self.edits or self.edits[arm.protect.of].protect):
                raise UnknownNameError(f"arm in protect.of of {arm.name}:", arm.protect.of, self._whole())
        check_ids(h.id for h in self.hypotheses)
        for h in self.hypotheses:
            self._check_hypothesis(h)

    def _check_family(self, name: str, family: Family) -> None:
        for subject in family.subjects:
            if subject not in self.subject:
                raise UnknownNameError(f"subject in arms.{name}:", subject, self.subject)
        if len(family.vary) > 1:
            raise InputError(f"arms.{name}.vary names one option and its strengths, got {', '.join(family.vary)}")
        if both := family.vary.keys() & family.options.keys():
            raise InputError(f"arms.{name}: {both.pop()} stands in options or in vary, not in both")
        for values in family.vary.values():
            if not values or len(set(map(str, values))) < len(values):
                raise InputError(f"arms.{name}.vary: strengths must differ, at least one, got {list(values)}")
        if {"layers", "skip"} & family.options.keys():
            raise InputError(f"arms.{name}: layers are chosen by each_layer and protect; leave them out of the options")
        if family.each_layer and (family.protect or sum(map(len, family.vary.values())) > 1):
            raise InputError(f"arms.{name}: each_layer goes with one strength and without protect")
        if family.protect and family.protect.by not in PREDICTORS:
            raise UnknownNameError(f"by in arms.{name}.protect:", family.protect.by, PREDICTORS)
        if family.protect and family.protect.branch not in BRANCHES:
            raise UnknownNameError(f"branch in arms.{name}.protect:", family.protect.branch, BRANCHES)
        if family.protect and family.protect.count < 1:
            raise InputError(f"arms.{name}.protect.count must be at least 1, got {family.protect.count}")

    def _check_scale(self, name: str, scale: CompressionScale) -> None:
        least = (("documents", 1), ("tokens", 2), ("skip", 0), ("every", STEP), ("calibration", 1), ("kl_documents", 0))
        check_least(name, scale, least)
        if scale.choices and not 2 <= scale.choices <= scale.documents:
            raise InputError(f"scale.{name}.choices must be 0 or between 2 and documents, got {scale.choices}")
        if scale.calibration > scale.documents:
            raise InputError(f"scale.{name}.calibration must be at most documents, got {scale.calibration}")
        check_known(self, name, scale)

    def _check_hypothesis(self, h: CompressionHypothesis) -> None:
        if h.measure not in MEASURES:
            raise UnknownNameError(f"measure of {h.id}:", h.measure, MEASURES)
        check_claim(h, "column")
        for what, value, known in (
            ("branch", h.branch, BRANCHES),
            ("part", h.part, ERRORS),
            ("fidelity", h.fidelity, FIDELITY),
        ):
            if value not in known:
                raise UnknownNameError(f"{what} of {h.id}:", value, known)
        columns = {"correlation": CORRELATED, "rank": PREDICTORS, "layer_rank": PREDICTORS}.get(h.measure, self.edits)
        for column in h.contrast:
            if column not in columns:
                raise UnknownNameError(f"column in the contrast of {h.id}:", column, columns)
        if h.measure == "rank" and h.subject not in self.subject:
            raise UnknownNameError(f"subject of {h.id}:", h.subject, self.subject)
        if h.measure == "layer_rank" and h.family not in [f for f, arms in self.members.items() if alone(arms)]:
            raise UnknownNameError(f"family of {h.id} (one with each_layer):", h.family, self.members)
        if h.measure == "correlation" and h.arm not in self.edits:
            raise UnknownNameError(f"arm of {h.id}:", h.arm, self.edits)

    def _whole(self) -> list[str]:
        return [name for name, arm in self.edits.items() if arm.alone is None and not arm.protect]

    @cached_property
    def members(self) -> dict[str, list[CompressionArm]]:
        """SUBJECT.FAMILY -> its arms; SUBJECT.noop stands first of all of a subject."""
        found: dict[str, list[CompressionArm]] = {}
        for subject in self.subject:
            name = f"{subject}.{NOOP}"
            found[name] = [CompressionArm(name, name, NOOP, {}, ranked=False, noop=True)]
            for family, table in self.arms.items():
                if not table.subjects or subject in table.subjects:
                    found[f"{subject}.{family}"] = list(_expand(subject, f"{subject}.{family}", table))
        return found

    @cached_property
    def edits(self) -> dict[str, CompressionArm]:
        """Name -> arm."""
        return {arm.name: arm for arms in self.members.values() for arm in arms}

    def subject_of(self, family: str) -> str:
        """The subject of SUBJECT.FAMILY."""
        return family.split(".")[0]

    def noop_of(self, arm: str) -> str:
        """The name of the no-op of the subject of an arm."""
        return f"{self.subject_of(self.edits[arm].family)}.{NOOP}"

    def at(self, scale: str) -> CompressionScale:
        """The scale called ``scale``. Raises: UnknownNameError."""
        if scale not in self.scale:
            raise UnknownNameError("scale", scale, self.scale)
        return self.scale[scale]

    def arms_at(self, scale: str) -> list[str]:
        """Names of the arms that run at ``scale``, no-ops included."""
        chosen = self.at(scale).arms
        return [a.name for a in self.edits.values() if not chosen or a.noop or a.family.split(".", 1)[1] in chosen]

    def hypotheses_at(self, scale: str) -> list[CompressionHypothesis]:
        """The hypotheses whose arms all run at ``scale``."""
        arms = set(self.arms_at(scale))
        return [h for h in self.hypotheses if arms.issuperset(self.named_by(h, scale))]

    def ranked(self, subject: str, scale: str) -> list[CompressionArm]:
        """The arms that predictors are ranked over at ``scale``: whole models, nothing protected."""
        return [arm for arm in (self.edits[name] for name in self.arms_at(scale)) if self._is_ranked(arm, subject)]

    def _is_ranked(self, arm: CompressionArm, subject: str) -> bool:
        whole = arm.alone is None and not arm.protect
        return self.subject_of(arm.family) == subject and arm.ranked and whole

    def named_by(self, h: CompressionHypothesis, scale: str | None = None) -> list[str]:
        """The arms that a hypothesis rests on, no-ops included; a rank over compressions, on those of ``scale`` (None: all)."""
        if h.measure == "rank":
            every = list(self.edits.values()) if scale is None else [self.edits[name] for name in self.arms_at(scale)]
            arms = [arm for arm in every if self._is_ranked(arm, h.subject)]
        elif h.measure == "layer_rank":
            arms = alone(self.members[h.family])
        else:
            arms = [self.edits[name] for name in ([h.arm] if h.measure == "correlation" else h.contrast)]
        noops = {self.noop_of(arm.name) for arm in arms}
        return [*sorted(noops), *(arm.name for arm in arms if not arm.noop)]

    def hash(self) -> str:
        """Identity of the content: comments, order of keys and white space do not count, every value does."""
        return digest(config.to_plain(self))


def alone(arms: list[CompressionArm]) -> list[CompressionArm]:
    """Those of a single layer."""
    return [arm for arm in arms if arm.alone is not None]


def _expand(subject: str, family: str, table: Family) -> Iterator[CompressionArm]:
    grid: list[tuple[str, dict[str, Any]]] = [("", {})]
    for name, values in table.vary.items():
        grid = [(f"-{value:g}" if isinstance(value, float) else f"-{value}", {name: value}) for value in values]
    protect = table.protect and Protect(
        table.protect.by, f"{subject}.{table.protect.of}", table.protect.count, table.protect.branch, table.protect.seed
    )
    for suffix, more in grid:
        options = {**table.options, **more}
        if not table.each_layer:
            yield CompressionArm(f"{family}{suffix}", family, table.method, options, protect, table.ranked)
        for layer in range(table.each_layer):
            name = f"{family}{suffix}-layer{layer}"
            yield CompressionArm(name, family, table.method, options, None, table.ranked, alone=layer)


def parse_compressions(table: Mapping[str, Any]) -> CompressionPlan:
    """A plan from the tables of its TOML file. Raises: InputError or UnknownNameError naming the key."""
    return config.build(CompressionPlan, table)
