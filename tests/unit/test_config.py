"""Configuration, registry and the arguments of the protocol: what is wrong is said in one line."""

import pytest
import torch

from thalweg import config, connections, data, mixers, registry
from thalweg.config import cache_folder
from thalweg.connections import Site
from thalweg.errors import InputError, ThalwegWarning, UnknownNameError
from thalweg.models import Decoder, DecoderConfig


def test_assignments_are_toml_or_strings():
    assert config.parse_assignments(["a=1", "b = true", "c=paper", "d=[1, 2]", "e="]) == {
        "a": 1,
        "b": True,
        "c": "paper",
        "d": [1, 2],
        "e": "",
    }


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ("a", "NAME=VALUE"),
        ("=1", "NAME=VALUE"),
        ("a=1\nb=2", "one line"),
        ("a=1\r", "one line"),
        ("a=" + "[" * 5000, "nested too deeply"),
        ("a=" + "9" * 5000, "cannot be read"),
    ],
)
def test_assignments_that_are_none(pair, says):
    with pytest.raises(InputError, match=says):
        config.parse_assignments([pair])


def test_paths_that_no_file_has():
    for read in (config.read_toml, config.checked_path, cache_folder, lambda path: data.load(f"text:{path}")):
        with pytest.raises(InputError, match="NUL"):
            read("a\0b")
    for read in (cache_folder, lambda path: data.load(f"text:{path}")):
        with pytest.raises(InputError, match="unknown user"):
            read("~nosuchuser/x")
    assert "~" not in str(config.checked_path("~/x", expand=True))


def test_an_entry_point_that_exits_takes_only_itself_away(monkeypatch):
    class Exits:
        name, value = "braid", "braid.connection"

        def load(self):
            raise SystemExit(3)

    monkeypatch.setattr(registry, "entry_points", lambda group: [Exits()])
    found = registry.Registry("tracker", package="thalweg.data.tasks", group="any")
    says = r"'braid' .*cannot be loaded: 3; fix or uninstall"
    with pytest.warns(ThalwegWarning, match=says):
        names = found.names()
    assert "braid" not in names and found.names() == names  # said once
    with pytest.raises(InputError, match=says):
        found["braid"]


@pytest.mark.parametrize("name", ["MHC", "Mhc", "mHC"])
def test_the_case_of_letters_counts_but_hides_no_neighbour(name):
    with pytest.raises(UnknownNameError, match="Did you mean 'mhc'"):
        connections.registry[name]


def test_the_name_of_what_is_registered():
    class Derived(mixers.registry["sinkhorn"]):
        pass

    assert mixers.registry.name_of(mixers.registry["newton"]) == "birkhoff_projection"
    assert mixers.registry.name_of(Derived) == "sinkhorn"
    assert mixers.registry.name_of(int) is None


@pytest.mark.parametrize("width", [0, -1, 8.0, "8", True, None])
def test_a_width_that_is_none(width):
    with pytest.raises(InputError, match="width must be a whole number"):
        connections.create("additive", width=width, sites=Site.decoder(1))


@pytest.mark.parametrize("sites", [3, "ab", [1, 2], None, (site for site in Site.decoder(1))])
def test_sites_that_are_none(sites):
    with pytest.raises(InputError, match="sequence of Site"):
        connections.create("additive", width=8, sites=sites)


def test_layouts_that_are_none():
    for depth in ("a", 1.5, True, None):
        with pytest.raises(InputError, match="depth must be a whole number"):
            Site.decoder(depth)
    with pytest.raises(InputError, match="got the string 'mlp'"):
        Site.stack(2, "mlp")
    assert [site.kind for site in Site.stack(2, ["mlp"])] == ["mlp", "mlp"]


def test_calls_of_a_decoder_that_fit_no_use():
    model = Decoder(DecoderConfig(vocab_size=7, width=8, depth=1, heads=1), generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(3, 4, dtype=torch.long)
    with pytest.raises(InputError, match="at least 0"):
        model(ids, logits_to_keep=-1)
    with pytest.raises(InputError, match="a hole between real tokens in row 2"):
        model(ids, attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]]))
