"""A network of one's own whose residual stream is a connection of Thalweg: token mixing by convolution, no attention.

Everything but the two branches comes from the connection: norms, gates, the start of its parameters. Run with other names to compare:
    python examples/wrap_your_own_branch.py additive mgt delta highway
"""

import sys

import torch
from torch import Tensor, nn

from thalweg import connections
from thalweg.connections import Site

WIDTH, DEPTH, LENGTH = 32, 4, 24


class CausalConvolution(nn.Module):
    """Mixes each token with the three before it: [b t d] -> [b t d]."""

    def __init__(self, width: int):
        super().__init__()
        self.convolution = nn.Conv1d(width, width, kernel_size=4, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.mT)[..., : x.shape[1]].mT


class Network(nn.Module):
    """Predicts the next symbol of a sequence: [b t] -> [b t v]."""

    def __init__(self, symbols: int, connection: str, **options):
        super().__init__()
        sites = Site.stack(DEPTH, kinds=("convolution", "mlp"))
        self.embedding = nn.Embedding(symbols, WIDTH)
        self.branches = nn.ModuleList(
            CausalConvolution(WIDTH) if site.kind == "convolution" else mlp() for site in sites
        )
        self.stream = connections.create(connection, width=WIDTH, sites=sites, **options)
        self.head = nn.Linear(WIDTH, symbols)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.stream(self.embedding(ids), self.branches))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def train(connection: str, steps: int = 60, symbols: int = 8) -> float:
    """Learn to continue periodic sequences; the last loss in nats per symbol."""
    torch.manual_seed(0)
    options = {"preset": "residual"} if connection == "mgt" else {}
    network = Network(symbols, connection, **options)
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        ids = torch.randint(symbols, (16, 3)).repeat(1, LENGTH // 3)
        loss = nn.functional.cross_entropy(network(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return loss.item()


if __name__ == "__main__":
    for name in sys.argv[1:] or ["additive", "mgt"]:
        print(f"{name:<12} {train(name):.3f} nats/symbol")
