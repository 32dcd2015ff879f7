"""Mixers through the compiler that users have, which makes C++ of them; the battery stops before that, to be quick."""

import pytest
import torch

from thalweg import mixers
from thalweg.testing.compare import require_same
from thalweg.testing.mixers.checks.numbers import UPSTREAM, large_logits, require_finite
from thalweg.testing.mixers.subjects import differentiate, logits_for


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # torch's own, as it loads the inductor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options"),
    [("sinkhorn", {}), ("sinkhorn", {"eps": 1e-6}), ("birkhoff_projection", {}), ("transport", {})],
)
def test_numbers_and_large_logits(name, options, dtype):
    """The same matrices and gradients as without it, and finite ones at logits of up to 1e4 under gradients of 1e4."""
    mixer = mixers.create(name, streams=4, **options)
    torch._dynamo.reset()
    graph = torch.compile(lambda logits: mixer(logits), fullgraph=True)
    large = large_logits(mixer, dtype)
    require_finite(differentiate(graph, mixer, large, scale=UPSTREAM), "at large logits, compiled")
    small = logits_for(mixer, len(large), dtype=dtype)
    got, want = differentiate(graph, mixer, small), differentiate(mixer, mixer, small)
    require_same(got, want, "eager", 1e-4 if dtype == torch.float32 else 1e-2, least=1e-3)
