"""Take layers out of a model, in place, with the proof that the rest is the model that passes them by."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.capture.evaluating import evaluating
from thalweg.capture.layout import Located
from thalweg.capture.maps import text_config
from thalweg.compression.replay import split
from thalweg.errors import InputError
from thalweg.models import Decoder

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the proof, relative to the largest output; else COARSE
COARSE = 5e-2
CHECKED = 8  # tokens of a row of the proof
PLAIN = (bool, int, float, str, type(None))


def remove_layers(located: Located, drop: Sequence[int]) -> list[int]:
    """Take the layers ``drop`` out of the model; the numbers of those that are left, in order.

    The model is then run on two rows beside itself as it was, with those layers passed by. Raises: InputError for a model whose layers depend
    on their number in a way that its configuration cannot say, or that is another function afterwards; the model is then as it was.
    """
    gone = set(drop)
    kept = [layer for layer in range(located.depth) if layer not in gone]
    if not kept:
        raise InputError(f"all {located.depth} layers would go; leave at least one")
    ids = _tokens(located.model)
    with passing_by(located, gone):
        expected = _output(located.model, ids)
    decoder = next((m for m in located.model.modules() if isinstance(m, Decoder)), None)
    undo = _ours(located.model, decoder, kept) if decoder is not None else _theirs(located, kept)
    try:
        error = float((_output(located.model, ids) - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        allowed = TOLERANCE.get(expected.dtype, COARSE)
        if not error <= allowed:
            raise InputError(
                f"without layers {_listed(drop)} the {located.family} model is not the one that passes them by (off by {error:.1e}, allowed "
                f"{allowed:.0e}): its layers depend on their number; zero them by thalweg edit --site block instead"
            )
    except BaseException:
        undo()
        raise
    return kept


@contextmanager
def passing_by(located: Located, drop: set[int]) -> Iterator[None]:
    """The model with the layers ``drop`` left out of every pass, inside the block: what they would be given, the next one is."""
    from thalweg.models.block import Block

    def skip(index: int, block: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if isinstance(block, Block):
            (state, *_), _, following, tokens = args[:4]
            return (state, None, None) if following is None else (state, *following.read(state, tokens))
        _, state = split(args, kwargs, located.blocks[index])
        return (state, *output[1:]) if isinstance(output, tuple) else state

    with ExitStack() as stack:
        for index in drop:
            block = located.module(located.blocks[index])
            hook = block.register_forward_hook(lambda m, a, k, o, i=index: skip(i, m, a, k, o), with_kwargs=True)
            stack.callback(hook.remove)
        yield


def _theirs(located: Located, kept: list[int]) -> Callable[[], None]:
    """Of a model of transformers: its list of blocks, the numbers in them, its configuration."""
    parent_name, _, list_name = located.blocks[0].rpartition(".")[0].rpartition(".")
    parent, config = located.module(parent_name), text_config(located.model)
    blocks = getattr(parent, list_name)
    if not isinstance(blocks, nn.ModuleList) or config is None:
        raise InputError(f"the layers of {type(located.model).__name__} are no list that layers could be taken out of")
    numbers: list[tuple[Any, Any]] = [
        (m, m.layer_idx)
        for layer in kept
        for m in blocks[layer].modules()
        if isinstance(getattr(m, "layer_idx", None), int)
    ]
    counts = [
        key for key, value in vars(parent).items() if "layer" in key and type(value) is int and value == located.depth
    ]
    before = {key: value for key, value in config.to_dict().items() if _by_layer(key, value, located.depth)}
    before["num_hidden_layers"] = located.depth

    def undo() -> None:
        setattr(parent, list_name, blocks)
        for module, number in numbers:
            module.layer_idx = number
        for key in counts:
            setattr(parent, key, located.depth)
        for key, value in before.items():
            setattr(config, key, value)

    place = {old: new for new, old in enumerate(kept)}
    try:
        setattr(parent, list_name, nn.ModuleList(blocks[layer] for layer in kept))
        for module, number in numbers:
            module.layer_idx = place.get(int(number), int(number))
        for key in counts:
            setattr(parent, key, len(kept))
        config.num_hidden_layers = len(kept)
        for key, value in before.items():
            if key == "mlp_only_layers":
                setattr(config, key, [place[layer] for layer in value if layer in place])
            elif isinstance(value, list | tuple):
                setattr(config, key, [value[layer] for layer in kept])
        _check_config(located.model, config)
    except BaseException:
        undo()
        raise
    return undo


def _by_layer(key: str, value: Any, depth: int) -> bool:
    """Whether an entry of a configuration says something of every layer."""
    return key == "mlp_only_layers" or ("layer" in key and isinstance(value, list | tuple) and len(value) == depth)


def _check_config(model: nn.Module, config: Any) -> None:
    """Whether the configuration makes the modules that are there. Raises: InputError."""
    outer = model.config
    with torch.device("meta"):
        again = type(model)(outer)
    ours, theirs = dict(model.named_modules()), dict(again.named_modules())
    fault = next((name for name in (*ours, *theirs) if name not in ours or name not in theirs), None)
    for name, module in ours.items():
        if fault is not None:
            break
        other = theirs[name]
        same = type(module) is type(other) and _shapes(module) == _shapes(other)
        numbers = {
            k: v for k, v in vars(module).items() if isinstance(v, PLAIN) and k != "training" and not k.startswith("_")
        }
        if not same or any(vars(other).get(k, v) != v for k, v in numbers.items()):
            fault = name
    if fault is not None:
        raise InputError(
            f"with these layers gone the configuration of {type(model).__name__} would make another {fault or 'model'}: its layers differ by "
            "their number; drop others, or zero them by thalweg edit --site block"
        )


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {name: p.shape for name, p in module.named_parameters(recurse=False)}


def _ours(model: Any, decoder: Decoder, kept: list[int]) -> Callable[[], None]:
    """Of a decoder of ours: a smaller one with the same weights, whose parts take the place of the old ones."""
    config, per_layer = decoder.config, len(decoder.config.layers)
    place = {old: new for new, old in enumerate(kept)}
    sites = {old * per_layer + i: new * per_layer + i for old, new in place.items() for i in range(per_layer)}
    windows = tuple(config.windows[layer] for layer in kept) if config.windows else ()
    dense = sum(layer < config.dense_layers for layer in kept)
    heads = tuple(config.layer_heads[layer] for layer in kept) if config.layer_heads else ()
    smaller = dataclasses.replace(config, depth=len(kept), windows=windows, dense_layers=dense, layer_heads=heads)
    with torch.device("meta"):
        made = Decoder(smaller)
    state = {}
    for name, value in decoder.state_dict().items():
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part in ("blocks", "sites")), None)
        if at is not None:
            moved = (place if parts[at] == "blocks" else sites).get(int(parts[at + 1]))
            if moved is None:
                continue
            parts[at + 1] = str(moved)
        state[".".join(parts)] = value
    try:
        made.load_state_dict(state, assign=True)
    except RuntimeError:
        raise InputError(
            f"the parts of connection {config.connection!r} depend on the number of layers, so none can be taken out; zero layers by "
            "thalweg edit --site block instead"
        ) from None
    before = (decoder.config, decoder.blocks, decoder.stream)
    shell = getattr(model, "config", None) if model is not decoder else None
    decoder.config, decoder.blocks, decoder.stream = smaller, made.blocks, made.stream
    if shell is not None:
        from thalweg.models import ThalwegConfig

        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        model.config = ThalwegConfig.of(smaller, **{n: getattr(shell, n, None) for n in names})
        model.config.dtype = shell.dtype

    def undo() -> None:
        decoder.config, decoder.blocks, decoder.stream = before
        if shell is not None:
            model.config = shell

    return undo


def _tokens(model: nn.Module) -> Tensor:
    from thalweg.capture.structure import some_tokens

    return some_tokens(model)[:, :CHECKED]


def _output(model: nn.Module, ids: Tensor) -> Tensor:
    from thalweg.capture.structure import first_tensor

    with evaluating(model), torch.compiler.set_stance("force_eager"):
        found = model(ids)
        logits = getattr(found, "logits", None)
        output = logits if logits is not None else first_tensor(found)
    assert output is not None
    return output


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(layers)))
