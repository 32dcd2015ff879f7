"""What an edit is: the site, the retained scales, and which layers, heads and passes it holds for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from thalweg.capture.layers import Layers, check_spelling
from thalweg.errors import InputError, UnknownNameError

SITES = ("value", "attention", "mlp", "block")
ALIASES = {"attn": "attention", "values": "value", "v": "value", "feed_forward": "mlp", "ffn": "mlp"}
PHASES = ("all", "prefill", "decode")
COEFFICIENTS = ("layer_mean", "other_token")
CONTROLS = ("diagonal", "random", "random_normal", "random_direction")
REFERENCES = ("stream", "block_input")
ROUTES = ("tap", "hooks")

MOST_SCALE = 1e6  # of a retained scale: far beyond every published one (-10 to 11), far below where float32 overflows

Scale = float | Mapping[int, float]


@dataclass(frozen=True)
class EditOptions:
    """Options of :func:`thalweg.editing.edit`, checked.

    site: of :data:`SITES`, or an alias of it.
    parallel, perpendicular: retained scales, one for all layers or by layer; 1 keeps, 0 removes, at most a million either way.
    exclude_self: of values, leave alone what a
    token reads of itself; None is True for values. group: heads projected together. layers, heads, skip_first, phase: where it holds.
    coefficient: what takes the place of the coefficient along the reference. control: what is done in place of the edit, to compare with.
    reference: of the residual stream, what "along" means: the stream before the addition, or the input of the block. route: how values are
    reached, the attention function or hooks on the projections (None: the function where it can be had). seed: of everything random.
    """

    site: str = "value"
    parallel: Scale = 1.0
    perpendicular: Scale = 1.0
    exclude_self: bool | None = None
    group: str = "head"
    layers: Layers = None
    heads: Sequence[int] | None = None
    phase: str = "all"
    skip_first: int = 0
    coefficient: Literal["layer_mean", "other_token"] | None = None
    control: str | None = None
    reference: str = "stream"
    route: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "site", site_of(self.site))
        for name, kind, known in (
            ("phase", "phase", PHASES),
            ("coefficient", "coefficient", COEFFICIENTS),
            ("control", "control", CONTROLS),
            ("reference", "reference", REFERENCES),
            ("route", "route", ROUTES),
        ):
            value = getattr(self, name)
            if value not in known and not (value is None and name in ("coefficient", "control", "route")):
                raise UnknownNameError(kind, value, known)
        for name in ("parallel", "perpendicular"):
            _check_scale(name, getattr(self, name))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise InputError(f"seed must be a whole number of at least 0, got {self.seed!r}")
        if isinstance(self.skip_first, bool) or not isinstance(self.skip_first, int) or self.skip_first < 0:
            raise InputError(f"skip_first must be a number of layers of at least 0, got {self.skip_first!r}")
        if isinstance(self.layers, str):
            check_spelling(self.layers)
        self._check_heads()
        self._check_together()

    def _check_heads(self) -> None:
        if self.heads is not None and not isinstance(self.heads, Sequence):
            raise InputError(f"heads are a list of whole numbers from 0, got {self.heads!r}; write heads=[0, 2]")
        if self.heads is not None and not len(self.heads):
            raise InputError("no head is left to edit; leave heads out for all of them")
        for head in self.heads or ():
            if isinstance(head, bool) or not isinstance(head, int) or head < 0:
                raise InputError(f"heads are whole numbers from 0, got {head!r}")

    def _check_together(self) -> None:
        if self.site != "value":
            for name, default in (("heads", None), ("exclude_self", None), ("group", "head"), ("route", None)):
                if getattr(self, name) != default:
                    raise InputError(
                        f"{name} belongs to edits of values, got {getattr(self, name)!r} with site {self.site!r}"
                    )
        elif self.reference != "stream":
            raise InputError(
                "values are edited along a token's own value; reference belongs to the sites attention and mlp"
            )
        if self.control == "diagonal" and self.site != "value":
            raise InputError(
                f"the diagonal of attention is a matter of values, got site {self.site!r}; say site='value'"
            )
        if self.control in ("diagonal", "random", "random_normal") and not (
            self.parallel == 1 and self.perpendicular == 1
        ):
            raise InputError(
                f"control {self.control!r} takes the place of the scales, got parallel {self.parallel} and perpendicular "
                f"{self.perpendicular}; leave both at 1"
            )
        if self.coefficient is not None and self.control is not None:
            raise InputError("coefficient and control cannot be combined; nest two edits")
        if self.route == "hooks" and (self.excludes_self or self.control == "diagonal"):
            raise InputError(
                "hooks on the projections do not know how much a token reads of itself; say exclude_self=False or route='tap'"
            )
        if self.control == "diagonal" and self.exclude_self is not None:
            raise InputError("control 'diagonal' removes what a token reads of itself; leave exclude_self out")

    @property
    def excludes_self(self) -> bool:
        """Whether what a token reads of itself is left alone."""
        return self.site == "value" and self.control != "diagonal" and self.exclude_self is not False

    @property
    def is_identity(self) -> bool:
        """Whether nothing changes: both scales 1 and nothing in their place."""
        return self.control is None and self.coefficient is None and self.parallel == 1 and self.perpendicular == 1

    @property
    def drops(self) -> bool:
        """Whether nothing of the update is left."""
        return self.control is None and self.coefficient is None and self.parallel == 0 and self.perpendicular == 0

    def as_noop(self) -> "EditOptions":
        """The same edit with both scales 1 and nothing in their place."""
        return replace(self, parallel=1.0, perpendicular=1.0, coefficient=None, control=None)

    def gathering(self) -> "EditOptions":
        """The same places in every phase, to measure on."""
        return replace(self.as_noop(), phase="all", heads=None)

    def plain(self) -> dict[str, Any]:
        """What is not at its default, for records."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        kept = {name: value for name, value in found.items() if name in ("site", "parallel", "perpendicular")}
        kept |= {f.name: found[f.name] for f in fields(self) if found[f.name] != f.default}
        if self.site == "value":
            kept["exclude_self"] = self.excludes_self
        return {name: _plain(value) for name, value in kept.items()}

    def describe(self) -> str:
        """One line."""
        values = self.plain()
        if self.control in ("diagonal", "random", "random_normal"):
            values = {n: v for n, v in values.items() if n not in ("parallel", "perpendicular", "exclude_self")}
        site, excludes = values.pop("site"), values.pop("exclude_self", None)
        parts = [site, *(f"{name.replace('_', ' ')} {_said(value)}" for name, value in values.items())]
        return ", ".join(parts + ([] if excludes is None else ["exclude-self" if excludes else "full aggregate"]))


def site_of(name: Any) -> Any:
    """A site by its name or an alias (``attn``, ``ffn``, ``feed_forward``, ``values``, ``v``). Raises: UnknownNameError."""
    plain = name.strip().replace("-", "_") if isinstance(name, str) else name
    site = ALIASES.get(plain, plain) if isinstance(plain, str) else plain
    if site not in SITES:
        raise UnknownNameError("site to edit", name, SITES)
    return site


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): v for k, v in value.items()}
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_scale(name: str, scale: Any) -> None:
    for value in scale.values() if isinstance(scale, Mapping) else (scale,):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{name} is a retained scale (1 keeps, 0 removes), a finite number, got {value!r}")
        if abs(value) > MOST_SCALE:
            raise InputError(
                f"{name} is a retained scale of at most {MOST_SCALE:g} either way, got {value:g}, with which numbers of the model overflow; "
                "give one nearer to 1"
            )
