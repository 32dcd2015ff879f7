"""What a model becomes: equal under every connection that can start equal, a warm start that says so under the others, and able to learn."""

import copy
import json
from fnmatch import fnmatchcase

import pytest
import torch
from tiny_models import LENGTH, VOCAB, tiny
from transformers import AutoModelForCausalLM, GenerationConfig

from thalweg import connections, mixers
from thalweg.errors import CheckpointError, InputError, ProofError, UnknownNameError
from thalweg.models import Decoder, DecoderConfig, ThalwegForCausalLM
from thalweg.models.retained import count_updates, edit_state, edits_of
from thalweg.surgery import Conversion, Growth, convert, grow_heads, save
from thalweg.surgery.proof import Case, largest
from thalweg.surgery.target import RECIPES
from thalweg.training.optim import make_groups

EQUAL = {
    "additive": {},
    "layerscale": {},
    "denseformer": {},
    "hyper_connections": {},
    "mhc": {},
    "mgt": {},
    "orthogonal": {},
    "closed_delta": {},
}
WARM = {*connections.names(), *RECIPES} - set(EQUAL)
FORMS = {
    "layerscale": [{}],
    "hyper_connections": [{"streams": 3, "dynamic": False}, {"mixer": "identity"}],
    "mhc": [
        {"streams": 2},
        {"streams": 20},
        {"contraction": "head", "read_eps": 1e-6},
        {"read": "signed", "write": "signed"},
        {"read": "mean", "mixer": "uniform"},
        {"home_logit": -1.0},
    ],
    "mgt": [
        {"gate_open": False},
        {"gate_open": False, "gate_bias": 0.0},
        {"form": "soft_gate", "gate": "update"},
        {"form": "rank1", "gate": "input_independent", "gate_open": False},
        {"form": "delta", "beta_scale_learned": True},
        {"gate": "fixed_random", "alpha_per": "network"},
    ],
}


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_equal(name, kind):
    for dtype, tolerance in (("float32", 2e-5), ("float64", 1e-12)):
        model, proof = convert(tiny(kind), name, length=LENGTH, dtype=dtype)
        assert (proof.claim, proof.passed) == ("equal", True) and proof.difference < tolerance, dtype
        assert proof.kl < 1e-9 and proof.imported is None
    assert model.config.connection == RECIPES.get(name, (name,))[0]


@pytest.mark.parametrize(("name", "options"), [(name, options) for name in FORMS for options in FORMS[name]])
@pytest.mark.parametrize(
    "kind", ["llama", "gemma3"]
)  # without and with a norm on the update, which a gate is divided into
def test_every_form_that_can_start_equal_does(name, options, kind):
    proof = convert(tiny(kind), name, options=options, length=LENGTH, dtype="float64").proof
    assert proof.claim == "equal" and proof.difference < 1e-12


@pytest.mark.parametrize("name", mixers.names())
def test_every_mixer_whose_rows_sum_to_one_at_the_start(name):
    proof = convert(tiny("qwen3"), "mhc", mixer=name, length=LENGTH, dtype="float64").proof
    assert proof.claim == "equal" and proof.difference < 1e-12


@pytest.mark.parametrize("name", sorted(WARM))
def test_warm_starts_say_how_far_they_drifted(name):
    proof = convert(tiny("llama"), name, length=LENGTH).proof
    assert (proof.claim, proof.passed) == ("warm start", True)
    assert proof.imported is not None and proof.imported < 1e-5 < proof.difference
    assert 0 < proof.mean_difference <= proof.difference and proof.kl > 0 and proof.loss_after != proof.loss_before
    assert proof.lines()[0].startswith("warm start, not equal: largest difference of a logit")


def test_what_a_warm_start_leaves_out_is_noted():
    lost = convert(tiny("llama"), "post_norm", input_norm=False, length=LENGTH).proof
    assert any("6 parameters of norms have no place in post_norm" in note for note in lost.notes)
    added = convert(tiny("llama"), "sub_ln", length=LENGTH).proof
    assert any("norms inside the sublayers" in note for note in added.notes)
    dropout = convert(tiny("gpt2"), length=LENGTH).proof
    assert any("dropout" in note for note in dropout.notes)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mhc", {"streams": 1}),  # one sigmoid is never 1
        ("mhc", {"projection_std": 0.1}),
        ("mhc", {"mixer_options": {"eps": 1e-3}}),
        ("hyper_connections", {"contraction": "sum"}),
        ("mgt", {"preset": "paper"}),
        ("mgt", {"alpha": 0.1}),
        ("mgt", {"gate_spread": 1.0}),
        ("layerscale", {"init": 0.1}),
        ("mhc", {"input_norm": False}),
    ],
)
def test_options_that_cannot_start_equal_make_a_warm_start(name, options):
    assert convert(tiny("llama"), name, options=options, length=LENGTH).proof.claim == "warm start"


def test_reads_and_rows_sum_to_one():
    for dtype, bound in (("float32", 2.5e-7), ("float64", 2.3e-15)):
        decoder = convert(tiny("llama"), "mhc", length=LENGTH, dtype=dtype).model.decoder
        for site in decoder.stream.sites:
            read = torch.sigmoid(site.logits["read"].bias.double())
            assert read.sum().item() == pytest.approx(1, abs=bound) and int(read.argmax()) == site.home
            rows = site.mixer(site.logits["mix"].bias).double().sum(-1)
            assert (rows - 1).abs().max() < bound / 10
            declared = site.mixer.start().to(rows.dtype)
            assert (site.logits["mix"].bias.double() - declared).abs().max() < 1e-4


def test_a_third_party_connection_is_asked_what_it_claims():
    """The base class reads ``equals_at_start``; a claim that is not true does not pass."""
    stream = connections.create("denseformer", width=8, sites=connections.Site.decoder(2))
    assert stream.start_as_additive() == (1.0,) * 4
    assert connections.create("rezero", width=8, sites=connections.Site.decoder(2)).start_as_additive() is None


def test_a_start_that_is_not_equal_fails_its_proof(monkeypatch):
    cls = connections.registry["mhc"]
    monkeypatch.setattr(cls, "start_as_additive", lambda self: (1.01,) * len(self.layout))
    with pytest.raises(
        ProofError, match=r"in float32: the start of 'mhc' is not the function of the model; nothing was written"
    ):
        convert(tiny("llama"), "mhc", length=LENGTH)
    broken = Case("x", 1, float("nan"))
    assert not largest([0.0, broken.difference]) <= 1.0


# further training


@pytest.mark.parametrize("name", EQUAL)
def test_the_new_parameters_learn(name):
    model = convert(tiny("llama"), name, length=LENGTH).model
    decoder, before = model.decoder, {n: p.clone() for n, p in model.named_parameters()}
    groups = make_groups(decoder.named_parameters(), decoder.stream.group_hints())
    named = dict(decoder.named_parameters())
    optimiser = torch.optim.AdamW([{"params": [named[n] for n in group.names]} for group in groups], lr=1e-3)
    ids = torch.randint(VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < losses[0]
    frozen = decoder.stream.frozen()
    for key, parameter in model.named_parameters():
        inside = key.removeprefix("decoder.stream.")
        if not any(fnmatchcase(inside, pattern) for pattern in frozen):
            assert not torch.equal(parameter, before[key]), key


# saved and loaded


@pytest.mark.parametrize(
    ("kind", "name"), [("llama", "mhc"), ("gemma3", "mgt"), ("gpt2", "hyper_connections"), ("qwen2", "layerscale")]
)
def test_a_folder_loads_through_hugging_face(tmp_path, kind, name):
    made = convert(tiny(kind), name, length=LENGTH)
    folder = save(made, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is ThalwegForCausalLM and loaded.dtype == torch.float32
    ids = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded(ids).logits, made.model(ids).logits)
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id) == (1, 2)
    new = loaded.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    old = tiny(kind).generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(new, old)
    proof = json.loads((folder / "proof.json").read_text())
    assert proof["passed"] and proof["claim"] == "equal" and proof["connection"] == name and len(proof["cases"]) == 9
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "proof.json",
    ]


def test_how_a_model_generates_stays_with_it(tmp_path):
    """Catches: a chat model that runs past the end of its turn, or samples otherwise, once it is converted, changed and saved."""
    theirs = copy.deepcopy(tiny("llama"))
    theirs.generation_config = GenerationConfig(
        eos_token_id=[2, 7], do_sample=True, top_k=5, temperature=0.6, cache_implementation="static"
    )
    model, proof = convert(theirs, "mhc", length=LENGTH)
    folder = save(Conversion(grow_heads(model, {0: 2}).model, proof), tmp_path / "out")
    again = convert(folder, None, growth=Growth(heads=2), length=LENGTH).model
    for made in (model, AutoModelForCausalLM.from_pretrained(folder), again):
        kept = made.generation_config
        assert (kept.eos_token_id, kept.do_sample, kept.top_k, kept.temperature) == ([2, 7], True, 5, 0.6)
        assert kept.cache_implementation is None
        assert made.generate(torch.tensor([[1, 3]]), max_new_tokens=4).shape[1] <= 6
    assert theirs.generation_config.cache_implementation == "static"  # the source is as it was


def test_a_generation_config_that_cannot_be_saved_is_left_behind_and_named(tmp_path):
    theirs = copy.deepcopy(tiny("llama"))
    theirs.generation_config.temperature, theirs.generation_config.do_sample = 0.6, False
    made = convert(theirs, length=LENGTH)
    assert any("generation_config contradicts itself" in note for note in made.proof.notes)
    assert AutoModelForCausalLM.from_pretrained(save(made, tmp_path / "out")).generation_config.eos_token_id == 2


def test_a_folder_is_a_source_too(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "theirs")
    first = convert(tmp_path / "theirs", length=LENGTH)
    assert first.proof.source == str(tmp_path / "theirs") and first.proof.family == "llama"
    save(first, tmp_path / "ours")
    second = convert(tmp_path / "ours", "mhc", length=LENGTH).proof
    assert second.family == "thalweg" and second.passed and second.difference < 1e-5


def test_a_decoder_of_ours_is_a_source():
    decoder = Decoder(
        DecoderConfig(vocab_size=VOCAB, width=16, depth=2, heads=2), generator=torch.Generator().manual_seed(0)
    )
    before = {name: p.clone() for name, p in decoder.state_dict().items()}
    model, proof = convert(decoder, "mhc", length=LENGTH, dtype="float64")
    assert proof.passed and model.dtype == torch.float64
    assert all(torch.equal(value, before[name]) for name, value in decoder.state_dict().items())
    with pytest.raises(InputError, match="starts from the additive connection, got a model with 'mhc'"):
        convert(model, "mgt")


def test_nothing_is_left_where_writing_failed(tmp_path, monkeypatch):
    made = convert(tiny("llama"), length=LENGTH)
    full = OSError(28, "No space left on device")

    def no_room(folder):
        (folder / "config.json").write_text("{}")
        raise full

    monkeypatch.setattr(made.model, "save_pretrained", no_room)
    with pytest.raises(InputError, match=r"out cannot be written: .*No space left on device; nothing is left there"):
        save(made, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# wrong input


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"connection": "mhcc"}, UnknownNameError, "Did you mean 'mhc'"),
        ({"connection": "mhc", "options": {"streamz": 2}}, UnknownNameError, "mhc.streams"),
        ({"connection": "mhc", "norm": "layernorm"}, InputError, "norm come from the model"),
        ({"connection": "closed_delta", "form": "full"}, InputError, "form is what makes this recipe"),
        ({"dtype": "bfloat16"}, UnknownNameError, "float32, float64"),
        ({"length": 3}, InputError, f"rows must have 4 to {LENGTH} tokens"),
        ({"length": LENGTH + 1}, InputError, f"rows must have 4 to {LENGTH} tokens"),
        ({"text": "/nowhere.txt"}, InputError, "no such file: /nowhere.txt"),
        ({"tokens": torch.full((1, 8), VOCAB)}, InputError, f"token ids must lie in 0..{VOCAB - 1}"),
        ({"tokens": torch.zeros(1, 8, dtype=torch.long), "length": 8}, InputError, "leave text and length out"),
    ],
)
def test_wrong_input_is_one_line(arguments, error, says):
    with pytest.raises(error) as caught:
        convert(tiny("llama"), **arguments)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_places(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        convert(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty"):
        convert(tmp_path / "empty")
    short = tmp_path / "short.txt"
    short.write_text("It is a truth")
    with pytest.raises(InputError, match=r"short\.txt has 13 tokens, 96 are compared"):
        convert(tiny("llama"), text=short)
    with pytest.raises(InputError, match="is not an empty folder"):
        save(convert(tiny("llama"), length=LENGTH), tmp_path)


def test_tokens_of_the_callers_own_are_compared():
    tokens = torch.randint(VOCAB, (3, 10), generator=torch.Generator().manual_seed(5))
    proof = convert(tiny("llama"), tokens=tokens).proof
    assert proof.tokens == 30 and proof.cut_by == "the caller" and proof.passed


@pytest.mark.parametrize("name", ["additive", "mhc"])
def test_a_schedule_goes_on_where_it_was(name):
    sizes = {"vocab_size": VOCAB, "width": 16, "depth": 2, "heads": 2}
    decoder = Decoder(DecoderConfig(**sizes, attention_edit="value:full:1..0.2@20", mlp_edit="residual:learned"))
    count_updates(decoder, 15)
    with torch.no_grad():
        for edit in edits_of(decoder).values():
            for parameter in edit.parameters():
                parameter.fill_(-0.4)
    model, proof = convert(decoder.eval(), name, length=LENGTH)
    assert proof.passed
    kept = edit_state(decoder)
    assert kept and all(torch.equal(value, kept[key]) for key, value in edit_state(model.transformer).items())
