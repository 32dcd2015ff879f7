"""The models at hand against independent readings: SmolLM2 against transformers' own GGUF loader and against the blocks in the file, MiniLM
against similarities that its publisher prints. Needs `make models`."""

import os
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from thalweg.capture import at_hand
from thalweg.capture.opening import open_model
from thalweg.capture.quiet import hushed

TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife."


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    """The cache of `make models`, not that of the tests."""
    outer = os.environ["THALWEG_TEST_OUTER_CACHE"]
    monkeypatch.setenv("THALWEG_CACHE", outer or str(Path.home() / ".cache" / "thalweg"))


@pytest.mark.models
def test_smollm2_is_what_transformers_reads_from_the_gguf():
    path = at_hand.find("smollm2")
    assert path is not None
    with hushed():
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    opened = open_model("smollm2")
    ours, wanted = opened.model.state_dict(), theirs.state_dict()
    assert ours.keys() == wanted.keys() and all(torch.equal(ours[name], wanted[name]) for name in wanted)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert opened.tokenizer(TEXT).input_ids == ids[0].tolist()
    with torch.no_grad():
        found, expected = opened.model(ids).logits, theirs(ids).logits
    assert (found - expected).abs().max() < 1e-4  # the same weights at other addresses: sums in another order


@pytest.mark.models
def test_smollm2_against_the_blocks_in_the_file_and_a_known_answer():
    opened, path = open_model("smollm2"), at_hand.find("smollm2")
    read = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for theirs, ours in (
        ("token_embd", "embed_tokens"),
        ("blk.17.ffn_down", "layers.17.mlp.down_proj"),
        ("blk.29.attn_v", "layers.29.self_attn.v_proj"),
    ):
        tensor = read[f"{theirs}.weight"]
        unpacked = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(opened.model.get_parameter(f"model.{ours}.weight"), unpacked)
    ids = opened.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert opened.tokenizer.decode(opened.model(ids).logits[0, -1].argmax()) == " Paris"
    assert sum(p.numel() for p in opened.model.parameters()) == 134_515_008


@pytest.mark.models
def test_minilm_gives_the_similarities_that_its_publisher_prints():
    """The quickstart of Sentence Transformers (sbert.net), mean pooling over real tokens."""
    opened = open_model("minilm")
    sentences = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    batch = opened.tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = opened.model(**batch).last_hidden_state
    real = batch["attention_mask"].unsqueeze(-1)
    pooled = torch.nn.functional.normalize((hidden * real).sum(1), dim=-1)
    expected = torch.tensor([[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]])
    assert torch.allclose(pooled @ pooled.T, expected, atol=6e-5)
