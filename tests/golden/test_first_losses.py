"""Golden losses of one tiny run for each of four connections: a change that claims no numerical effect leaves them bitwise.

To renew them after a change that means to move numbers: THALWEG_GOLDEN=write python -m pytest tests/golden, and say so in the changelog.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from thalweg.models import Decoder, DecoderConfig

GOLDEN = Path(__file__).parent / "first_losses.json"
ARMS = {
    "additive": {},
    "post_norm": {},
    "delta": {"value_channels": 2, "compress": "channels"},
    "mgt": {"preset": "residual"},
}


def losses(connection: str, options: dict, steps: int = 5) -> list[float]:
    """Losses of the first steps of plain SGD in float64 on fixed random tokens, on one thread."""
    torch.set_num_threads(1)
    config = DecoderConfig(vocab_size=31, width=16, depth=2, heads=2, connection=connection, connection_options=options)
    model = Decoder(config, generator=torch.Generator().manual_seed(0)).double()
    ids = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(1))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02)
    found = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        found.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return found


@pytest.mark.parametrize("connection", ARMS)
def test_first_losses(connection):
    now = losses(connection, ARMS[connection])
    assert now[-1] < now[0]
    if os.environ.get("THALWEG_GOLDEN") == "write":
        table = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        GOLDEN.write_text(json.dumps({**table, connection: now}, indent=1, sort_keys=True) + "\n")
    golden = json.loads(GOLDEN.read_text())[connection]
    # float64 on another processor may differ in the last digits (other vector widths); more is a change of the mathematics
    assert now == pytest.approx(golden, rel=1e-12, abs=0)
