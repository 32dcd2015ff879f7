"""The parameters of streams side by side in the layouts of public code, and back.

    theirs = to_layout(stream.sites[0], "deepseek_v4")          # {"fn": ..., "base": ..., "scale": ...}
    load_layout(stream.sites[0], checkpoint_tensors, "paper")   # copies them in

Axis legend: n streams, C width; a matrix that moves streams is ``mix[to, from]`` here, and ``comb[from, to]`` in DeepSeek's code, so that
its n*n logits stand in another order. Every conversion is made of views, sums and products that autograd follows. The norms of a site are
the sublayer's business in public code, and no part of a layout.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thalweg.connections._many_streams import ManyStreams, ManyStreamsSite
from thalweg.connections._stream_coefficients import Source
from thalweg.errors import InputError, ShapeError, UnknownNameError
from thalweg.mixers.base import SquareMixer

Tensors = dict[str, Tensor]
FAMILIES = ("read", "write", "mix")  # the order of every joined layout: pre, post, res


@dataclass(frozen=True)
class Layout:
    """How one public implementation keeps the parameters of a site.

    summary: names and shapes, with n streams and width C. source: where it is from. coefficients: what its dynamic part is made from.
    shapes: (n, C) -> name -> shape. give, take: our tensors, named ``read.bias`` and so on, to theirs and back; given n.
    head_shapes, head_names: the same of the learned contraction, theirs -> ours; empty where the layout has none.
    """

    summary: str
    source: str
    coefficients: Source
    shapes: Callable[[int, int], dict[str, tuple[int, ...]]]
    give: Callable[[Tensors, int], Tensors]
    take: Callable[[Tensors, int], Tensors]
    head_shapes: Callable[[int, int], dict[str, tuple[int, ...]]] = lambda n, width: {}
    head_names: tuple[tuple[str, str], ...] = ()


def to_layout(
    module: ManyStreamsSite | ManyStreams, layout: str, parameters: Mapping[str, Tensor] | None = None
) -> Tensors:
    """The parameters of a site, or of the learned head of a stream, as the public code names and shapes them.

    parameters: tensors to convert in place of the module's own, by the names of ``module.named_parameters()``.
    A static site gives projections of zeros. Raises: UnknownNameError, InputError where the layout has no place for the site.
    """
    chosen, given = _layout(layout), dict(module.named_parameters()) if parameters is None else parameters
    if isinstance(module, ManyStreams):
        _check_head(module, layout, chosen)
        return {theirs: given[f"head.{ours}"] for theirs, ours in chosen.head_names}
    _check_site(module, layout, chosen)
    n, width, options = module.options.streams, module.input_norm.width, module.options
    rows, columns = {"concatenated": (n, n * width), "per_stream": (1, width)}[chosen.coefficients]
    ours: Tensors = {}
    for family in FAMILIES:
        bias = ours[f"{family}.bias"] = given[f"logits.{family}.bias"]
        if options.dynamic:
            ours |= {f"{family}.{part}": given[f"logits.{family}.{part}"] for part in ("projection", "alpha")}
        else:  # any scale of nothing is nothing; the declared first one keeps the projection trainable over there
            ours[f"{family}.projection"] = bias.new_zeros(rows * (n if family == "mix" else 1), columns)
            ours[f"{family}.alpha"] = bias.new_full((1,), options.alpha_start)
    return chosen.give(ours, n)


def from_layout(module: ManyStreamsSite | ManyStreams, tensors: Mapping[str, Tensor], layout: str) -> Tensors:
    """Public parameters under the names of ``module.named_parameters()``; the inverse of :func:`to_layout`.

    What the public code keeps and this package does not (the weight of the norm in hyper-connections) is folded into the projections.
    Raises: UnknownNameError, InputError for missing or foreign names and for a dynamic part that a static site cannot hold, ShapeError.
    """
    chosen, n = _layout(layout), module.options.streams
    if isinstance(module, ManyStreams):
        _check_head(module, layout, chosen)
        _check_tensors(tensors, chosen.head_shapes(n, module.width), layout)
        return {f"head.{ours}": tensors[theirs] for theirs, ours in chosen.head_names}
    _check_site(module, layout, chosen)
    _check_tensors(tensors, chosen.shapes(n, module.input_norm.width), layout)
    taken = chosen.take(dict(tensors), n)
    if not module.options.dynamic:
        moving = [name for name, value in taken.items() if name.endswith("projection") and value.any()]
        if moving:
            raise InputError(
                f"these parameters have a dynamic part ({', '.join(moving)}), the site has none; use dynamic=True"
            )
        taken = {name: value for name, value in taken.items() if name.endswith("bias")}
    return {f"logits.{name}": value for name, value in taken.items()}


def load_layout(module: ManyStreamsSite | ManyStreams, tensors: Mapping[str, Tensor], layout: str) -> None:
    """Copy public parameters into a site, or into the learned head of a stream. Raises: as :func:`from_layout`."""
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in from_layout(module, tensors, layout).items():
            own[name].copy_(value)


def names() -> list[str]:
    """Names of the layouts."""
    return sorted(LAYOUTS)


def _layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise UnknownNameError("layout", name, LAYOUTS)
    return LAYOUTS[name]


def _check_head(stream: ManyStreams, name: str, layout: Layout) -> None:
    if not layout.head_names:
        raise InputError(f"layout {name!r} holds sites only, got a whole stream; convert stream.sites[i]")
    if stream.head is None:
        raise InputError(
            f"the stream has contraction={stream.options.contraction!r} and no head to convert; use contraction='head'"
        )


def _check_site(site: ManyStreamsSite, name: str, layout: Layout) -> None:
    found, o = tuple(site.families()), site.options
    if found != FAMILIES:
        raise InputError(
            f"layout {name!r} holds the logits read, write and mix, this site has {', '.join(found) or 'none'}"
        )
    if not isinstance(site.mixer, SquareMixer) or len(site.mixer.scaled) > 1:
        raise InputError(
            f"layout {name!r} holds one logit for every entry of the mixing matrix, mixer {o.mixer!r} has {site.mixer.generators}"
        )
    if o.dynamic and o.coefficients != layout.coefficients:
        raise InputError(f"layout {name!r} has coefficients={layout.coefficients!r}, the site {o.coefficients!r}")


def _check_tensors(tensors: Mapping[str, Tensor], shapes: dict[str, tuple[int, ...]], layout: str) -> None:
    if set(tensors) != set(shapes):
        raise InputError(
            f"layout {layout!r} holds {', '.join(sorted(shapes))}; got {', '.join(sorted(tensors)) or 'nothing'}"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ShapeError(f"{name} of layout {layout!r} has shape {list(shape)}, got {list(tensors[name].shape)}")


# pre, post and res joined along one axis


def _join(ours: Tensors, part: str) -> Tensor:
    return torch.cat([ours[f"{family}.{part}"] for family in FAMILIES])


def _split(bias: Tensor, projection: Tensor, alpha: Tensor, n: int) -> Tensors:
    parts = {"bias": bias.split([n, n, n * n]), "projection": projection.split([n, n, n * n]), "alpha": alpha.split(1)}
    return {f"{family}.{part}": values[k] for part, values in parts.items() for k, family in enumerate(FAMILIES)}


def _turn(ours: Tensors, n: int) -> Tensors:
    """The logits of the mixing matrix in the order of its transpose."""
    turned = {
        f"mix.{part}": ours[f"mix.{part}"].unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1)
        for part in ("bias", "projection")
    }
    return ours | turned


def _give_deepseek(ours: Tensors, n: int) -> Tensors:
    ours = _turn(ours, n)
    return {"fn": _join(ours, "projection"), "base": _join(ours, "bias"), "scale": _join(ours, "alpha")}


def _take_deepseek(theirs: Tensors, n: int) -> Tensors:
    return _turn(_split(theirs["base"], theirs["fn"], theirs["scale"], n), n)


ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")


def _give_paper(ours: Tensors, n: int) -> Tensors:
    alphas = {name: ours[f"{family}.alpha"].squeeze(0) for name, family in zip(ALPHAS, FAMILIES, strict=True)}
    return {"phi": _join(ours, "projection").mT, "b": _join(ours, "bias"), **alphas}


def _take_paper(theirs: Tensors, n: int) -> Tensors:
    return _split(theirs["b"], theirs["phi"].mT, torch.stack([theirs[name] for name in ALPHAS]), n)


# hyper-connections (PyPI): per stream, [from, to] beside what is read


def _give_beside(ours: Tensors, n: int) -> Tensors:
    return {
        "norm.gamma": torch.zeros_like(ours["read.projection"][0]),
        "static_alpha": torch.cat([ours["read.bias"].unsqueeze(1), ours["mix.bias"].unflatten(0, (n, n)).mT], 1),
        "dynamic_alpha_fn": torch.cat([ours["read.projection"], ours["mix.projection"]]).mT,
        "static_beta": ours["write.bias"],
        "dynamic_beta_fn": ours["write.projection"][0],
    }


def _take_beside(theirs: Tensors, n: int) -> Tensors:
    gain = 1 + theirs["norm.gamma"]
    alpha = theirs["dynamic_alpha_fn"].mT * gain
    return {
        "read.bias": theirs["static_alpha"][:, 0],
        "read.projection": alpha[:1],
        "write.bias": theirs["static_beta"],
        "write.projection": (theirs["dynamic_beta_fn"] * gain).unsqueeze(0),
        "mix.bias": theirs["static_alpha"][:, 1:].mT.flatten(),
        "mix.projection": alpha[1:],
    }


def _give_hyper(ours: Tensors, n: int) -> Tensors:
    read, mix = ours["read.alpha"], ours["mix.alpha"]
    if not torch.equal(read, mix):
        raise InputError(
            f"layout 'hyper_connections' has one scale for read and mix, the site has {read.item():g} and {mix.item():g}; "
            f"make them equal or use 'hyper_connections_mhc'"
        )
    scales = {"dynamic_alpha_scale": read.squeeze(0), "dynamic_beta_scale": ours["write.alpha"].squeeze(0)}
    return _give_beside(ours, n) | scales


def _take_hyper(theirs: Tensors, n: int) -> Tensors:
    alpha, beta = theirs["dynamic_alpha_scale"].reshape(1), theirs["dynamic_beta_scale"].reshape(1)
    return _take_beside(theirs, n) | {"read.alpha": alpha, "mix.alpha": alpha, "write.alpha": beta}


def _give_hyper_mhc(ours: Tensors, n: int) -> Tensors:
    found = _give_beside(ours, n)
    found["dynamic_alpha_fn"] = found["dynamic_alpha_fn"].unsqueeze(0)
    return found | {
        "pre_branch_scale": ours["read.alpha"],
        "residual_scale": ours["mix.alpha"],
        "h_post_scale": ours["write.alpha"].squeeze(0),
    }


def _take_hyper_mhc(theirs: Tensors, n: int) -> Tensors:
    found = _take_beside(theirs | {"dynamic_alpha_fn": theirs["dynamic_alpha_fn"].squeeze(0)}, n)
    return found | {
        "read.alpha": theirs["pre_branch_scale"],
        "mix.alpha": theirs["residual_scale"],
        "write.alpha": theirs["h_post_scale"].reshape(1),
    }


def _give_hyper_mhc_v2(ours: Tensors, n: int) -> Tensors:
    found = _give_hyper_mhc(ours, n)
    return found | {
        "static_beta": found["static_beta"].reshape(n, 1, 1),
        "dynamic_beta_fn": found["dynamic_beta_fn"].unsqueeze(1),
    }


def _take_hyper_mhc_v2(theirs: Tensors, n: int) -> Tensors:
    flat = {"static_beta": theirs["static_beta"].flatten(), "dynamic_beta_fn": theirs["dynamic_beta_fn"].squeeze(1)}
    return _take_hyper_mhc(theirs | flat, n)


def _shapes_beside(n: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        "norm.gamma": (width,),
        "static_alpha": (n, 1 + n),
        "dynamic_alpha_fn": (width, 1 + n),
        "static_beta": (n,),
        "dynamic_beta_fn": (width,),
    }


def _shapes_mhc(n: int, width: int) -> dict[str, tuple[int, ...]]:
    own = {"dynamic_alpha_fn": (1, width, 1 + n), "pre_branch_scale": (1,), "residual_scale": (1,), "h_post_scale": ()}
    return _shapes_beside(n, width) | own


LAYOUTS: dict[str, Layout] = {
    "deepseek_v4": Layout(
        summary="fn [n(n+2), nC], base [n(n+2)], scale [3]: pre, post, comb; comb[from, to]. Head: hc_fn [n, nC], hc_base [n], hc_scale [1]",
        source="transformers, DeepseekV4HyperConnection and DeepseekV4HyperHead; DeepSeek TileKernels",
        coefficients="concatenated",
        shapes=lambda n, c: {"fn": (n * (n + 2), n * c), "base": (n * (n + 2),), "scale": (3,)},
        give=_give_deepseek,
        take=_take_deepseek,
        head_shapes=lambda n, c: {"hc_fn": (n, n * c), "hc_base": (n,), "hc_scale": (1,)},
        head_names=(("hc_fn", "projection"), ("hc_base", "bias"), ("hc_scale", "alpha")),
    ),
    "paper": Layout(
        summary="phi [nC, n(n+2)], b [n(n+2)], alpha_pre, alpha_post, alpha_res []: pre, post, res; res[to, from]",
        source="mHC, arXiv 2512.24880, Eq. 7 and 10-13; the names of Liger's LigerMHC",
        coefficients="concatenated",
        shapes=lambda n, c: {"phi": (n * c, n * (n + 2)), "b": (n * (n + 2),), **dict.fromkeys(ALPHAS, ())},
        give=_give_paper,
        take=_take_paper,
    ),
    "hyper_connections": Layout(
        summary="static_alpha [n, 1+n] (read, then [from, to]), dynamic_alpha_fn [C, 1+n], static_beta [n], dynamic_beta_fn [C], "
        "dynamic_alpha_scale, dynamic_beta_scale [], norm.gamma [C]",
        source="hyper-connections (PyPI), HyperConnections",
        coefficients="per_stream",
        shapes=lambda n, c: _shapes_beside(n, c) | {"dynamic_alpha_scale": (), "dynamic_beta_scale": ()},
        give=_give_hyper,
        take=_take_hyper,
    ),
    "hyper_connections_mhc": Layout(
        summary="as hyper_connections, dynamic_alpha_fn [1, C, 1+n], with pre_branch_scale, residual_scale [1] and h_post_scale []",
        source="hyper-connections (PyPI), ManifoldConstrainedHyperConnections",
        coefficients="per_stream",
        shapes=_shapes_mhc,
        give=_give_hyper_mhc,
        take=_take_hyper_mhc,
    ),
    "hyper_connections_mhc_v2": Layout(
        summary="as hyper_connections_mhc, static_beta [n, 1, 1], dynamic_beta_fn [C, 1]",
        source="hyper-connections (PyPI), mHCv2.ManifoldConstrainedHyperConnections",
        coefficients="per_stream",
        shapes=lambda n, c: _shapes_mhc(n, c) | {"static_beta": (n, 1, 1), "dynamic_beta_fn": (c, 1)},
        give=_give_hyper_mhc_v2,
        take=_take_hyper_mhc_v2,
    ),
}
