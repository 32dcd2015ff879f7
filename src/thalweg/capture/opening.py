"""Open anybody's model: a folder, a GGUF file, a name on a hub or a model at hand; one line for everything that goes wrong."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from thalweg.capture import at_hand, gguf
from thalweg.capture.fields import check_counts
from thalweg.capture.hub import OnHub, look_up
from thalweg.capture.quiet import hushed, readable
from thalweg.capture.weights import check_fit, check_sizes, few
from thalweg.config import checked_path, is_path
from thalweg.errors import CheckpointError, InputError, MissingExtraError, UnknownNameError, first_line, nearest
from thalweg.records.run import RunFolder

Kind = Literal["decoder", "encoder", "masked-lm"]
DTYPES = ("float32", "float64", "bfloat16", "float16", "auto")
BACKENDS = ("eager", "sdpa")
EDITED = "thalweg_edit"  # of a configuration: what thalweg.editing.attach made part of the model
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
READERS = {  # method of quantisation -> module and package by which transformers reads it
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
    "torchao": ("torchao", "torchao"),
    "awq": ("gptqmodel", "gptqmodel"),
    "gptq": ("gptqmodel", "gptqmodel"),
}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Opened:
    """A model in evaluation mode, with what is beside it.

    tokenizer: None where there is none. kind: ``decoder`` (logits over the next token), ``masked-lm`` or ``encoder`` (no head). notes: what
    a reader of the numbers should know, as lines: dtype and attention backend, what was unpacked, what was left out.
    """

    model: nn.Module
    tokenizer: Any
    name: str
    kind: Kind
    notes: tuple[str, ...] = ()

    def require_tokenizer(self) -> Any:
        """The tokenizer. Raises: InputError where there is none."""
        if self.tokenizer is None:
            raise InputError(
                f"{self.name} has no tokenizer beside it, and text needs one; put its files beside the weights, or in Python give tokenizer="
            )
        return self.tokenizer


def open_model(
    where: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    backend: str | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
    tokenizer: Any = None,
    check: Callable[[Any], None] | None = None,
    quantised: bool = False,
    edited: Callable[[nn.Module, str], Any] | None = None,
) -> Opened:
    """Open a model for looking at it.

    where: a folder that ``save_pretrained`` wrote (of transformers or ours), a GGUF file, a name on a hub, or a model at hand (``smollm2``,
    ``minilm``; a folder of that name is ``./smollm2``). dtype: of the weights; ``auto`` keeps that of the file. backend: of the attention
    (``eager``, ``sdpa``; None: what transformers takes). device_map: as in transformers, needs accelerate. trust_remote_code: run code
    that comes with the model; never without. tokenizer: an object, or where to take it from. check: called with the
    configuration before any weight is read; may raise. quantised: open packed weights too, where transformers and the package that they
    need can. edited: told a model whose configuration names edits of its own, and where it lies, to attach them
    (:func:`thalweg.editing.attach_from`); None refuses such a model, which would be another one without them.

    Weights come from safetensors or GGUF only. Weights that the model needs and the file has not are an error, but for a pooling layer,
    which no measurement reads. Raises: InputError, CheckpointError, OfflineError, MissingExtraError, each in one line.
    """
    name, weights = str(where), _dtype(dtype)
    if backend not in (None, *BACKENDS):
        raise UnknownNameError("attention backend", backend, BACKENDS)
    if device_map == "meta":
        raise InputError("device_map 'meta' holds no weights, so there is nothing to look at; name a device, or auto")
    if device_map is not None and find_spec("accelerate") is None:
        raise MissingExtraError("accelerate (for device_map)", "gguf")
    options = {
        "dtype": weights,
        **({"attn_implementation": backend} if backend else {}),
        **({"device_map": device_map} if device_map is not None else {}),
    }
    place = _place(name)
    if isinstance(place, Path) and place.is_file():
        opened = _from_gguf(place, name, tokenizer, trust_remote_code, check, options)
    else:
        opened = _from_safetensors(place, name, tokenizer, trust_remote_code, check, options, quantised, edited)
    if name in at_hand.MODELS:
        about = at_hand.MODELS[name]
        opened = replace(opened, notes=(f"{about.title}: {about.summary}", *opened.notes))
    return replace(opened, model=opened.model.eval(), notes=(*facts_of(opened.model), *opened.notes))


def _from_gguf(path: Any, name: str, tokenizer: Any, trust: bool, check: Any, options: dict[str, Any]) -> Opened:
    config = gguf.read_config(path)
    kind = kind_of(config, name)
    if check is not None:
        check(config)
    model, info = gguf.read_model(path, config, _loader(kind, config), **options)
    unpacked = f"unpacked from GGUF ({gguf.packing(path) or 'packing not stated'})"
    found = gguf.read_tokenizer(path) if tokenizer is None else given_tokenizer(tokenizer, trust)
    return Opened(model, found, name, kind, (unpacked, *_fit(info, name)))


def _from_safetensors(
    place: Any,
    name: str,
    tokenizer: Any,
    trust: bool,
    check: Any,
    options: dict[str, Any],
    quantised: bool,
    edited: Any,
) -> Opened:
    hub = place.options if isinstance(place, OnHub) else {}
    notes = [place.note] if isinstance(place, OnHub) else []
    where = place.name if isinstance(place, OnHub) else str(place)
    config = _config(where, trust, hub, quantised)
    kind = kind_of(config, name)
    if check is not None:
        check(config)
    own = getattr(config, EDITED, None)
    if own and edited is None:
        raise InputError(
            f"{name} was saved with an edit of its own ({EDITED} of its configuration) and is another model without it; load it by "
            "transformers, call thalweg.editing.attach_from and give the model"
        )
    if isinstance(place, Path):
        _check_files(place)
    with readable(where, bars=isinstance(place, OnHub)):
        model, info = _loader(kind, config).from_pretrained(
            where,
            use_safetensors=True,
            trust_remote_code=trust,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, with the rest
            **options,
            **hub,
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise InputError(f"{name} brings an adapter; merge it into its model and save that")
    if tokenizer is None:
        found, why = read_tokenizer(where, trust, **hub)
        notes += [why] if why else []
    else:
        found = given_tokenizer(tokenizer, trust)
    if own and edited is not None:
        edited(model, where)
        notes.append("edits of its own are on")
    return Opened(model, found, name, kind, (*notes, *_fit(info, name)))


def given_tokenizer(tokenizer: Any, trust: bool = False) -> Any:
    """A tokenizer that was given, or that of the place that was given. Raises: InputError where there is none."""
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    found, why = read_tokenizer(str(tokenizer), trust)
    if found is None:
        raise InputError(
            f"no tokenizer in {tokenizer}{f' ({why})' if why else ''}; give the folder of one, or a name on a hub"
        )
    return found


def facts_of(model: nn.Module) -> tuple[str, ...]:
    """One line on an open model: parameters, dtype, attention backend, devices."""
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    devices = sorted({str(p.device) for p in model.parameters()})
    backend = getattr(getattr(model, "config", None), "_attn_implementation", None)
    count = sum(p.numel() for p in model.parameters())
    parts = [
        f"{count:,} parameters",
        " and ".join(dtypes),
        *([f"{backend} attention"] if backend else []),
        "on " + ", ".join(devices),
    ]
    line = [", ".join(parts)]
    if dtypes == ["float64"] and not hasattr(model, "decoder"):
        line.append("float64 weights; transformers computes norms and rotary angles in float32 all the same")
    return tuple(line)


def kind_of(config: Any, where: str) -> Kind:
    """Which of the three kinds a configuration is of. Raises: InputError for another."""
    from transformers.models.auto import modeling_auto

    causal, masked = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    architecture = (getattr(config, "architectures", None) or [""])[0]
    model_type = getattr(config, "model_type", "")
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{where} is an encoder-decoder ({architecture or model_type}); a decoder or an encoder of text is needed"
        )
    if architecture.endswith(("ForMaskedLM", "ForPreTraining")) and model_type in masked:
        return "masked-lm"
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "decoder"
    if model_type in masked:
        return "encoder"
    if architecture.startswith("Thalweg"):
        return "masked-lm" if architecture.endswith("ForMaskedLM") else "encoder"
    if model_type in causal:
        return "decoder"
    raise InputError(
        f"{where} is no decoder and no encoder of text ({architecture or model_type}); allowed are models that transformers "
        "loads for causal or masked language modelling"
    )


def read_tokenizer(where: str, trust_remote_code: bool = False, **hub: Any) -> tuple[Any, str]:
    """The tokenizer of a place, or None and why."""
    from transformers import AutoTokenizer

    here = Path(where)
    if here.is_dir() and not any((here / name).exists() for name in TOKENIZER_FILES):
        return None, "no tokenizer beside the model"
    try:
        with hushed():
            return AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, **hub), ""
    except Exception as error:  # libraries of many kinds read tokenizers
        return None, f"the tokenizer cannot be read ({first_line(error)})"


def _dtype(given: str | torch.dtype) -> Any:
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, DTYPES)
    return name if name == "auto" else getattr(torch, name)


def _places() -> str:
    return (
        "give the folder of a model (config.json and safetensors), a GGUF file, a name on a hub, "
        f"or a model at hand ({', '.join(at_hand.MODELS)})"
    )


def _loader(kind: Kind, config: Any) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

    if kind == "encoder" and type(config) not in AutoModel._model_mapping:  # ours has no form without its head
        return AutoModelForSequenceClassification
    return {"decoder": AutoModelForCausalLM, "masked-lm": AutoModelForMaskedLM, "encoder": AutoModel}[kind]


def _place(name: str) -> "Path | OnHub":
    """The folder or the GGUF file, or the name on a hub."""
    if not name.strip():
        raise InputError(f"the model needs a name, got an empty one; {_places()}")
    if name in at_hand.MODELS:
        return at_hand.prepare(name)
    path = checked_path(name, expand=True)
    if not (is_path(name) or path.exists()):
        return look_up(name, _places(), next(iter(nearest(name, at_hand.MODELS, n=1, cutoff=0.6)), ""))
    if not path.exists():
        raise InputError(f"{name} does not exist; {_places()}")
    if path.is_file():
        if gguf.is_gguf(path):
            return path
        if path.suffix == ".safetensors":
            raise InputError(f"{name} is a file of weights; give the folder that holds it, with config.json")
        raise InputError(f"{name} is a file, and not GGUF (it does not begin with {gguf.MAGIC.decode()}); {_places()}")
    if RunFolder.is_run(path):
        raise InputError(
            f"{name} is the folder of a run; in Python open it by training.load_decoder, or give the folder of a model"
        )
    if not (path / "config.json").exists():
        raise CheckpointError(f"{name} has no config.json; {_instead(path)}")
    return path


def _instead(path: Path) -> str:
    files = sorted(path.glob("*.gguf"))
    if files:
        return f"give the GGUF file itself: {files[0]}"
    if (path / "adapter_config.json").exists():
        return "it is an adapter: merge it into its model and save that"
    return "give a folder that save_pretrained wrote"


def _config(where: str, trust_remote_code: bool, hub: dict[str, Any], packed: bool) -> Any:
    """The configuration, before any weight is read."""
    from transformers import AutoConfig
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if is_path(where):
        _check_json(Path(where) / "config.json")
    with readable(where):
        table, _ = PreTrainedConfig.get_config_dict(where, **hub)
    known = table.get("model_type")
    if known is None:
        raise CheckpointError(f"{where}: config.json names no model_type; give a folder that save_pretrained wrote")
    if known not in CONFIG_MAPPING and not trust_remote_code:
        if "auto_map" in table:
            raise InputError(
                f"{where} needs code that comes with it, which is not run; read that code, then allow it by trust_remote_code"
            )
        raise InputError(
            f"{where}: transformers does not know model_type {known!r}; it may need a newer version or code of its own"
        )
    quantised = table.get("quantization_config") or (table.get("text_config") or {}).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        if not packed:
            raise InputError(
                f"{where}: the weights are quantised ({method or 'method not stated'}) and are not unpacked here; "
                "give the model before quantisation, or a GGUF file of it"
            )
        check_reader(where, method)
    if is_path(where):
        check_counts(table, Path(where))
        check_sizes(table, Path(where), bool(quantised))
    with readable(where):
        return AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **hub)


def check_reader(where: str, method: str | None) -> None:
    """Whether the package is here that reads weights of a method of quantisation. Raises: InputError that names it."""
    if method not in READERS:
        raise InputError(
            f"{where}: the weights are quantised by {method or 'a method that is not stated'}; those of {', '.join(READERS)} can be read; "
            "give the model unpacked, or a GGUF file of it"
        )
    module, package = READERS[method]
    if find_spec(module) is None:
        raise InputError(
            f"{where}: the weights are quantised ({method}), which transformers reads by {package}, and {package} is not installed; "
            f"run: pip install {package}"
        )


def _check_json(path: Path) -> None:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({first_line(error)}); give a folder that save_pretrained wrote"
        ) from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} holds no table; give a folder that save_pretrained wrote")


def _check_files(folder: Path) -> None:
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        return
    if any(file.suffix in PICKLES for file in folder.iterdir()):
        raise InputError(
            f"{folder} has its weights as pickles only, which can run code when they are read; save them anew with "
            "save_pretrained (model.safetensors), where you trust them"
        )
    raise CheckpointError(f"{folder} has no weights (model.safetensors); give a folder that save_pretrained wrote")


def _fit(info: dict[str, Any], where: str) -> list[str]:
    missing = set(info.get("missing_keys") or ())
    spare = {
        key for key in info.get("unexpected_keys") or () if f".{EDITED}." not in key
    }  # attached, or refused before
    pooling = {key for key in missing if key.split(".")[0] == "pooler" or ".pooler." in key}
    check_fit({"missing_keys": missing - pooling, "mismatched_keys": info.get("mismatched_keys") or ()}, where)
    notes = (
        [f"weights for pooling are not in the file; they are random and not read ({few(pooling)})"] if pooling else []
    )
    return notes + ([f"{len(spare)} weights of the file have no place in the model ({few(spare)})"] if spare else [])
