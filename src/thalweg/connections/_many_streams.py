"""Streams side by side: n copies of the embedding, read by a weighted sum, written to with weights, mixed by a matrix at every site.

    read   u = sum_i read[i] x[i]                                     [n d] -> [d], then the input norm and the sublayer F
    write  x'[to] = sum_from mix[to, from] x[from] + write[to] F(u)   [n d] -> [n d]

Hyper-connections and mHC are two settings of the same options; each stands in its own file with its facts and its defaults.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from thalweg import mixers
from thalweg.connections._equal_start import logit, unit_read, unit_rows
from thalweg.connections._stream_coefficients import Coefficients, Logits, Source, project
from thalweg.connections._stream_references import (
    everywhere,
    reference_contraction,
    reference_logits,
    reference_maps,
    rows_of,
)
from thalweg.connections.base import (
    ConnectionOptions,
    Equivalence,
    GroupHint,
    Mixing,
    Requirements,
    Site,
    Stream,
    StreamSite,
    each_token,
    reference_norm,
    shaped,
)
from thalweg.errors import InputError, ShapeError
from thalweg.ops.precision import full_precision, wide, wide_dtype

MOST_STREAMS = 64  # a state of more copies than this is a slip of the hand


@dataclass(frozen=True)
class ManyStreamsOptions(ConnectionOptions):
    """Options of every connection with streams side by side; the norm slots are those of every connection.

    streams: number of streams, from 1.
    mixer: name of the mixing matrix (``thalweg list mixers``). mixer_options: its options.
    read: weights of the sum that a sublayer reads: ``sigmoid``, ``signed`` (the logits themselves), or ``mean`` (1/n, fixed).
    write: weights of the update on each stream: ``double_sigmoid`` (0 to 2), ``signed``, or ``ones`` (fixed).
    coefficients: what the dynamic part is made from: the ``concatenated`` streams, normalised as one vector, or each stream by itself.
    dynamic: whether the streams of a token change its weights; without it they are learned constants.
    tanh: bound the dynamic part before its scale, as the first hyper-connections do.
    contraction: how the streams become one at the end: ``mean``, ``sum``, or a learned sigmoid ``head`` (DeepSeek-V4).
    home_logit: the sigmoid read starts at +home_logit on the home stream of a site (its index modulo n) and at -home_logit elsewhere.
    alpha_start: first scale of the dynamic part. projection_std: its first weights, 0 for zeros.
    coefficient_eps: inside the root of the norm of the streams. read_eps: added to sigmoid reads and to the head (DeepSeek-V4: 1e-6).
    static_decay: weight decay on biases and scales.
    """

    streams: int = 4
    mixer: str = "sinkhorn"
    mixer_options: dict[str, Any] = field(default_factory=dict)
    read: Literal["sigmoid", "signed", "mean"] = "sigmoid"
    write: Literal["double_sigmoid", "signed", "ones"] = "double_sigmoid"
    coefficients: Source = "concatenated"
    dynamic: bool = True
    tanh: bool = False
    contraction: Literal["mean", "sum", "head"] = "mean"
    home_logit: float = 3.0
    alpha_start: float = 0.01
    projection_std: float = 0.0
    coefficient_eps: float = 1e-6
    read_eps: float = 0.0
    static_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.streams <= MOST_STREAMS:
            raise InputError(f"streams must lie between 1 and {MOST_STREAMS}, got {self.streams}")
        for name in ("projection_std", "coefficient_eps", "read_eps", "static_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} must be a finite number of at least 0, got {getattr(self, name)}")
        for name in ("home_logit", "alpha_start"):
            if not math.isfinite(getattr(self, name)):
                raise InputError(f"{name} must be finite, got {getattr(self, name)}")
        mixer = self.make_mixer()
        if self.dynamic and self.coefficients == "per_stream" and mixer.generators not in (0, self.streams**2):
            raise InputError(
                f"coefficients='per_stream' makes one row of {self.streams} logits for each stream, which fits mixers with "
                f"{self.streams**2} logits; {self.mixer} takes {mixer.generators}; use coefficients='concatenated'"
            )

    def make_mixer(self) -> mixers.Mixer:
        """A new mixer of this configuration. Raises: UnknownNameError, InputError."""
        return mixers.create(self.mixer, streams=self.streams, **self.mixer_options)


class ManyStreamsSite(StreamSite):
    """The maps of one site. Those that are fixed (read ``mean``, write ``ones``, a constant mixer) have no parameters."""

    def __init__(self, width: int, site: Site, options: ManyStreamsOptions):
        super().__init__(width, site, options)
        self.options, self.home = options, site.index % options.streams
        self.mixer = options.make_mixer()
        self.logits = nn.ModuleDict({name: self._family(groups, width) for name, groups in self.families().items()})
        self._forced: Tensor | None = None

    def families(self) -> dict[str, tuple[int, ...]]:
        """Name of each family of logits that this site has -> sizes of its groups, which have one scale each."""
        o, n = self.options, (self.options.streams,)
        sizes = {
            "read": n if o.read != "mean" else (),
            "write": n if o.write != "ones" else (),
            "mix": self.mixer.scaled,
        }
        return {name: groups for name, groups in sizes.items() if groups}

    def starts(self) -> dict[str, Tensor]:
        """Name of each family -> its first biases: read the home stream, write 1, mix near the identity."""
        o, n = self.options, self.options.streams
        home = torch.nn.functional.one_hot(torch.tensor(self.home), n).float()
        return {
            "read": o.home_logit * (2 * home - 1) if o.read == "sigmoid" else home,
            "write": torch.zeros(n) if o.write == "double_sigmoid" else torch.ones(n),
            "mix": self.mixer.start(),
        }

    def _family(self, groups: tuple[int, ...], width: int) -> Logits:
        o, count = self.options, sum(groups)
        if o.coefficients == "concatenated":
            return Logits(count, groups, count, o.streams * width, dynamic=o.dynamic)
        return Logits(count, groups, count // o.streams, width, dynamic=o.dynamic)

    def all_logits(self, state: Float[Tensor, "b t n d"]) -> dict[str, Tensor]:
        """Name of each family -> its logits at every token [b t count], from one pass over the streams."""
        o, families = self.options, cast("dict[str, Logits]", dict(self.logits.items()))
        shaped(state, o.streams, self.input_norm.width)
        projected = project(state, list(families.values()), o.coefficients, o.coefficient_eps, tanh=o.tanh)
        return {
            name: family(part, state.shape[:2])
            for (name, family), part in zip(families.items(), projected, strict=True)
        }

    def coefficients(self, state: Float[Tensor, "b t n d"], logits: dict[str, Tensor]) -> Coefficients:
        """Read, write and mixing weights at every token."""
        o, wanted = self.options, (*state.shape[:2], self.options.streams)
        fixed = {"dtype": wide_dtype(state.dtype), "device": state.device}
        if o.read == "mean":
            read = torch.full((), 1 / o.streams, **fixed).expand(wanted)
        else:
            read = torch.sigmoid(logits["read"]) + o.read_eps if o.read == "sigmoid" else logits["read"]
        if o.write == "ones":
            write = torch.ones((), **fixed).expand(wanted)
        else:
            write = 2 * torch.sigmoid(logits["write"]) if o.write == "double_sigmoid" else logits["write"]
        return Coefficients(read, write, self._mix(state, logits.get("mix")))

    def _mix(self, state: Tensor, logits: Tensor | None) -> Tensor:
        n, shape = self.options.streams, state.shape[:2]
        if self._forced is not None:
            return wide(self._forced.to(state.device)).expand(*shape, n, n)
        if logits is None:
            return self.mixer(torch.empty(*shape, 0, dtype=wide_dtype(state.dtype), device=state.device))
        if not self.options.dynamic:  # one matrix for all tokens, made once
            return self.mixer(wide(cast("Logits", self.logits["mix"]).bias)).expand(*shape, n, n)
        return self.mixer(logits)

    def gather(self, state: Float[Tensor, "b t n d"], weights: Float[Tensor, "b t n"]) -> Float[Tensor, "b t d"]:
        """The weighted sum of the streams that the sublayer reads, normalised."""
        with full_precision(state):
            x = (wide(weights).unsqueeze(-2) @ wide(state)).squeeze(-2).to(state.dtype)
        return self.input_norm(x)

    def read(self, state, tokens=None):
        found = self.coefficients(state, self.all_logits(state))
        return self.gather(state, found.read), found

    def write(self, state, update, context):
        update = self.update_norm(update)
        with full_precision(state):
            mixed = wide(context.mix) @ wide(state)
            return torch.addcmul(mixed, wide(context.write).unsqueeze(-1), wide(update).unsqueeze(-2)).to(state.dtype)

    def gates(self, state, context, update=None):
        return {"read": context.read, "write": context.write}

    @property
    def mixes(self):
        return self.options.streams > 1

    def mixing(self, state, context):
        if not self.mixes:
            return None
        return Mixing(context.read, context.write, context.mix, self.all_logits(state).get("mix"))

    def force_mix(self, mix):
        n = self.options.streams
        if mix is not None and (mix.ndim < 2 or mix.shape[-2:] != (n, n)):
            raise ShapeError(
                f"a forced mixing matrix of {n} streams is [... {n} {n}] (to, from), got shape {list(mix.shape)}"
            )
        self._forced = mix

    def reset_parameters(self):
        super().reset_parameters()
        self.mixer.reset_parameters()
        starts = self.starts()
        for name, family in self.logits.items():
            cast("Logits", family).start(starts[name], self.options.alpha_start, self.options.projection_std)


class ManyStreams(Stream):
    """Streams side by side; state [b t n d]. Made once from n copies of the embedding, made one once at the end."""

    Options = ManyStreamsOptions
    SiteModule = ManyStreamsSite
    LAST = "after the last site the streams are added up, and no matrix with columns that sum to one changes their sum"
    options: ManyStreamsOptions

    def __init__(self, width: int, sites: Sequence[Site], options: ManyStreamsOptions):
        super().__init__(width, sites, options)
        n = options.streams
        self.head = Logits(n, (n,), n, n * width, dynamic=True) if options.contraction == "head" else None

    def enter(self, embedding, tokens=None):
        return shaped(embedding, self.width, what="embedding").unsqueeze(2).expand(-1, -1, self.options.streams, -1)

    def contract(self, state: Float[Tensor, "b t n d"]) -> Float[Tensor, "b t d"]:
        """The streams made one, before the final norm."""
        x = wide(state)
        if self.head is None:
            return (x.mean(2) if self.options.contraction == "mean" else x.sum(2)).to(state.dtype)
        with full_precision(x):
            logits = self.head(
                *project(state, [self.head], "concatenated", self.options.coefficient_eps, tanh=False), ()
            )
            weights = torch.sigmoid(logits) + self.options.read_eps
            return (weights.unsqueeze(-2) @ x).squeeze(-2).to(state.dtype)

    def leave(self, state, tokens=None):
        return self.final_norm(self.contract(state))

    def observe(self, state):
        return state

    def reset_parameters(self):
        super().reset_parameters()
        if self.head is not None:
            self.head.start(torch.zeros(self.options.streams), self.options.alpha_start, self.options.projection_std)

    def requirements(self, site):
        return Requirements(output_gain=site.total**-0.5)

    def _own_sites(self) -> list[ManyStreamsSite]:
        return cast("list[ManyStreamsSite]", list(self.sites))

    def group_hints(self):
        names = [name for name, _ in self.named_parameters()]
        hint = GroupHint(weight_decay=self.options.static_decay)
        patterns = ("sites.*.bias", "sites.*.alpha", "sites.*.mixer.*", "head.bias", "head.alpha")
        return {pattern: hint for pattern in patterns if _matches(pattern, names)}

    def frozen(self):
        site, n = self._own_sites()[0], self.options.streams
        claims = site.mixer.claims
        parts = [
            part for part in ("logits.mix.*", "mixer.*") if _matches(f"sites.0.{part}", dict(self.named_parameters()))
        ]
        found: dict[str, str] = {}
        if n == 1 and claims.rows == "exact":
            found |= {f"sites.*.{part}": "one stream: its mixing matrix is 1 whatever the logits are" for part in parts}
        elif claims.rows == "exact":
            why = "at the first site the streams are copies of the embedding, which no matrix with rows that sum to one changes"
            found |= {f"sites.0.{part}": why for part in parts}
        if n > 1 and claims.columns == "exact" and self.options.contraction != "head":
            found |= {f"sites.{len(self.sites) - 1}.{part}": self.LAST for part in parts}
        return found

    def equals_at_start(self):
        o, mixer = self.options, self.options.make_mixer().double()
        static = not o.dynamic or o.projection_std == 0
        with torch.no_grad():
            mix = mixer(mixer.start().double())
        if not static or not torch.allclose(mix.sum(-1), torch.ones_like(mix[0]), rtol=0, atol=1e-9):
            return None
        unit_read = o.read != "sigmoid"  # else the sum is a multiple of the stream, which only a norm removes
        unit_end = o.contraction == "mean"
        if (not unit_read and not o.input_norm) or (not unit_end and not o.final_norm):
            return None
        # the eps of a norm is the one thing that sees the multiple
        return Equivalence("additive", o.slots(), 1e-9 if unit_read and unit_end else 1e-5)

    @torch.no_grad()
    def start_as_additive(self):
        """Reads and rows of the mix that sum to one to the last bits; the share of the streams that are not at home stays as declared."""
        o, n = self.options, self.options.streams
        unit_end = o.contraction == "mean" or (o.contraction == "head" and 0 < 1 / n - o.read_eps < 1)
        home = unit_read(n, o.home_logit, o.read_eps)
        if self.equals_at_start() is None or not unit_end or (o.read == "sigmoid" and home is None):
            return None
        for site in self._own_sites():
            biases = {name: cast("Logits", family).bias for name, family in site.logits.items()}
            if o.read == "sigmoid" and home is not None:
                biases["read"].fill_(logit(home[1]))
                biases["read"][site.home] = logit(home[0])
            if "mix" in biases:
                biases["mix"].copy_(unit_rows(site.mixer, biases["mix"].dtype))
        if self.head is not None:
            self.head.bias.fill_(logit(1 / n - o.read_eps))
        return (1.0,) * len(self.layout)

    def reference(self, embedding, sublayers, tokens=None):
        n = self.options.streams
        state = [embedding for _ in range(n)]
        for site, sublayer in zip(self._own_sites(), sublayers, strict=True):
            logits = everywhere(lambda i, t, s=site, x=state: reference_logits(s, [row[i, t] for row in x]), embedding)
            maps = everywhere(lambda i, t, s=site, z=logits: reference_maps(s, z[i][t]), embedding)
            x = rows_of(
                lambda i, t, m=maps, x=state: sum(r * row[i, t] for r, row in zip(m[i][t][0], x, strict=True)),
                embedding,
            )
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))
            update = each_token(lambda row, s=site: reference_norm(s.update_norm, row), update)
            mixed = [
                rows_of(
                    lambda i, t, to=to, m=maps, x=state: sum(m[i][t][2][to][j] * x[j][i, t] for j in range(n)),
                    embedding,
                )
                for to in range(n)
            ]
            state = [
                rows_of(
                    lambda i, t, to=to, s=site, m=maps, z=logits, x=mixed, u=update: self.reference_write(
                        s, z[i][t], m[i][t][1], [row[i, t] for row in x], u[i, t], to
                    ),
                    embedding,
                )
                for to in range(n)
            ]
        end = rows_of(lambda i, t: reference_contraction(self, [row[i, t] for row in state]), embedding)
        return each_token(lambda row: reference_norm(self.final_norm, row), end)

    def reference_write(
        self, site: Any, logits: dict[str, list[Tensor]], write: Any, mixed: list[Tensor], update: Tensor, to: int
    ) -> Tensor:
        """Stream ``to`` of one token after the write, from what mixing made of all of them (n of [d]) and the update [d]; for the reference."""
        return mixed[to] + write[to] * update


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)
