"""Makes ``agreement`` importable for the tests beside it; lets code that insists on float32 run in float64."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def float64_throughout(monkeypatch):
    """Public code calls ``.float()`` (and DeepSeek's ``.bfloat16()``) on the way; here both keep float64, so that nothing is rounded."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    monkeypatch.setattr(torch, "float", torch.float64)
