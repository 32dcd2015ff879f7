"""The rotary clocks of a model: the angles that its planes really turn for a token, read from what the module gives and not from a formula.

Modules are called as copies: some write the frequencies of the last text into themselves, and the model is to stay as it was.
"""

import copy
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.capture.evaluating import evaluating
from thalweg.capture.layout import Located
from thalweg.capture.limits import longest_of
from thalweg.models import Decoder
from thalweg.models.rotary import angles

BUFFER = re.compile(
    r"^(?!.*original)(?!(.*_)?long_inv_freq$)(?P<kind>.*?)_?inv_freq$"
)  # long_: kept from the last long text
TABLE = "embed_positions"  # of GPT-J and CodeGen: sines, then cosines, of every position
SIGNS = ("rope_theta", "rope_parameters", "rotary_dim", "rotary_pct", "rotary_value")


@dataclass(frozen=True)
class Clock:
    """One set of rotary angles.

    name: dotted module, with the kind of layer behind it where it has several. frequencies [k]: radians a token, float64, after scaling.
    heads: channels of a head, of which 2k turn. base, rule: that the configuration states, None and "" where it does not. length: tokens of
    the window, or the most for which the module keeps these frequencies; beyond: the name of the clock that it has for the whole window then.
    scale: factor on cosine and sine (YaRN). step: positions [n], all below ``length``, -> cos, sin [n k] as the module computes them in a
    text of ``length`` tokens, or None.
    """

    name: str
    frequencies: Tensor
    heads: int
    length: int
    base: float | None = None
    rule: str = ""
    scale: float = 1.0
    step: Any = None
    beyond: str = ""

    @property
    def still(self) -> float:
        """Share of the planes of a head that never turn: channels left out, and frequencies of zero."""
        planes = self.heads / 2
        return 1 - int((self.frequencies != 0).sum()) / planes


def clocks_of(located: Located, length: int = 0) -> list[Clock]:
    """Every distinct clock of a model, in the order of its modules. length: of the window, 0: the longest that the model takes."""
    window = length or longest_of(located.model) or 2048
    with evaluating(located.model):
        found = list(
            _ours(located.model, window) if isinstance(_bare(located.model), Decoder) else _theirs(located, window)
        )
    apart: list[Clock] = []
    for clock in found:
        if not any(clock.frequencies.equal(one.frequencies) and clock.heads == one.heads for one in apart):
            apart.append(clock)
    return apart


def _bare(model: nn.Module) -> nn.Module:
    return next((module for module in model.modules() if isinstance(module, Decoder)), model)


def _ours(model: nn.Module, window: int) -> Iterator[Clock]:
    config: Any = _bare(model).config
    if config.positions != "rotary":
        return
    width = config.head_width
    kinds = [("rotary", config.rope_base, config.rotary_scaling)]
    if config.window_rope_base is not None:
        kinds.append(("rotary.window", config.window_rope_base, None))
    for name, base, scaling in kinds:

        def step(positions: Tensor, base: Any = base, scaling: Any = scaling, dtype: Any = torch.float32) -> Any:
            cos, sin = angles(positions[None], width, base, dtype, scaling)
            return cos[0], sin[0]

        cos, sin = step(torch.tensor([1]), dtype=torch.float64)
        rule = scaling.kind if scaling is not None else "default"
        yield Clock(name, torch.atan2(sin[0], cos[0]), width, window, base, rule, 1.0, step)


def _theirs(located: Located, window: int) -> Iterator[Clock]:
    config = _config(located)
    for name, module in located.model.named_modules():
        if any(part in name for part in ("vision", "visual", "audio")):
            continue
        for attribute in (*module._buffers, *vars(module)):
            match = BUFFER.match(attribute)
            values = getattr(module, attribute, None)
            if match is None or not isinstance(values, Tensor) or values.ndim != 1 or not len(values):
                continue
            kind = match["kind"].strip("_")
            base, rule, width = _stated(config, kind)
            where = f"{name}.{kind}" if kind else name
            regimes = _regimes(module, attribute, kind, window)
            names = [where, *(f"{where} at {regime.length} tokens" for regime in regimes[1:])]
            for regime, called, beyond in zip(regimes, names, [*names[1:], ""], strict=True):
                theta, scale, step = regime.frequencies, regime.scale, regime.step
                heads = max(width or 0, 2 * len(theta))
                yield Clock(called, theta, heads, regime.length, base, rule, scale, step, beyond)
        table = module._buffers.get(TABLE)
        if table is not None and (hasattr(module, "rotary_dim") or "rotary" in type(module).__name__.lower()):
            yield from _tabled(name, table.detach().cpu(), _stated(config, "")[2] or 0, window)


def signs_of(located: Located) -> list[str]:
    """What in a model speaks of rotary positions, whether or not a clock can be read: fields of its configuration, classes of its modules."""
    config = _config(located)
    fields = [key for key in SIGNS if getattr(config, key, None) is not None]
    classes = {type(module).__name__ for module in located.model.modules()}
    return [*fields, *sorted(name for name in classes if "rotary" in name.lower())]


def _config(located: Located) -> Any:
    config = getattr(located.model, "config", None)
    return getattr(config, "text_config", None) or config


def _tabled(name: str, table: Tensor, heads: int, window: int) -> Iterator[Clock]:
    """The clock of a table [positions 2k] of sines and cosines; none where it holds something else."""
    planes = table.shape[-1] // 2
    if table.ndim != 2 or len(table) < 2 or not planes:
        return
    sin, cos = table.double().split(planes, 1)[:2]
    theta, few = torch.atan2(sin[1], cos[1]), torch.arange(min(len(table), 16), dtype=torch.float64)
    angle = few[:, None] * theta
    if float((torch.cat([angle.sin() - sin[: len(few)], angle.cos() - cos[: len(few)]]).abs()).max()) > 0.05:
        return

    def step(positions: Tensor) -> tuple[Tensor, Tensor]:
        return cos[positions], sin[positions]

    full = torch.finfo(table.dtype).bits >= 32  # else the table is rounded, and no angle is computed in float32
    yield Clock(name, theta, max(heads, 2 * planes), min(window, len(table)), step=step if full else None)


def _stated(config: Any, kind: str) -> tuple[float | None, str, int | None]:
    """Base, rule and width of a head that a configuration states."""
    table = getattr(config, "rope_parameters", None) or {}
    table = table.get(kind, table) if isinstance(table, dict) else {}
    base = table.get("rope_theta", getattr(config, "rope_theta", None))
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_head", None)
    hidden = getattr(config, "hidden_size", None) or getattr(config, "n_embd", None)
    turned, still = (getattr(config, f"qk_{part}_head_dim", None) for part in ("rope", "nope"))
    width = turned + still if turned and still else getattr(config, "head_dim", None)
    width = width or (hidden // heads if hidden and heads else None)
    return (None if base is None else float(base)), str(table.get("rope_type", "default")), width


class _Regime(NamedTuple):
    """The angles that a module gives a text of ``length`` tokens."""

    length: int
    frequencies: Tensor
    scale: float
    step: Any


def _regimes(module: nn.Module, attribute: str, kind: str, window: int) -> list[_Regime]:
    """The regime at rest; and that of the whole window, where the module takes other frequencies there (``dynamic``, ``longrope``)."""
    as_it_is = _regime(module, attribute, kind, window, None)
    planes = len(as_it_is.frequencies)
    try:
        more = {"layer_type": kind} if kind and "layer_type" in inspect.signature(module.forward).parameters else {}
        if next(module.parameters(), None) is not None:  # no module of angles alone, and maybe a large one
            return [as_it_is]
        rest = _after(module, torch.arange(min(2, window)), more)[0]
        cos, sin = _angles(rest, planes, more, 2, torch.tensor([0, 1]))
        if not cos.shape == sin.shape == (2, planes):
            return [as_it_is]

        def at(length: int) -> _Regime:
            one, _, _ = _after(rest, torch.tensor([length - 1]), more)
            return _regime(one, attribute, kind, length, partial(_angles, rest, planes, more, length))

        far = at(window)
        first, length, above = at(1), 1, window
        if first.frequencies.equal(far.frequencies):
            return [far]
        while above - length > 1:
            middle = (length + above) // 2
            same = at(middle).frequencies.equal(first.frequencies)
            length, above = (middle, above) if same else (length, middle)
        return [at(length), far]
    except Exception:  # modules of other shapes are read by their buffer alone
        return [as_it_is]


def _regime(module: nn.Module, attribute: str, kind: str, length: int, step: Any) -> _Regime:
    scale = getattr(module, f"{kind}_attention_scaling" if kind else "attention_scaling", 1.0)
    return _Regime(length, getattr(module, attribute).detach().double().cpu(), float(scale or 1.0), step)


def _after(module: nn.Module, positions: Tensor, more: dict[str, str]) -> tuple[nn.Module, Tensor, Tensor]:
    """A copy of a module after it was called, and what it gave."""
    one = copy.deepcopy(module).cpu()
    with torch.no_grad():
        cos, sin = one(torch.zeros(1), positions[None], **more)
    return one, cos[0], sin[0]


def _angles(
    module: nn.Module, planes: int, more: dict[str, str], length: int, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """cos, sin [n k] of positions in a text of ``length`` tokens: its last position goes along, by which a module knows the length."""
    _, cos, sin = _after(module, torch.cat([positions, torch.tensor([length - 1])]), more)
    if cos.shape[-1] == 2 * planes:  # the halves of a head, or neighbours, in two forms
        halves = bool((cos[..., :planes] == cos[..., planes:]).all())
        cos, sin = (x[..., :planes] if halves else x[..., ::2] for x in (cos, sin))
    return cos[:-1], sin[:-1]
