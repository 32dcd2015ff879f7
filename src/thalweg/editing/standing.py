"""Edits of values that stay with a model: a tap of attention that belongs to no model, under which every attention finds its own edit."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from weakref import WeakValueDictionary, finalize

from torch import Tensor, nn

from thalweg.capture import Located, SitePlace
from thalweg.capture.attention import PREFIX, WRAPPED, standing_tap
from thalweg.capture.attention_call import AttentionCall
from thalweg.errors import InputError
from thalweg.models.retained import Edit

OWN = "_thalweg_own_edit"  # attribute of an attention and its parts
CHOOSE = "set_attn_implementation"  # method of models of transformers
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # what configurations call it


class Owned:
    """The edit that an attention has. Every part of it holds this beside its children (which would save it twice), so a copy has its own."""

    def __init__(self, edit: Edit, name: str):
        self.edit, self.name, self.heard = edit, name, False

    def begin(self, _: nn.Module, args: Any) -> None:
        self.heard = False

    def end(self, _: nn.Module, args: Any, output: Any) -> None:
        if not self.heard:
            raise InputError(
                f"{self.name} ran without its edit, as where its configuration was given another attention; choose one by "
                "model.set_attn_implementation, outside of blocks that watch or edit the model"
            )


def stand(model: nn.Module, kept: Mapping[SitePlace, Edit], located: Located) -> list[Any]:
    """Let the attention of ``model`` (of transformers) find its edits for good; the handles of the hooks.

    Raises: InputError for attention dropout in training with ``exclude_self``, and for a backend that cannot be tapped.
    """
    owned = {located.module(place.sublayer): Owned(module, place.name) for place, module in kept.items()}
    if model.training and any(module.exclude_self for module in kept.values()):
        name, rate = _dropout(model.config.get_text_config())  # type: ignore[union-attr]  # of transformers
        if rate:
            raise InputError(_no_dropout(name, rate))
    handles = []
    for sublayer, edit in owned.items():
        for part in sublayer.modules():
            vars(part)[OWN] = edit
        handles += [sublayer.register_forward_pre_hook(edit.begin), sublayer.register_forward_hook(edit.end)]
    for module in model.modules():
        if hasattr(module, CHOOSE) and any(part in owned for part in module.modules()):
            vars(module)[CHOOSE] = Choosing(module)
    follow(model)
    return handles


def leave(model: nn.Module) -> None:
    """Take away what :func:`stand` made beside hooks."""
    for module in model.modules():
        vars(module).pop(OWN, None)
        vars(module).pop(CHOOSE, None)
        name = _implementation(module)
        if isinstance(name, Standing):
            module.config._attn_implementation_internal = name.backend  # type: ignore[union-attr]  # it has a name


class Choosing:
    """``set_attn_implementation`` of a model with edits, which go along."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        type(self.model).set_attn_implementation(self.model, *args, **kwargs)
        follow(self.model)


def follow(model: nn.Module) -> None:
    """Put the standing tap over the attention that is chosen now for what is edited."""
    chosen = {_implementation(module) for module in model.modules() if module is model or OWN in vars(module)}
    for name in map(str, chosen - {None}):
        if name.startswith(PREFIX):
            continue
        if name not in WRAPPED:
            raise InputError(
                f"attention implementation {name!r} was chosen for a model with an edit of values that needs 'sdpa' or 'eager'; "
                "call model.set_attn_implementation('sdpa'), or detach the edit first"
            )
        for module in model.modules():
            if _implementation(module) == name:
                module.config._attn_implementation_internal = standing(name)  # type: ignore[union-attr]  # it has one


class Standing(str):
    """Name of a standing tap, and of the backend that it wraps. What is unpickled gets the name that the tap has there."""

    backend: str

    def __reduce__(self) -> Any:
        return standing, (self.backend,)


_standing: "WeakValueDictionary[str, Standing]" = WeakValueDictionary()  # backend -> the name that configurations hold


def standing(backend: str) -> Standing:
    """A tap under which every attention finds its own edit, if it has one: one for each backend, as long as a configuration holds its name.

    It knows no model, so a copy needs nothing of its original.
    """
    found = _standing.get(backend)
    if found is not None:
        return found
    stack = ExitStack()
    found = Standing(stack.enter_context(standing_tap(backend, edit_own)))
    found.backend = backend
    finalize(found, stack.close)
    _standing[backend] = found
    return found


def edit_own(call: AttentionCall) -> Tensor | None:
    """What the standing tap does."""
    owned: Owned | None = vars(call.module).get(OWN)
    if owned is None:
        return None
    owned.heard = True
    if owned.edit.exclude_self and call.dropout:
        name, _ = _dropout(vars(call.module).get("config"))
        raise InputError(_no_dropout(name, call.dropout))
    return owned.edit(call.output, call.own_values(), call.own() if owned.edit.exclude_self else None)


def _implementation(module: nn.Module) -> Any:
    return getattr(vars(module).get("config"), "_attn_implementation_internal", None)


def _dropout(config: Any) -> tuple[str, float]:
    """What a configuration calls the dropout of its attention, and its rate."""
    return next(((name, getattr(config, name)) for name in DROPOUTS if getattr(config, name, 0)), (DROPOUTS[0], 0.0))


def _no_dropout(name: str, rate: float) -> str:
    return (
        f"{name} is {rate}, so in training a token's weight on itself is random and exclude_self cannot leave it alone; make or load the "
        f"model with {name}=0 (in use without training, model.eval() has no dropout)"
    )
