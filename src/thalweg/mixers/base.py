"""What a mixer is: a parametrisation of the matrix that moves the streams of one token, ``mix[to, from]``.

    logits [... generators]  --Mixer-->  mix [... to from]

The connection makes the logits (static, or from the token's streams) and applies the matrix; the mixer knows neither.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from thalweg.config import to_plain
from thalweg.errors import CheckpointError, InputError, ShapeError
from thalweg.ops.precision import wide

SAVED = "mixer"  # in the metadata of a state dict: whose logits these are
Marginal = Literal["exact", "converging", "none"]


@dataclass(frozen=True)
class Claims:
    """What is true of every matrix of a mixer; each claim is tested at random logits.

    rows: the sums over ``from`` are one (``exact`` to rounding; ``converging``: to an error that depends on the logits and is reported);
    columns: the sums over ``to``. nonnegative: no entry below zero. spectral: no singular value above one. orthogonal: mix^T mix = I.
    equivariant: renaming the streams of the target renames the logits, by :meth:`Mixer.permute`.
    identity: the matrix at :meth:`Mixer.start` is the identity to within 0.05 in every entry.
    moves: at the start no logit has a zero derivative (go-mHC at exactly zero has none but zeros).
    reaches: what a free choice of logits comes close to, the target of the battery's descent; ``positive``: any entries in (0, 2).
    """

    rows: Marginal = "none"
    columns: Marginal = "none"
    nonnegative: bool = False
    spectral: bool = False
    orthogonal: bool = False
    equivariant: bool = False
    identity: bool = True
    moves: bool = True
    reaches: Literal["birkhoff", "row_stochastic", "column_stochastic", "positive", "orthogonal", "any", "own"] = "own"


@dataclass(frozen=True)
class MixerFacts:
    """What ``thalweg show mixer`` and the documentation say.

    source: paper and equation. equation: one line per step. words: the same in plain words with the shape at each edge. coverage: which
    matrices it can come close to, and which not. cost: number of generators and the arithmetic, as a function of n (streams).
    start: the matrix and the gradient at the start. chosen: values that the source does not state. deviations: where the code leaves it.
    verified: against what it was checked, in the words of its author: nothing unless said.
    """

    source: str
    equation: str
    words: str
    coverage: str
    cost: str
    start: str
    chosen: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()
    verified: tuple[str, ...] = ()
    bibtex: str = ""


@dataclass(frozen=True)
class MixerOptions:
    """Options of a mixer; each mixer's own dataclass extends it."""


class Mixer(nn.Module):
    """Logits [... generators] -> mix [... to from]; subclass it, once per mixer.

    A subclass sets ``Options``, ``facts`` and ``claims``, says how many ``generators`` it takes and where they start, and writes
    :meth:`reference` in loops. ``streams`` that it cannot serve it refuses in :meth:`supports`.
    """

    Options: ClassVar[type[MixerOptions]] = MixerOptions
    facts: ClassVar[MixerFacts]

    def __init__(self, streams: int, options: MixerOptions):
        super().__init__()
        why = self.supports(streams, options)
        if why is not None:
            raise InputError(f"mixer {name_of(type(self))} does not serve {streams} streams: {why}")
        self.streams, self.options = streams, options

    @property
    def name(self) -> str:
        """As it is registered; an unregistered class gives its own name."""
        return name_of(type(self))

    @property
    def signature(self) -> dict[str, Any]:
        """What tells the matrix of these logits from that of any other mixer: registered name, streams, options but for ``start``, after
        which nothing asks any more. State dicts carry it."""
        options = {key: value for key, value in to_plain(self.options).items() if key != "start"}
        return {"mixer": self.name, "streams": self.streams, **options}

    @property
    def claims(self) -> Claims:
        """What is true of every matrix; may depend on the options and on the number of streams."""
        raise NotImplementedError(f"mixer {self.name} claims nothing")

    @property
    def generators(self) -> int:
        """Number of logits of one matrix; 0 for a constant one."""
        raise NotImplementedError(f"mixer {self.name} does not say how many logits it takes")

    @property
    def scaled(self) -> tuple[int, ...]:
        """Sizes of the groups of logits that have a learned scale (alpha) of their own; they add up to ``generators``."""
        return (self.generators,) if self.generators else ()

    @classmethod
    def supports(cls, streams: int, options: MixerOptions) -> str | None:
        """None, or why this number of streams is refused, with the cost that it would have."""
        return None

    def start(self) -> Float[Tensor, " generators"]:
        """Logits of the untrained network: near the identity, but not where the gradient is zero."""
        return torch.zeros(self.generators)

    def forward(self, logits: Float[Tensor, "*batch generators"]) -> Float[Tensor, "*batch to from"]:
        """The matrices, in float32 or wider. Never in place."""
        raise NotImplementedError(f"mixer {self.name} makes no matrix")

    def reference(self, logits: Float[Tensor, " generators"]) -> Float[Tensor, "to from"]:
        """One matrix from the equation alone, in loops over scalars; the battery compares it with :meth:`forward`."""
        raise NotImplementedError(f"mixer {self.name} has no loop-written reference")

    def permute(self, logits: Tensor, order: list[int]) -> Tensor:
        """Logits [generators] of the matrix with streams renamed: result[i, j] = mix[order[i], order[j]]; where ``equivariant`` is claimed."""
        raise NotImplementedError(f"mixer {self.name} does not say what renaming the streams does to its logits")

    def reset_parameters(self) -> None:
        """Give the mixer's own parameters, if it has any, their declared start."""

    @classmethod
    def variants(cls) -> list[dict[str, Any]]:
        """Option sets that the battery runs beside the defaults."""
        return []

    def square(self, logits: Tensor) -> Tensor:
        """[... n n] from [... n*n], row by row: the layout mat() of the mHC paper, its Eq. 7."""
        return logits.unflatten(-1, (self.streams, self.streams))

    def check(self, logits: Tensor) -> None:
        """Raises: ShapeError when the last axis is not ``generators`` long."""
        if logits.ndim < 1 or logits.shape[-1] != self.generators:
            raise ShapeError(
                f"mixer {self.name} of {self.streams} streams takes logits [... {self.generators}], "
                f"got shape {list(logits.shape)}"
            )

    def extra_repr(self) -> str:
        return f"streams={self.streams}, generators={self.generators}"

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (metadata := getattr(destination, "_metadata", None)) is not None:
            metadata[prefix[:-1]][SAVED] = self.signature

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self._require_same(local_metadata.get(SAVED), prefix[:-1])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _require_same(self, saved: Any, where: str) -> None:
        """Raises: CheckpointError for the parameters of another mixer, whose shapes may be the same. None: the state dict does not say."""
        ours = self.signature
        other = {key: value for key, value in (saved or {}).items() if key in ours and ours[key] != value}
        if other:
            told = {key: ours[key] for key in other}
            raise CheckpointError(
                f"the state dict was made with {_told(other)}, {where or 'this module'} has {_told(told)}, which makes other "
                "matrices of the same numbers: build the model with the mixer that was saved, or, where the shapes are the same, load "
                "dict(state_dict), which keeps the numbers alone"
            )


class SquareMixer(Mixer):
    """A mixer with one logit for every entry of the matrix, row by row; they start at 6 I - 3 (mHC, appendix A.6) unless it says otherwise."""

    @property
    def starts_near(self) -> bool:
        """Whether the softmax of 6 I - 3 is the identity to within 0.05: its diagonal is e^6 / (e^6 + n - 1)."""
        return self.streams <= 22

    @property
    def generators(self) -> int:
        return self.streams**2

    def start(self):
        return (6 * torch.eye(self.streams) - 3).flatten()

    def permute(self, logits, order):
        return self.square(logits)[order][:, order].flatten()


class ConstantMixer(Mixer):
    """A mixer without logits: the same matrix at every token."""

    @property
    def generators(self) -> int:
        return 0

    def matrix(self) -> Tensor:
        """The matrix [to from], float64."""
        raise NotImplementedError

    def forward(self, logits):
        self.check(logits)
        matrix = self.matrix().to(wide(logits))
        return matrix.expand(*logits.shape[:-1], *matrix.shape)

    def permute(self, logits, order):
        return logits


def name_of(mixer: type[Mixer]) -> str:
    """The registered name of a class, or of one that it extends; else its own."""
    from thalweg.mixers import registry  # the registry is made of this file

    return registry.name_of(mixer) or mixer.__name__


def _told(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value!r}" for key, value in values.items())
