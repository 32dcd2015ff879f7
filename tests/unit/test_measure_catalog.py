"""The catalogue of measures and the public names of geometry."""

import json
import math
import subprocess
import sys

import pytest
import torch

import thalweg.geometry
from thalweg import config
from thalweg.errors import UnknownNameError
from thalweg.geometry import catalog


@pytest.mark.parametrize("name", catalog.names())
def test_every_entry_is_complete_and_leads_to_its_function(name):
    entry = catalog.entry(name)
    assert entry.name == name and entry.summary and entry.source and entry.takes and entry.null
    assert len(entry.summary) <= 120 and not entry.summary.endswith(".")
    assert entry.direction in ("higher", "lower", "neither")
    low, high = entry.range
    assert low is None or high is None or low < high
    function = entry.resolve()
    assert callable(function) and function.func.__doc__
    json.dumps(config.to_plain(entry), allow_nan=False)


STATES = [e.name for e in catalog.entries() if e.takes == "states [... tokens width]"]


def test_the_list_of_measures_of_states():
    assert {"effective_rank", "effective_rank.centred", "rankme", "token_cosine", "rms"} <= set(STATES)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("shape", [(2, 2), (3, 17, 6), (1, 5, 40)])
def test_measures_of_states_stay_in_their_range(name, shape):
    entry = catalog.entry(name)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) + 1
    value = entry.resolve()(x)
    assert value.dtype == torch.float64 and value.shape in (torch.Size(shape[:-2]), torch.Size())
    low, high = (
        math.copysign(math.inf, sign) if end is None else end for sign, end in zip((-1, 1), entry.range, strict=True)
    )
    assert ((value >= low - 1e-12) & (value <= high + 1e-12)).all()


def test_an_unknown_measure_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'effective_rank'"):
        catalog.entry("efective_rank")


def test_public_names_resolve_and_are_documented():
    for name in thalweg.geometry.__all__:
        assert getattr(thalweg.geometry, name).__doc__
    assert set(thalweg.geometry.__all__) <= set(dir(thalweg.geometry))
    with pytest.raises(AttributeError, match="no attribute 'effectiv_rank'"):
        thalweg.geometry.effectiv_rank


def test_importing_geometry_loads_no_torch():
    code = "import sys, thalweg.geometry, thalweg.geometry.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
