"""The Hugging Face shell round ``Decoder``: generate, save_pretrained, from_pretrained, the Auto classes."""

import dataclasses
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from thalweg.capture import Located
from thalweg.capture.weights import check_fit
from thalweg.config import is_path
from thalweg.errors import CheckpointError, InputError, UnknownNameError, first_line
from thalweg.models.cache import DecoderCache
from thalweg.models.config import DecoderConfig
from thalweg.models.decoder import Decoder
from thalweg.models.hf_config import ThalwegConfig
from thalweg.models.sharing import shared_parameters

ALIGNMENT = 64  # bytes; what torch's own allocations keep


class ThalwegCache(DecoderCache, Cache):
    """A ``DecoderCache`` under the names that ``generate`` calls."""

    layers = ()  # Hugging Face keeps its layers here; ours are the slots

    def __init__(self) -> None:
        DecoderCache.__init__(self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # grows without end

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        self.drop_last(-tokens_to_remove)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def is_linear(self) -> list[bool]:
        return [False]

    @property
    def is_croppable(self) -> bool:
        return not self.memory.slots

    @property
    def is_initialized(self) -> bool:
        return self.length > 0

    def __len__(self) -> int:
        return len(self.slots)

    def __repr__(self) -> str:
        return f"ThalwegCache({self.length} tokens, {len(self.slots)} attention sites)"


class ThalwegForCausalLM(PreTrainedModel, GenerationMixin):
    """``Decoder`` as a Hugging Face model; ``.decoder`` is the model itself.

    Loading is strict: a checkpoint that lacks a parameter or brings another one raises CheckpointError.
    """

    config_class = ThalwegConfig
    config: ThalwegConfig
    base_model_prefix = "decoder"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules: ClassVar[list[str]] = ["Decoder"]  # the sites of a block live in the stream

    def __init__(self, config: ThalwegConfig, **unknown: Any):
        if unknown:  # what from_pretrained was given beyond Hugging Face's own options
            raise UnknownNameError(
                "option of a model", min(unknown), [f.name for f in dataclasses.fields(DecoderConfig)]
            )
        super().__init__(config)
        if config._attn_implementation != "sdpa":
            raise InputError(f"attn_implementation must be 'sdpa' (or left out), got {config._attn_implementation!r}")
        self.decoder = Decoder(config.to_decoder())
        self._tied_weights_keys = shared_parameters(self)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: ``Decoder`` has initialised itself, once and last."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Parameters registered under a second name -> the first name: the unembedding, and what a connection shares between sites."""
        return dict(self._tied_weights_keys)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.decoder.embedding

    def set_input_embeddings(self, value: torch.nn.Embedding) -> None:
        self.decoder.embedding = value

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.decoder.head

    def set_output_embeddings(self, new_embeddings: torch.nn.Linear) -> None:
        self.decoder.head = new_embeddings

    def locate_stream(self) -> Located:
        """Where the stream runs, for :func:`thalweg.capture.locate`."""
        from thalweg.models.capture import locate_decoder

        return locate_decoder(self, "decoder.")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DecoderCache | None = None,
        past_key_values: DecoderCache | None = None,
        labels: Tensor | None = None,
        segments: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """As ``Decoder.forward``. ``cache`` and ``past_key_values`` are two names of one argument; ``use_cache`` makes one if none is given.

        There is no ``**kwargs``: an argument that this model does not know is a TypeError, not ignored.
        """
        if output_attentions or output_hidden_states:
            raise InputError(
                "output_attentions and output_hidden_states are not available; give model.decoder(...) a StreamTrace"
            )
        if cache is not None and past_key_values is not None:
            raise InputError("cache and past_key_values are two names of one argument; give one of them")
        memory = cache if cache is not None else past_key_values
        if memory is not None and not isinstance(memory, DecoderCache):
            raise InputError(f"cache must be a ThalwegCache or DecoderCache, got {type(memory).__name__}")
        if memory is None and use_cache:
            memory = ThalwegCache()
        out = self.decoder(
            input_ids,
            labels=labels,
            attention_mask=attention_mask,
            position_ids=position_ids,
            segments=segments,
            cache=memory,
            logits_to_keep=logits_to_keep,
        )
        result = CausalLMOutputWithPast(loss=out.loss, logits=out.logits, cache=memory)  # type: ignore[arg-type]  # a Cache or None
        return result.to_tuple() if return_dict is False else result

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise InputError(
                f"cache_implementation must be 'dynamic' (or left out), got {generation_config.cache_implementation!r}"
            )
        if model_kwargs.get("cache") is None and generation_config.use_cache is not False:
            model_kwargs["cache"] = ThalwegCache()
        elif model_kwargs.get("cache") is not None:
            model_kwargs["cache"]._is_user_defined = True

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


def in_shell(decoder: Decoder, **settings: Any) -> ThalwegForCausalLM:
    """A decoder as a Hugging Face model, the decoder itself inside. settings: fields of Hugging Face (``pad_token_id`` and the like)."""
    config = ThalwegConfig.of(decoder.config, **settings)
    config.dtype = next(decoder.parameters()).dtype
    with torch.device("meta"):
        model = ThalwegForCausalLM(config)
    model.decoder = decoder
    model._tied_weights_keys = shared_parameters(model)
    return model.eval()


def align(model: torch.nn.Module) -> None:
    """Move weights that a mapped file holds at odd addresses to where torch would put them.

    Kernels choose their order of summation by the address, so the saved and the loaded model would differ in the last bits.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


AutoModelForCausalLM.register(ThalwegConfig, ThalwegForCausalLM, exist_ok=True)
