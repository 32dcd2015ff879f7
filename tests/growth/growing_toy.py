"""A small attention network in float64 that can grow: the summed heads of every layer on a residual stream, a read-out, a regression loss."""

import torch
from torch import nn

from thalweg.growth import HeadFactors


class Head(nn.Module):
    def __init__(self, query, key, value, output):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Parameter(w.clone()) for w in (query, key, value, output))
        self.mask = 1.0

    def forward(self, x):
        scores = (x @ self.query) @ (x @ self.key).mT / self.query.shape[1] ** 0.5
        return self.mask * torch.softmax(scores, -1) @ (x @ self.value) @ self.output


class Toy(nn.Module):
    """x [b t d] -> y [b t o]. ``mean``: heads averaged, the defect that a controller must notice."""

    def __init__(self, x, width=4, layers=1, heads=1, mean=False, seed=0, dtype=torch.float64, probe=None):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        d = x.shape[-1]
        self.width, self.mean, self.g, self.dtype = width, mean, g, dtype
        self.blocks = nn.ModuleList(nn.ModuleDict() for _ in range(layers))
        self.next = [0] * layers
        for layer in range(layers):
            for _ in range(heads):
                self.insert(layer, self.draw(d, width), self.draw(d, width), self.draw(width, d) / 4)
        self.readout = nn.Parameter(self.draw(d, 2))
        self.x = x.to(dtype)
        self.target = torch.randn(*x.shape[:-1], 2, generator=g, dtype=dtype)
        self.to(dtype)

    def draw(self, rows, columns):
        return torch.randn(rows, columns, generator=self.g, dtype=self.dtype) / rows**0.5

    def insert(self, layer, query, key, output):
        name = self.next[layer]
        self.next[layer] += 1
        self.blocks[layer][str(name)] = Head(
            query.to(self.dtype), key.to(self.dtype), self.draw(len(query), self.width), output.to(self.dtype)
        )
        return name

    def states(self, x):
        for block in self.blocks:
            yield x
            updates = torch.stack([head(x) for head in block.values()])
            x = x + (updates.mean(0) if self.mean else updates.sum(0))
        yield x

    def forward(self, x):
        return list(self.states(x))[-1] @ self.readout

    def loss(self):
        return (self(self.x) - self.target).square().mean()

    # what the controller asks

    def layers(self):
        return len(self.blocks)

    def heads(self, layer):
        return [HeadFactors(int(name), h.query, h.key, h.mask) for name, h in self.blocks[layer].items()]

    def inputs(self, layer):
        with torch.no_grad():
            return list(self.states(self.x))[layer].flatten(0, 1)

    def outputs(self):
        with torch.no_grad():
            return self(self.x)

    def fit(self):
        with torch.no_grad():
            return self.loss().item()

    def parameters_count(self):
        return sum(p.numel() for p in self.parameters())

    def add_heads(self, layer, births):
        d = self.x.shape[-1]
        return [self.insert(layer, b.query, b.key, torch.zeros(self.width, d)) for b in births]

    def mask_head(self, layer, head, value):
        self.blocks[layer][str(head)].mask = value

    def prune_heads(self, layer, heads):
        for head in heads:
            del self.blocks[layer][str(head)]

    def add_layer(self):
        d = self.x.shape[-1]
        self.blocks.append(nn.ModuleDict())
        self.next.append(0)
        layer = len(self.blocks) - 1
        self.insert(layer, self.draw(d, self.width), self.draw(d, self.width), torch.zeros(self.width, d))
        return layer


def tokens(batch=8, time=16, width=12, seed=1, low=0.05, rank=None):
    """Tokens with a geometric spectrum from 1 to ``low``, turned; ``rank``: nothing beyond so many directions."""
    g = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, float(torch.tensor(low).log10()), width, dtype=torch.float64)
    if rank is not None:
        scale[rank:] = 0
    turn = torch.linalg.qr(torch.randn(width, width, generator=g, dtype=torch.float64))[0]
    return torch.randn(batch, time, width, generator=g, dtype=torch.float64) * scale @ turn.T
