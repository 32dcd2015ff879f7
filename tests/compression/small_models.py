"""Fresh copies of tiny models, which a test may compress, and samples for them."""

import copy

import torch
from edit_subjects import tiny

from thalweg.models import Decoder, DecoderConfig

VOCAB = 61
SAMPLES = tuple(
    tuple(torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n + i)).tolist())
    for i, n in enumerate((14, 14, 9))
)


def fresh(kind: str = "llama", dtype: torch.dtype = torch.float32):
    """A copy that may be changed."""
    return copy.deepcopy(tiny(kind, "eager" if kind in ("gemma2", "gpt_oss") else "sdpa", dtype))


def ours(connection: str = "additive", **values) -> Decoder:
    """A decoder of ours with weights that are not small."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = {"vocab_size": VOCAB, "width": 24, "depth": 3, "heads": 4, "initial_std": 0.3, **values}
        return Decoder(DecoderConfig(connection=connection, **config)).eval()


@torch.no_grad()
def logits(model, ids) -> torch.Tensor:
    return model(torch.tensor(ids)).logits
