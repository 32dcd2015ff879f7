"""What every Hugging Face shell of ours does: building strictly, tied weights, saving and loading without foreign code."""

import dataclasses
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from transformers.modeling_utils import PreTrainedModel

from thalweg.capture import Located
from thalweg.capture.weights import check_fit
from thalweg.config import is_path
from thalweg.errors import CheckpointError, InputError, UnknownNameError, first_line
from thalweg.models.hf_config import ThalwegConfig
from thalweg.models.making import make
from thalweg.models.sharing import shared_parameters
from thalweg.models.transformer import Transformer

ALIGNMENT = 64  # bytes; what torch's own allocations keep


class ThalwegPreTrainedModel(PreTrainedModel):
    """A :class:`Transformer` as a Hugging Face model, under the name ``base_model_prefix``; subclasses say how it is called.

    Loading is strict: a checkpoint that lacks a parameter or brings another one raises CheckpointError.
    """

    config_class = ThalwegConfig
    config: ThalwegConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules: ClassVar[list[str]] = ["Decoder", "Encoder"]  # the sites of a block live in the stream

    def __init__(self, config: ThalwegConfig, **unknown: Any):
        if unknown:  # what from_pretrained was given beyond Hugging Face's own options
            raise UnknownNameError(
                "option of a model", min(unknown), [f.name for f in dataclasses.fields(config.described())]
            )
        super().__init__(config)
        if config._attn_implementation != "sdpa":
            raise InputError(f"attn_implementation must be 'sdpa' (or left out), got {config._attn_implementation!r}")
        setattr(self, self.base_model_prefix, self.build(config))
        self._tied_weights_keys = shared_parameters(self)
        self.post_init()

    def build(self, config: ThalwegConfig) -> Transformer:
        """The model inside."""
        return make(config.to_plain_config())

    @property
    def transformer(self) -> Transformer:
        """The model inside."""
        return getattr(self, self.base_model_prefix)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: the model inside has initialised itself, once and last."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Parameters registered under a second name -> the first name: the unembedding, and what a connection shares between sites."""
        return dict(self._tied_weights_keys)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.transformer.embedding

    def set_input_embeddings(self, value: torch.nn.Embedding) -> None:
        self.transformer.embedding = value

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.transformer.head

    def set_output_embeddings(self, new_embeddings: torch.nn.Linear) -> None:
        self.transformer.head = new_embeddings

    def locate_stream(self) -> Located:
        """Where the stream runs, for :func:`thalweg.capture.locate`."""
        from thalweg.models.capture import locate_transformer

        return locate_transformer(self, f"{self.base_model_prefix}.")

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's. Raises: InputError for a model with masked heads, whose masks no file would hold."""
        masked = [name for name, module in self.named_modules() if getattr(module, "head_mask", None) is not None]
        if masked:
            raise InputError(
                f"{masked[0]} has masked heads, which are not saved; take them away by surgery.prune_heads, or set their masks to 1"
            )
        return super().save_pretrained(*args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args: Any, **kwargs: Any):  # type: ignore[override]  # the same, strict
        """Load a saved model. Weights come from safetensors files only, and no code that lies beside them runs, whatever is trusted.

        Raises: CheckpointError for files that are missing or broken, and for parameters that are missing, unexpected or of another shape;
        InputError for a configuration that cannot be, and for options that this model does not have.
        """
        where, wanted = pretrained_model_name_or_path, kwargs.pop("output_loading_info", False)
        if kwargs.pop("use_safetensors", None) is False:
            raise InputError("use_safetensors must be true (or left out): weights are read from safetensors files only")
        kwargs |= {
            "use_safetensors": True,
            "ignore_mismatched_sizes": True,
        }  # mismatches are reported here, with the rest
        try:
            loaded: Any = super().from_pretrained(where, *args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise CheckpointError(
                f"{where}: the weights cannot be read ({first_line(error)}); the file is broken: save or copy it anew"
            ) from None
        except OSError as error:
            if not is_path(where):  # of a hub, which says more than we know
                raise
            raise CheckpointError(f"{where}: {first_line(error)}; give a folder that save_pretrained wrote") from None
        model, info = loaded
        check_fit(info, where)
        align(model)
        return (model, info) if wanted else model

    def load_custom_generate(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: CodeRefusedError; Hugging Face would run the ``custom_generate`` of a model folder here."""
        raise CodeRefusedError("thalweg runs no code from a model folder or a hub; leave custom_generate out")


class CodeRefusedError(InputError, OSError):
    """A model folder brings code of its own. An OSError too, which is how Hugging Face hears that there is none."""


def align(model: torch.nn.Module) -> None:
    """Move weights that a mapped file holds at odd addresses to where torch would put them.

    Kernels choose their order of summation by the address, so the saved and the loaded model would differ in the last bits.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
