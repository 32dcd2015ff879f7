"""The table of epsilons in docs/continuum.md: defaults of the configurations of transformers, and what dtypes leave of them."""

import re
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from thalweg.models import DecoderConfig

DOCS = Path(__file__).parents[2] / "docs" / "continuum.md"
FAMILIES = {
    "Llama": ["llama"],
    "Mistral": ["mistral"],
    "Qwen 2 and 3": ["qwen2", "qwen3"],
    "Gemma 1 to 3": ["gemma", "gemma2", "gemma3_text"],
    "Granite": ["granite"],
    "SmolLM3": ["smollm3"],
    "DeepSeek-V3": ["deepseek_v3"],
    "Phi-3": ["phi3"],
    "OLMo 2": ["olmo2"],
    "Mixtral": ["mixtral"],
    "gpt-oss": ["gpt_oss"],
    "Falcon-H1": ["falcon_h1"],
    "GLM-4": ["glm4"],
}
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in DOCS.read_text(encoding="utf-8").splitlines()
    if re.match(r"\s*\| (Llama|Phi-3|GLM-4)", line)
]


def test_every_row_is_read():
    assert len(ROWS) == 3 and sum(len(names(row)) for row in ROWS) == len(FAMILIES) + 1


def names(row):
    """The families of a row; what comes after the semicolon is a file, which is measured, not configured."""
    return row[0].split(";")[0].strip().split(", ")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_defaults_are_those_of_the_configurations(row):
    for family in names(row):
        if family == "ours":
            assert DecoderConfig.__dataclass_fields__["norm_eps"].default == float(row[1])
            continue
        for kind in FAMILIES[family]:
            assert CONFIG_MAPPING[kind]().rms_norm_eps == float(row[1]), kind


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
@pytest.mark.parametrize(("column", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (4, torch.float16)])
def test_what_a_dtype_leaves_of_it(row, column, dtype):
    eps = torch.tensor(float(row[1]), dtype=torch.float64).to(dtype)
    power = next(2.0**k for k in range(-40, 40) if torch.tensor(2.0**k, dtype=dtype) + eps == 2.0**k)
    *stored, lost = re.findall(r"\d[\d.]*(?:e-?\d+)?", row[column])
    assert float(lost) == pytest.approx(power, rel=0.02)
    for said in stored:
        assert float(said) == pytest.approx(eps.item(), rel=1e-3)
    assert bool(stored) == (dtype != torch.float32)
