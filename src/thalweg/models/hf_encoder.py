"""The Hugging Face shells round ``Encoder``: sequence classification and masked tokens, and their Auto classes."""

from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput

from thalweg.errors import InputError
from thalweg.models.encoder import Encoder, EncoderOutput
from thalweg.models.encoder_config import EncoderConfig
from thalweg.models.hf_base import ThalwegPreTrainedModel
from thalweg.models.hf_config import ThalwegEncoderConfig


class _EncoderShell(ThalwegPreTrainedModel):
    """What both shells share; ``.encoder`` is the model itself."""

    config_class = ThalwegEncoderConfig
    base_model_prefix = "encoder"
    encoder: Encoder
    objective: ClassVar[str]

    def __init__(self, config: ThalwegEncoderConfig, **unknown: Any):
        found = getattr(config, "objective", None)
        if found != self.objective:
            raise InputError(
                f"{type(self).__name__} is for objective {self.objective!r}, got a configuration with {found!r}; use the other class"
            )
        super().__init__(config, **unknown)

    def call(
        self,
        input_ids: Tensor,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **given: Any,
    ) -> EncoderOutput:
        """Run the encoder. Raises: InputError for what it does not show."""
        if output_attentions or output_hidden_states:
            raise InputError(
                "output_attentions and output_hidden_states are not available; give model.encoder(...) a StreamTrace"
            )
        return self.encoder(input_ids, **given)


class ThalwegForSequenceClassification(_EncoderShell):
    """An ``Encoder`` that classifies, as a Hugging Face model; ``.encoder`` is the model itself.

    Loading is strict: a checkpoint that lacks a parameter or brings another one raises CheckpointError.
    """

    objective = "classification"

    @property
    def num_labels(self) -> int:
        """How many classes, under the name that Hugging Face's own models have for it."""
        return self.encoder.head.out_features

    def get_output_embeddings(self) -> None:
        """None: the head gives classes, no tokens."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """As ``Encoder.forward``: labels [b] -> loss and logits [b c]. An argument that this model does not know is a TypeError."""
        out = self.call(
            input_ids,
            output_attentions,
            output_hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
        )
        result = SequenceClassifierOutput(loss=out.loss, logits=out.logits)  # type: ignore[arg-type]  # a tensor is one
        return result.to_tuple() if return_dict is False else result


class ThalwegForMaskedLM(_EncoderShell):
    """An ``Encoder`` that fills in masked tokens, as a Hugging Face model; ``.encoder`` is the model itself.

    Loading is strict: a checkpoint that lacks a parameter or brings another one raises CheckpointError.
    """

    objective = "masked"

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        segments: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """As ``Encoder.forward``: labels [b t], -100 where nothing was masked -> loss and logits [b t v]. An argument that this model does
        not know is a TypeError.
        """
        out = self.call(
            input_ids,
            output_attentions,
            output_hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            segments=segments,
        )
        result = MaskedLMOutput(loss=out.loss, logits=out.logits)  # type: ignore[arg-type]  # a tensor is one
        return result.to_tuple() if return_dict is False else result


def shell_of(config: EncoderConfig) -> type[_EncoderShell]:
    """The class for an encoder of this configuration."""
    return ThalwegForSequenceClassification if config.classifies else ThalwegForMaskedLM


AutoModelForSequenceClassification.register(ThalwegEncoderConfig, ThalwegForSequenceClassification, exist_ok=True)
AutoModelForMaskedLM.register(ThalwegEncoderConfig, ThalwegForMaskedLM, exist_ok=True)
