"""The Hugging Face shells of encoders: Auto classes, strict loading, labels, what they refuse."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_encoders import CLASSES, VOCAB, config, encoder, ids
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from thalweg import capture
from thalweg.errors import CheckpointError, InputError, UnknownNameError
from thalweg.models import ThalwegEncoderConfig, ThalwegForMaskedLM, ThalwegForSequenceClassification
from thalweg.models.hf import in_shell

KINDS = {
    "classification": (ThalwegForSequenceClassification, AutoModelForSequenceClassification),
    "masked": (ThalwegForMaskedLM, AutoModelForMaskedLM),
}


def saved(tmp_path, objective="classification", **changes):
    shell = in_shell(encoder(objective=objective, **changes).float(), pad_token_id=0)
    shell.save_pretrained(tmp_path)
    return shell


@pytest.mark.parametrize("objective", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_saving_and_loading_is_bitwise(tmp_path, objective, tied):
    shell = saved(tmp_path, objective, tie_embeddings=tied)
    kind, auto = KINDS[objective]
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is kind and not info["missing_keys"] and not loaded.training
    assert AutoConfig.from_pretrained(tmp_path).to_encoder() == loaded.config.to_encoder() == shell.encoder.config
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 4:] = 0
    x = ids(2, 6)
    labels = torch.tensor([1, 2]) if objective == "classification" else x
    ours, theirs = (m(x, attention_mask=mask, labels=labels) for m in (shell, loaded))
    assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.loss, theirs.loss)
    assert ours.logits.shape == ((2, CLASSES) if objective == "classification" else (2, 6, VOCAB))
    assert torch.equal(loaded.encoder(x, attention_mask=mask).logits, theirs.logits)
    assert (loaded.encoder.head.weight is loaded.encoder.embedding.weight) is (tied and objective == "masked")
    as_tuple = loaded(x, attention_mask=mask, labels=labels, return_dict=False)
    assert torch.equal(as_tuple[0], theirs.loss) and torch.equal(as_tuple[1], theirs.logits)
    assert capture.prove(capture.locate(loaded), {"input_ids": x, "attention_mask": mask}).worst <= 1e-5


def test_classes_have_the_names_that_hugging_face_gives_them():
    named = ThalwegEncoderConfig(vocab_size=9, width=8, depth=1, heads=2, num_labels=4)
    assert named.classes == named.num_labels == 4 and named.id2label[3] == "LABEL_3"
    mine = ThalwegEncoderConfig(vocab_size=9, width=8, depth=1, heads=2, classes=2, id2label={0: "bad", 1: "good"})
    assert mine.id2label == {0: "bad", 1: "good"}
    with pytest.raises(InputError, match="two names of one number, got 3 and 4"):
        ThalwegEncoderConfig(vocab_size=9, width=8, depth=1, heads=2, classes=3, num_labels=4)
    with pytest.raises(UnknownNameError, match="pooling"):
        ThalwegEncoderConfig(vocab_size=9, width=8, depth=1, heads=2, classes=3, poolings="max")


@pytest.mark.parametrize("fault", ["lacks", "brings", "shape"])
def test_weights_that_do_not_fit_are_refused(tmp_path, fault):
    saved(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if fault == "lacks":
        del weights["encoder.head.bias"]
    elif fault == "brings":
        weights["encoder.pooler.weight"] = torch.zeros(2)
    else:
        weights["encoder.head.bias"] = torch.zeros(CLASSES + 1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"encoder\.(head|pooler)"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_the_wrong_class_is_one_line(tmp_path):
    saved(tmp_path)
    with pytest.raises(
        InputError, match="ThalwegForMaskedLM is for objective 'masked', got a configuration with 'classification'"
    ):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="model_type 'thalweg', got 'thalweg-encoder'"):
        from thalweg.models import ThalwegForCausalLM

        ThalwegForCausalLM.from_pretrained(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(table | {"pooling": "last"}))
    with pytest.raises(InputError, match=r"unknown value for config\.pooling"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_what_it_does_not_know_is_an_error():
    shell = in_shell(encoder())
    with pytest.raises(TypeError):
        shell(ids(1, 4), token_type_ids=torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(InputError, match=r"give model\.encoder"):
        shell(ids(1, 4), output_hidden_states=True)
    assert shell.get_input_embeddings() is shell.encoder.embedding and shell.get_output_embeddings() is None
    assert config().classes == shell.num_labels == CLASSES


@pytest.mark.parametrize("objective", KINDS)
def test_a_saved_folder_opens_and_is_measured_as_any_other_model(tmp_path, objective):
    from thalweg.capture.measure import measure
    from thalweg.capture.opening import open_model

    shell = saved(tmp_path, objective)
    opened = open_model(tmp_path)
    assert opened.kind == ("encoder" if objective == "classification" else "masked-lm")
    located = capture.locate(opened.model)
    assert not located.causal
    rows = measure(opened.model, [ids(1, 8, seed=i)[0].tolist() for i in range(8)], length=8)
    assert len(rows.where(measure="parallel_coefficient.raw")) == len(located.sites)
    x = ids(2, 6)
    assert torch.equal(opened.model(input_ids=x).logits, shell.eval()(input_ids=x).logits)
