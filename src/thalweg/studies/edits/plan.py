"""Plans whose arms are edits: subjects, text, families of edits, and the hypotheses that will judge them."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from thalweg import config
from thalweg.editing.options import EditOptions
from thalweg.errors import InputError, UnknownNameError
from thalweg.studies.given import check_claim, check_known, check_least, check_tables
from thalweg.studies.plan import Hypothesis, check_ids, digest

LIKELIHOOD = ("loss_change", "loss")
EMBEDDING = ("embedding_change", "order_change")
MEASURES = {"likelihood": LIKELIHOOD, "embedding": EMBEDDING, "masked": LIKELIHOOD}
PARTS = ("all", "first", "last", "growth")
AGAINST = ("applied", "drift", "self_share")
NOOP = "noop"


@dataclass(frozen=True)
class Subject:
    """A model whose updates are edited: ``model`` (a model at hand, a folder, a GGUF file or a name on a hub), or ``train``.

    train: a training table; the model is trained by the study first. dtype: of the weights. backend: of the attention (``eager``, ``sdpa``;
    empty: what the model takes).
    """

    model: str = ""
    train: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    backend: str = ""


@dataclass(frozen=True)
class Text:
    """What is read. evaluation: ``likelihood`` (nats/token of a causal model, a token before the text), ``masked`` (nats/masked token of an
    encoder with a head: every token masked once, 15 % at a time) or ``embedding`` (an encoder's mean-pooled states).

    file: as ``thalweg eval`` takes it; empty: the novel held out of the shipped corpus. Whole paragraphs are joined to pieces of at least
    ``characters`` characters; of a piece its first tokens are read (its first words by an encoder). buckets: parts of equal length in
    which the likelihood is recorded, by position.
    """

    evaluation: Literal["likelihood", "embedding", "masked"] = "likelihood"
    file: str = ""
    characters: int = 1000
    buckets: int = 4


@dataclass(frozen=True)
class EditScale:
    """A size at which the plan can run.

    documents: how many, the units of every interval; tokens: of each (words, for an encoder). skip, every: piece skip + every * i of the
    text is document i. audit: documents, the first ones, whose states are compared layer by layer. models: in place of the subjects'
    own. train: over the training tables of the subjects. arms: families that run (empty: all). file, characters: in place of the text's.
    """

    kind: Literal["confirmatory", "exploratory", "demo"]
    documents: int
    tokens: int
    skip: int = 0
    every: int = 1
    audit: int = 2
    models: dict[str, str] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    arms: tuple[str, ...] = ()
    file: str = ""
    characters: int = 0
    about: str = ""


@dataclass(frozen=True)
class Family:
    """Edits of one place, with their no-op. edit: fields of :class:`thalweg.editing.EditOptions` that they share.

    parallel, perpendicular: one arm for each scale, the other left at 1; none given: one arm, as ``edit`` says. each_layer: so many
    layers, and the arms once for each of them alone. subject: empty, the only one. tokens, documents: the first so many only.
    Arms are called FAMILY, FAMILY-par0.5, FAMILY-perp0, ... with -layer3; the no-op is FAMILY-noop.
    """

    edit: dict[str, Any]
    subject: str = ""
    parallel: tuple[float, ...] = ()
    perpendicular: tuple[float, ...] = ()
    each_layer: int = 0
    tokens: int = 0
    documents: int = 0
    role: Literal["treatment", "baseline", "control"] = "treatment"
    note: str = ""


@dataclass(frozen=True)
class EditHypothesis(Hypothesis):
    """A claim over documents, or over layers.

    measure: ``loss_change`` (against the matched no-op), ``loss``, ``embedding_change`` (one minus the cosine with the no-op's embedding) or
    ``order_change`` (one minus Spearman's correlation of a document's similarities to all others). at: ``all`` positions, the ``first`` or
    ``last`` bucket of them, or ``growth`` (last minus first).
    against: the contrast names one family of single layers, and Spearman's correlation over its layers of the measure (mean over
    documents) with ``applied`` (relative change of the edited update), ``drift`` (of the last state) or ``self_share`` (of the
    layer's attention output in what a token reads of itself, unedited) is judged. Layers of one model are no sample: such a claim is
    never primary.
    """

    at: str = "all"
    against: str = ""
    must_learn: bool = False


@dataclass(frozen=True)
class EditArm:
    """One edit. alone: the layer, where it is a single one."""

    name: str
    family: str
    options: EditOptions
    noop: bool = False
    alone: int | None = None

    @property
    def identity(self) -> str:
        """Two arms of one identity are the same edit in other words."""
        return digest({"edit": config.to_plain(self.options.plain()), "noop": self.noop})

    def plain(self) -> dict[str, Any]:
        """What is done to the subject."""
        return self.options.plain()


@dataclass(frozen=True)
class EditPlan:
    """A whole plan file; see ``docs/studies.md``."""

    schema: int
    name: str
    title: str
    question: str
    source: str
    subject: dict[str, Subject]
    scale: dict[str, EditScale]
    arms: dict[str, Family]
    hypotheses: tuple[EditHypothesis, ...]
    text: Text = field(default_factory=Text)
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
        check_ids(h.id for h in self.hypotheses)
        for h in self.hypotheses:
            self._check_hypothesis(h)

    def _check_family(self, name: str, family: Family) -> None:
        if family.subject and family.subject not in self.subject:
            raise UnknownNameError(f"subject in arms.{name}:", family.subject, self.subject)
        if not family.subject and len(self.subject) > 1:
            raise InputError(f"arms.{name} must say which subject it edits: {', '.join(self.subject)}")
        if {"parallel", "perpendicular"} & family.edit.keys() and (family.parallel or family.perpendicular):
            raise InputError(f"arms.{name}: scales stand in the edit or in a grid, not in both")
        if family.edit.get("coefficient"):
            raise InputError(
                f"arms.{name}: a coefficient is measured on text first, which a plan cannot state yet; leave it out"
            )
        if family.each_layer and "layers" in family.edit:
            raise InputError(f"arms.{name}: each_layer chooses the layers; leave layers out of the edit")
        for scales in (family.parallel, family.perpendicular):
            if 1.0 in scales:
                raise InputError(
                    f"arms.{name}: the scale 1 is the no-op {name}-{NOOP}, which every family has; leave it out"
                )
            if len(set(scales)) < len(scales):
                raise InputError(f"arms.{name}: scales must differ, got {list(scales)}")
        _ = list(_expand(name, family))  # each checks itself

    def _check_scale(self, name: str, scale: EditScale) -> None:
        check_least(name, scale, (("documents", 1), ("tokens", 2), ("skip", 0), ("every", 1), ("audit", 0)))
        check_known(self, name, scale)

    def _check_hypothesis(self, h: EditHypothesis) -> None:
        known = MEASURES[self.text.evaluation]
        if h.measure not in known:
            raise UnknownNameError(f"measure of {h.id} (evaluation {self.text.evaluation}):", h.measure, known)
        if h.at not in PARTS or (h.at != "all" and self.text.evaluation != "likelihood"):
            raise UnknownNameError(f"at of {h.id}:", h.at, PARTS if self.text.evaluation == "likelihood" else ("all",))
        check_claim(h, "arm")
        if not h.against:
            for arm in h.contrast:
                if arm not in self.edits:
                    raise UnknownNameError(f"arm in the contrast of {h.id}:", arm, self.edits)
            return
        if h.against not in AGAINST:
            raise UnknownNameError(f"against of {h.id}:", h.against, AGAINST)
        if h.primary:
            raise InputError(f"hypothesis {h.id} is over layers, which are no sample; set primary = false")
        for family in h.contrast:
            if len(h.contrast) != 1 or family not in self.arms or len(self._alone(family)) < 5:
                raise InputError(
                    f"hypothesis {h.id} is over layers: its contrast names one family with each_layer of at least 5 and one scale"
                )
            if len(self._alone(family)) != self.arms[family].each_layer:
                raise InputError(f"hypothesis {h.id} is over layers: {family} must have one arm for each, so one scale")

    def _alone(self, family: str) -> list[EditArm]:
        return [arm for arm in self.members[family] if arm.alone is not None]

    @cached_property
    def members(self) -> dict[str, list[EditArm]]:
        """Family -> its arms, the no-op first."""
        return {name: list(_expand(name, family)) for name, family in self.arms.items()}

    @cached_property
    def edits(self) -> dict[str, EditArm]:
        """Name -> arm, in the order of the file."""
        return {arm.name: arm for arms in self.members.values() for arm in arms}

    def subject_of(self, family: str) -> str:
        """The subject that a family edits."""
        return self.arms[family].subject or next(iter(self.subject))

    def noop_of(self, arm: str) -> str:
        """The name of the matched no-op of an arm."""
        return f"{self.edits[arm].family}-{NOOP}"

    def at(self, scale: str) -> EditScale:
        """The scale called ``scale``. Raises: UnknownNameError."""
        if scale not in self.scale:
            raise UnknownNameError("scale", scale, self.scale)
        return self.scale[scale]

    def arms_at(self, scale: str) -> list[str]:
        """Names of the arms that run at ``scale``, no-ops included."""
        chosen = self.at(scale).arms
        return [arm.name for arm in self.edits.values() if not chosen or arm.family in chosen]

    def hypotheses_at(self, scale: str) -> list[EditHypothesis]:
        """The hypotheses whose arms all run at ``scale``."""
        arms, families = set(self.arms_at(scale)), set(self.at(scale).arms or self.arms)
        return [h for h in self.hypotheses if (families if h.against else arms).issuperset(h.contrast)]

    def named_by(self, h: EditHypothesis) -> list[str]:
        """The arms that a hypothesis rests on, no-ops included."""
        arms = (
            [a for family in h.contrast for a in self._alone(family)]
            if h.against
            else [self.edits[a] for a in h.contrast]
        )
        noops = {self.noop_of(arm.name) for arm in arms}
        return [*sorted(noops), *(arm.name for arm in arms if not arm.noop)]

    def hash(self) -> str:
        """Identity of the content: comments, order of keys and white space do not count, every value does."""
        return digest(config.to_plain(self))


def _expand(name: str, family: Family) -> Iterator[EditArm]:
    yield EditArm(f"{name}-{NOOP}", name, _options(name, family).as_noop(), noop=True)
    grid: list[tuple[str, dict[str, float]]] = [(f"-par{s:g}", {"parallel": s}) for s in family.parallel]
    grid += [(f"-perp{s:g}", {"perpendicular": s}) for s in family.perpendicular]
    for suffix, scales in grid or [("", {})]:
        if not family.each_layer:
            yield EditArm(f"{name}{suffix}", name, _options(name, family, **scales))
        for layer in range(family.each_layer):
            options = _options(name, family, layers=(layer,), **scales)
            yield EditArm(f"{name}{suffix}-layer{layer}", name, options, alone=layer)


def _options(name: str, family: Family, **more: Any) -> EditOptions:
    known = [f.name for f in dataclasses.fields(EditOptions)]
    for key in family.edit:
        if key not in known:
            raise UnknownNameError("key", f"arms.{name}.edit.{key}", [f"arms.{name}.edit.{k}" for k in known])
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in family.edit.items()}
    try:
        return EditOptions(**{**given, **more})
    except InputError as error:
        raise InputError(f"arms.{name}.edit: {error}") from error


def parse_edits(table: Mapping[str, Any]) -> EditPlan:
    """A plan from the tables of its TOML file. Raises: InputError or UnknownNameError naming the key."""
    return config.build(EditPlan, table)
