"""A decoder in finer steps: bitwise itself at one, the flow at many, its own weights always."""

import pytest
import torch

from thalweg.errors import InputError
from thalweg.models import Decoder, DecoderConfig
from thalweg.models.integration import IntegratedDecoder

IDS = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))


def decoder(**more):
    config = DecoderConfig(vocab_size=61, width=32, depth=2, heads=4, **more)
    return Decoder(config, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"connection_options": {"update_norm": True}},
        {"connection_options": {"input_norm": False}},
        {"layers": ("moe",)},
    ],
)
def test_one_step_is_the_decoder_bit_by_bit(more):
    model = decoder(**more)
    mask = torch.ones_like(IDS)
    mask[0, 7:] = 0
    for call in ({}, {"attention_mask": mask}, {"labels": IDS}):
        got, wanted = IntegratedDecoder(model)(IDS, **call), model(IDS, **call)
        assert torch.equal(got.logits, wanted.logits)
        assert call.get("labels") is None or torch.equal(got.loss, wanted.loss)


def test_finer_steps_in_loops():
    model = decoder().double()
    x = model.embedding(IDS)
    seen = IntegratedDecoder(model, 3)(IDS).logits
    records = []
    from thalweg.models.look import look

    tokens, view = look(model.config, torch.float64, IDS, None, None, None, None)
    for layer in range(2):
        for _ in range(3):
            for kind in (0, 1):
                site = model.stream.sites[2 * layer + kind]
                x = x + model.sublayers[2 * layer + kind](site.input_norm(x), view) / 3
                records.append(x)
    wanted = model.head(model.stream.final_norm(x))
    assert torch.allclose(seen, wanted, atol=1e-12)
    assert len(records) == 12
    assert tokens is not None


@pytest.mark.parametrize(("scheme", "rate"), [("lie", 2), ("swapped", 2), ("together", 2), ("strang", 4)])
def test_steps_converge(scheme, rate):
    model = decoder(initial_std=0.2, embedding_std=1.0).double()  # near zero a norm bends too fast for these steps
    with torch.no_grad():
        limit = IntegratedDecoder(model, 64, "strang")(IDS).logits
        coarse, fine = ((IntegratedDecoder(model, n, scheme)(IDS).logits - limit).norm().item() for n in (8, 16))
    assert coarse / fine == pytest.approx(rate, rel=0.25)


def test_weights_are_shared_and_learn():
    model = decoder()
    integrated = IntegratedDecoder(model, 2, "strang")
    assert {id(p) for p in integrated.parameters()} == {id(p) for p in model.parameters()}
    integrated(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: IntegratedDecoder(decoder(connection="mhc")), "additive"),
        (lambda: IntegratedDecoder(decoder(), 0), "at least 1"),
        (lambda: IntegratedDecoder(decoder(), 1, "strong"), "strang"),
        (lambda: IntegratedDecoder(torch.nn.Linear(2, 2)), "Linear"),
        (lambda: IntegratedDecoder(decoder())(IDS + 100), "vocab"),
    ],
)
def test_bad_input_is_one_line(call, words):
    with pytest.raises(InputError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
