"""The rotary clocks of a model: the angles that its planes really turn for a token, read from what the module gives and not from a formula."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.capture.evaluating import evaluating
from thalweg.capture.layout import Located
from thalweg.capture.limits import longest_of
from thalweg.models import Decoder
from thalweg.models.rotary import angles

BUFFER = re.compile(r"^(?!.*original)(?P<kind>.*?)_?inv_freq$")


@dataclass(frozen=True)
class Clock:
    """One set of rotary angles.

    name: dotted module, with the kind of layer behind it where it has several. frequencies [k]: radians a token, float64, after scaling.
    heads: channels of a head, of which 2k turn. base, rule: that the configuration states, None and "" where it does not. length: tokens of
    the window. scale: factor on cosine and sine (YaRN). step: positions [n] -> cos, sin [n k] as the module computes them, or None.
    """

    name: str
    frequencies: Tensor
    heads: int
    length: int
    base: float | None = None
    rule: str = ""
    scale: float = 1.0
    step: Any = None

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
    config = getattr(located.model, "config", None)
    config = getattr(config, "text_config", None) or config
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
            scale = getattr(module, f"{kind}_attention_scaling" if kind else "attention_scaling", 1.0)
            frequencies = values.detach().double().cpu()
            step = _step(module, kind, len(frequencies))
            where = f"{name}.{kind}" if kind else name
            heads = max(width or 2 * len(frequencies), 2 * len(frequencies))
            yield Clock(where, frequencies, heads, window, base, rule, float(scale or 1.0), step)


def _stated(config: Any, kind: str) -> tuple[float | None, str, int | None]:
    """Base, rule and width of a head that a configuration states."""
    table = getattr(config, "rope_parameters", None) or {}
    table = table.get(kind, table) if isinstance(table, dict) else {}
    base = table.get("rope_theta", getattr(config, "rope_theta", None))
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_head", None)
    hidden = getattr(config, "hidden_size", None) or getattr(config, "n_embd", None)
    width = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
    width = width or (hidden // heads if hidden and heads else None)
    return (None if base is None else float(base)), str(table.get("rope_type", "default")), width


def _step(module: nn.Module, kind: str, planes: int) -> Any:
    """positions [n] -> cos, sin [n k] as the module itself computes them, or None."""
    try:
        named = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return None
    more = {"layer_type": kind} if "layer_type" in named and kind else {}

    def step(positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            cos, sin = module(torch.zeros(1), positions[None], **more)
        if cos.shape[-1] == 2 * planes:  # the halves of a head, or neighbours, in two forms
            halves = bool((cos[..., :planes] == cos[..., planes:]).all())
            cos, sin = (x[..., :planes] if halves else x[..., ::2] for x in (cos, sin))
        return cos[0], sin[0]

    try:
        cos, sin = step(torch.tensor([0, 1]))
    except Exception:  # modules of other shapes are read by their buffer alone
        return None
    return step if cos.shape == (2, planes) and sin.shape == (2, planes) else None
