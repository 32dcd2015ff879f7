"""The configurations of the Hugging Face shells: the fields of ``DecoderConfig`` and ``EncoderConfig``, flat, under our names and theirs."""

import dataclasses
import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from transformers.configuration_utils import PreTrainedConfig

from thalweg.config import build, is_path, to_plain
from thalweg.errors import CheckpointError, InputError, UnknownNameError, first_line

if TYPE_CHECKING:  # registration must not load torch
    from thalweg.models.config import DecoderConfig
    from thalweg.models.encoder_config import EncoderConfig


LENGTH = (
    "max_position_embeddings"  # Hugging Face keeps ``max_length`` for generation; so ours is stored under this name
)


class ThalwegConfig(PreTrainedConfig):
    """``ThalwegConfig(vocab_size=..., width=..., depth=..., heads=..., connection=...)``: the fields of ``DecoderConfig`` and those of
    Hugging Face (``hidden_size`` and the like are other names for ours; ``max_length`` is kept as ``max_position_embeddings``).

    Raises: UnknownNameError, InputError, as ``DecoderConfig`` does.
    """

    model_type = "thalweg"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "ffn_width",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __post_init__(self, **kwargs: Any) -> None:
        described = self.described()
        names = [f.name for f in dataclasses.fields(described)]
        given = {
            ("max_length" if key == LENGTH else self.attribute_map.get(key, key)): value
            for key, value in kwargs.items()
        }
        own = {name: given.pop(name) for name in names if name in given}
        for key in given:  # Hugging Face keeps whatever it does not know; a slip in one of our names is an error
            if difflib.get_close_matches(key, names, n=1, cutoff=0.8):
                raise UnknownNameError("key", key, names)
        config = build(described, own, "config")
        for name in names:
            setattr(self, LENGTH if name == "max_length" else name, to_plain(getattr(config, name)))
        super().__post_init__(**given)

    @classmethod
    def described(cls) -> "type[DecoderConfig]":
        """The configuration that this one holds the fields of. Registers the model classes: by now every import of transformers has ended."""
        import thalweg.models.hf  # noqa: F401
        from thalweg.models.config import DecoderConfig

        return DecoderConfig

    def to_plain_config(self) -> "DecoderConfig":
        """The same as a ``DecoderConfig`` or ``EncoderConfig``, checked anew."""
        described = self.described()
        stored = {f.name: LENGTH if f.name == "max_length" else f.name for f in dataclasses.fields(described)}
        return build(
            described, {name: getattr(self, key) for name, key in stored.items() if hasattr(self, key)}, "config"
        )

    def to_decoder(self) -> "DecoderConfig":
        """The same as a ``DecoderConfig``, checked anew."""
        return self.to_plain_config()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """The table in ``config.json``. Raises: CheckpointError where it is missing or broken; InputError if it is of another kind of model."""
        where = pretrained_model_name_or_path
        try:
            table, rest = super().get_config_dict(where, **kwargs)
        except (OSError, TypeError) as error:
            if not is_path(where):  # of a hub, which says more than we know
                raise
            missing = not Path(where).exists()
            why = "there is no such folder" if missing else f"config.json cannot be read ({first_line(error)})"
            raise CheckpointError(f"{where}: {why}; give a folder that save_pretrained wrote") from None
        if not isinstance(table, dict) or not table:
            found = "config.json holds no table" if table else "there is no config.json"
            raise CheckpointError(f"{where}: {found}; give a folder that save_pretrained wrote")
        if table.get("model_type") != cls.model_type:
            raise InputError(
                f"{where}: config.json must say model_type {cls.model_type!r}, got {table.get('model_type')!r}; "
                "load other models by the Auto class that fits them"
            )
        return table, {"name_or_path": str(where), **rest}

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """From the table in ``config.json``. Raises: InputError that names the file, if its place is known."""
        where = kwargs.get("name_or_path")
        try:
            return super().from_dict(config_dict, **kwargs)
        except InputError as error:
            if not where:
                raise
            raise InputError(f"{where}: config.json: {error}") from None

    @classmethod
    def of(cls, config: "DecoderConfig", **hugging_face: Any) -> "ThalwegConfig":
        """From a ``DecoderConfig`` and any fields of Hugging Face (``pad_token_id`` and the like)."""
        return cls(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)}, **hugging_face)


class ThalwegEncoderConfig(ThalwegConfig):
    """The same of an encoder: the fields of ``EncoderConfig``; ``num_labels`` is another name of ``classes``.

    Raises: UnknownNameError, InputError, as ``EncoderConfig`` does.
    """

    model_type = "thalweg-encoder"

    @classmethod
    def described(cls) -> "type[EncoderConfig]":
        import thalweg.models.hf_encoder  # noqa: F401
        from thalweg.models.encoder_config import EncoderConfig

        return EncoderConfig

    def __post_init__(self, **kwargs: Any) -> None:
        labels = kwargs.pop("num_labels", None)
        classes = kwargs.setdefault("classes", labels) if labels is not None else kwargs.get("classes")
        if labels not in (None, classes):
            raise InputError(f"classes and num_labels are two names of one number, got {classes} and {labels}")
        super().__post_init__(**kwargs)
        if classes is not None and self.num_labels != classes:
            self.num_labels = classes  # names them LABEL_0, LABEL_1, ... unless id2label did

    def to_encoder(self) -> "EncoderConfig":
        """The same as an ``EncoderConfig``, checked anew."""
        return cast("EncoderConfig", self.to_plain_config())
