"""What people give in place of batches, layers and heads; an edit object that is entered again."""

import pytest
import torch
from edit_subjects import hooks, logits, tiny, words

from thalweg.editing import audit, edit, matched_noop
from thalweg.errors import InputError

IDS = words()


def test_token_ids_are_a_batch():
    """Fails with a raw TypeError where a batch is unpacked as a mapping without a look."""
    model = tiny("llama")
    by_name = audit(model, {"input_ids": IDS}, site="attention", parallel=0.0)
    for given in (IDS, [IDS], [{"input_ids": IDS}], iter([IDS])):
        assert [row.value for row in audit(model, given, site="attention", parallel=0.0)] == [
            row.value for row in by_name
        ]
    assert matched_noop(model, IDS).tokens == matched_noop(model, [IDS[:1], IDS[1:]]).tokens == IDS.numel()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (IDS.tolist(), r"a batch is token ids \[b t\] or arguments by name .*got list"),
        (7, "got int"),
        (None, "got NoneType"),
        ("It was", "got str"),
        ({"input_ids": IDS.tolist()}, "input_ids must be a tensor, got list"),
        (IDS[0], r"must be \[b t\] with at least one token, got \[9\]"),
        (IDS[None], r"got \[1, 2, 9\]"),
        (IDS[:, :0], r"got \[2, 0\]"),
        (IDS.float(), "whole numbers, got float32"),
        (IDS - 4 * IDS, "token ids of this model are 0 to 60, got -"),
        (IDS + 100, "token ids of this model are 0 to 60, got 1"),
    ],
)
@pytest.mark.parametrize("used", ["audit", "matched_noop", "calibration"])
def test_what_is_no_batch_is_one_line(used, given, line):
    model, before = tiny("llama"), hooks(tiny("llama"))
    if used == "calibration" and given is None:
        line = "is measured on text first"
    with pytest.raises(InputError, match=line) as caught:
        if used == "audit":
            audit(model, given, parallel=0.0)
        elif used == "matched_noop":
            matched_noop(model, given)
        else:
            with edit(model, site="mlp", coefficient="layer_mean", calibration=given):
                pass
    assert "\n" not in str(caught.value) and hooks(model) == before


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"layers": 1.5}, "layers are numbers from 0 to 2 .*got 1.5"),
        ({"layers": [0, 1.5]}, "got 1.5"),
        ({"layers": True}, "got True"),
        ({"heads": 3}, r"heads are a list of whole numbers from 0, got 3; write heads=\[0, 2\]"),
        ({"heads": {0}}, "heads are a list"),
    ],
)
def test_layers_and_heads_that_are_none(values, line):
    with pytest.raises(InputError, match=line), edit(tiny("llama"), parallel=0.0, **values):
        pass


@pytest.mark.parametrize("site", ["value", "mlp"])
def test_an_edit_is_entered_again_and_inside_itself(site):
    """Fails where the object is a generator that ran: the second entry is then an AttributeError, or leaves hooks behind."""
    model, before = tiny("llama"), hooks(tiny("llama"))
    plain, halved = logits(model, IDS), edit(model, site=site, parallel=0.5, perpendicular=0.5)
    with halved:
        once = logits(model, IDS)
        with halved as facts:
            twice = logits(model, IDS)
            assert facts.active
        torch.testing.assert_close(logits(model, IDS), once, rtol=0, atol=0)
    assert hooks(model) == before and torch.equal(logits(model, IDS), plain)
    with halved:
        torch.testing.assert_close(logits(model, IDS), once, rtol=0, atol=0)
    with edit(model, site=site, parallel=0.25, perpendicular=0.25):
        torch.testing.assert_close(logits(model, IDS), twice)
    assert hooks(model) == before and not torch.allclose(once, twice) and not torch.allclose(once, plain)


def test_calibration_that_can_be_read_once_serves_every_entry():
    model = tiny("llama")
    mean = edit(model, site="mlp", coefficient="layer_mean", calibration=iter([{"input_ids": words(seed=5)}]))
    with mean:
        first = logits(model, IDS)
    with mean:
        assert torch.equal(logits(model, IDS), first)


def test_an_edit_that_cannot_be_entered_can_be_left_alone():
    before, wrong = hooks(tiny("llama")), edit(tiny("llama"), layers=[9], parallel=0.0)
    for _ in range(2):
        with pytest.raises(InputError), wrong:
            pass
    assert hooks(tiny("llama")) == before
