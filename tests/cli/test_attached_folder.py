"""The folder of a model with an edit of its own, on the command line: it is on, or the command says that it cannot be."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from thalweg import editing
from thalweg.capture.opening import open_model
from thalweg.cli import main
from thalweg.cli.opening import open_any
from thalweg.errors import InputError
from thalweg.surgery import convert

VOCAB = 61
SPECS = {"value": "value:full:0.3", "own": "value:exclude-self:0.3", "mlp": "residual:learned"}


@pytest.fixture(params=SPECS)
def folder(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
            )
        ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    model.save_pretrained("plain")
    attached = editing.attach(model, SPECS[request.param], site="mlp" if request.param == "mlp" else "value")
    with torch.no_grad():
        for parameter in attached.parameters():
            parameter.fill_(-0.7)
    model.save_pretrained("edited")
    return tmp_path, model


def ids():
    return torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))


def test_a_command_opens_it_with_its_edit(folder):
    opened = open_any("edited", quiet=True)
    plain = open_any("plain", quiet=True)
    with torch.no_grad():
        found, wanted, without = (m(ids()).logits for m in (opened.model, folder[1], plain.model))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert (found - without).abs().max() > 0.1
    assert "edits of its own are on" in opened.notes and "edits of its own are on" not in plain.notes
    assert not any("no place" in note for note in opened.notes)  # learned scales have one


def test_python_refuses_a_path_and_takes_the_model(folder):
    with pytest.raises(InputError, match=r"saved with an edit of its own.*attach_from and give the model"):
        open_model("edited")
    model = AutoModelForCausalLM.from_pretrained("edited").eval()
    editing.attach_from(model)
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits, folder[1](ids()).logits, rtol=0, atol=1e-5)


def test_a_conversion_is_refused(folder, capsys):
    says = "the model has an edit of its own"
    assert main(["convert", "edited", "--connection", "mhc", "-o", "made"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert says in line and not (folder[0] / "made").exists()
    with pytest.raises(InputError, match=says):
        convert(folder[1], "mhc", length=8)


def test_measuring_sees_it(folder):
    """Of tokens, not of a text: the folder has no tokenizer."""
    from thalweg.capture.measure import measure

    tokens = ids().tolist()
    edited = [row.value for row in measure(open_any("edited", quiet=True).model, tokens)]
    plain = [row.value for row in measure(open_any("plain", quiet=True).model, tokens)]
    kept = [row.value for row in measure(folder[1], tokens)]
    assert len(edited) == len(plain) and edited != plain
    assert edited == pytest.approx(kept, rel=1e-4, abs=1e-6, nan_ok=True)
