"""The linear maps of a model that are compressed: those inside its blocks; embeddings and unembedding are not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from thalweg.capture.layers import Layers, chosen_layers
from thalweg.capture.layout import Located
from thalweg.capture.linear import linear_weight
from thalweg.compression.stacked import stacked_maps
from thalweg.errors import InputError, UnknownNameError

SITES = ("attention", "mlp")
NAMES = {"attn": "attention", "ffn": "mlp", "feed_forward": "mlp", "mixer": "mixer"}


@dataclass(frozen=True)
class Target:
    """One matrix that is compressed: ``name`` is its module, and the number of the expert where the module holds one map per expert. site:
    ``attention``, ``mlp``, or the kind of another sublayer. parameter: where the module keeps it."""

    name: str
    module: nn.Module
    layer: int
    site: str
    expert: int | None = None
    parameter: str = "weight"

    @property
    def tensor(self) -> Tensor:
        """The parameter, which may hold other maps too."""
        return getattr(self.module, self.parameter)

    @property
    def stacked(self) -> bool:
        """Whether the module holds several maps of experts that read different tensors."""
        return self.parameter != "weight"

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """A view of the parameter."""
        if self.expert is not None:
            one = self.tensor[self.expert]
            return one.T if self.stacked and self.module.is_transposed else one
        found = linear_weight(self.module)
        assert found is not None
        return found

    @property
    def shape(self) -> tuple[int, int]:
        out, inputs = self.weight.shape
        return int(out), int(inputs)


def chosen_sites(sites: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """None: all. Raises: UnknownNameError."""
    if sites is None or sites == "all":
        return None
    parts = sites.split(",") if isinstance(sites, str) else sites
    found = tuple(NAMES.get(part.strip(), part.strip()) for part in parts)
    for name in found:
        if name not in (*SITES, "mixer"):
            raise UnknownNameError("site to compress", name, ("all", *SITES, "mixer"))
    return found


def layers_of(depth: int, layers: Layers, skip: Layers) -> tuple[int, ...]:
    """The layers that are compressed: ``layers`` without ``skip``. Raises: InputError."""
    chosen = chosen_layers(layers, depth, to="compress")
    protected = (
        set()
        if skip in (None, "", ()) or (isinstance(skip, list) and not skip)
        else set(chosen_layers(skip, depth, to="skip"))
    )
    left = tuple(layer for layer in chosen if layer not in protected)
    if not left:
        raise InputError(f"no layer is left to compress: layers {layers!r} without {skip!r}")
    return left


def targets_of(located: Located, layers: Iterable[int], sites: tuple[str, ...] | None) -> list[Target]:
    """The maps of the chosen layers, in the order of the modules.

    Raises: InputError for weights that cannot be compressed: packed, on no device, shared between maps, or experts in one tensor of which
    nothing says how they lie there.
    """
    found: list[Target] = []
    for layer in layers:
        block = located.blocks[layer]
        for name, module in located.module(block).named_modules():
            full = f"{block}.{name}" if name else block
            site = _site(located, layer, full)
            if (sites is None or site in sites) and not _routes(full):
                found += _of_module(full, module, layer, site)
    if not found:
        kinds = f" at sites {', '.join(sites)}" if sites else ""
        raise InputError(f"the chosen layers of this {located.family} model have no linear maps{kinds} to compress")
    _refuse_shared(found, located)
    for target in found:
        if target.weight.device.type == "meta":
            raise InputError(f"{target.name} is not in memory (meta device); open the model without offloading")
    return found


def _of_module(name: str, module: nn.Module, layer: int, site: str) -> list[Target]:
    weight = getattr(module, "weight", None)
    if linear_weight(module) is not None:
        return [Target(name, module, layer, site)]
    if isinstance(module, nn.Linear):
        kind = str(getattr(weight, "dtype", "no weight")).removeprefix("torch.")
        raise InputError(
            f"{name} ({type(module).__name__}, {kind}) is packed already; give the model before quantisation"
        )
    if isinstance(weight, Tensor) and weight.ndim == 3 and hasattr(module, "in_features"):
        return [Target(f"{name}.{e}", module, layer, site, e) for e in range(len(weight))]
    if names := stacked_maps(module):
        return [
            Target(f"{name}.{key}.{e}", module, layer, site, e, key)
            for key in names
            for e in range(len(getattr(module, key)))
        ]
    stacked = [
        key
        for key, p in module.named_parameters(recurse=False)
        if p.ndim == 3 and "expert" in type(module).__name__.lower()
    ]
    if stacked:
        raise InputError(
            f"{name} ({type(module).__name__}) holds all experts in one tensor ({', '.join(stacked)}) and does not say how; "
            "say sites='attention' to leave the experts as they are"
        )
    return []


def _routes(name: str) -> bool:
    """Whether a map only chooses experts: its few weights decide for all tokens, and stay as they are."""
    return any("router" in part or part == "shared_expert_gate" for part in name.split("."))


def _site(located: Located, layer: int, name: str) -> str:
    """The kind of sublayer that a module belongs to; mlp for what belongs to none of a layer that has a feed-forward sublayer."""
    kinds = {"feed_forward": "mlp"}
    places = [place for place in located.sites if place.layer == layer]
    within = [place for place in places if name == place.sublayer or name.startswith(f"{place.sublayer}.")]
    if within:
        kind = max(within, key=lambda place: len(place.sublayer)).kind
        return kinds.get(kind, kind)
    return "mlp" if any(place.kind == "feed_forward" for place in places) else "other"


def _refuse_shared(targets: list[Target], located: Located) -> None:
    seen: dict[tuple[int, int | None], str] = {}
    for target in targets:
        key = (id(target.tensor), target.expert)
        if key in seen:
            raise InputError(
                f"{target.name} and {seen[key]} share one weight; a model that shares maps is not compressed here"
            )
        seen[key] = target.name
    tables = {id(m.weight): n for n, m in located.model.named_modules() if isinstance(m, nn.Embedding)}
    for target in targets:
        if id(target.tensor) in tables:
            raise InputError(f"{target.name} shares its weight with the embedding; it is not compressed")


def left_dense(located: Located, targets: Sequence[Target]) -> list[str]:
    """Matrices inside the blocks of the chosen layers that nothing here compresses: routers, convolutions and the like; of the chosen sites."""
    touched = {id(target.tensor) for target in targets}
    layers, sites = {target.layer for target in targets}, {target.site for target in targets}
    return [
        f"{located.blocks[layer]}.{name}"
        for layer in sorted(layers)
        for name, p in located.module(located.blocks[layer]).named_parameters()
        if p.ndim >= 2
        and not name.endswith("bias")
        and id(p) not in touched
        and _site(located, layer, f"{located.blocks[layer]}.{name}") in sites
    ]
