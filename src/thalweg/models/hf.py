"""The Hugging Face shell round ``Decoder``: generate, save_pretrained, from_pretrained, the Auto classes."""

from typing import Any, cast, overload

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from thalweg.errors import InputError
from thalweg.models.cache import DecoderCache
from thalweg.models.decoder import Decoder
from thalweg.models.encoder import Encoder
from thalweg.models.hf_base import ThalwegPreTrainedModel
from thalweg.models.hf_config import ThalwegConfig
from thalweg.models.sharing import shared_parameters
from thalweg.models.transformer import Transformer


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


class ThalwegForCausalLM(ThalwegPreTrainedModel, GenerationMixin):
    """``Decoder`` as a Hugging Face model; ``.decoder`` is the model itself.

    Loading is strict: a checkpoint that lacks a parameter or brings another one raises CheckpointError.
    """

    base_model_prefix = "decoder"
    decoder: Decoder

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


@overload
def in_shell(model: Decoder, **settings: Any) -> ThalwegForCausalLM: ...
@overload
def in_shell(model: Transformer, **settings: Any) -> ThalwegPreTrainedModel: ...
def in_shell(model: Transformer, **settings: Any) -> ThalwegPreTrainedModel:
    """A decoder or encoder as a Hugging Face model, the model itself inside.

    settings: fields of Hugging Face (``pad_token_id`` and the like).
    """
    kind: type[ThalwegPreTrainedModel] = ThalwegForCausalLM
    if isinstance(model, Encoder):
        from thalweg.models.hf_encoder import shell_of

        kind = shell_of(model.config)
    config = cast(type[ThalwegConfig], kind.config_class).of(model.config, **settings)
    config.dtype = next(model.parameters()).dtype
    with torch.device("meta"):
        shell: ThalwegPreTrainedModel = cast(Any, kind)(config)
    setattr(shell, kind.base_model_prefix, model)
    shell._tied_weights_keys = shared_parameters(shell)
    return shell.eval()


AutoModelForCausalLM.register(ThalwegConfig, ThalwegForCausalLM, exist_ok=True)
