"""Where tokens stand and whom they see, by hand."""

import torch

from thalweg.models import DecoderCache, DecoderConfig
from thalweg.models.look import look

CONFIG = DecoderConfig(vocab_size=5, width=4, depth=1, heads=1, max_length=16)


def call(length, batch=1, mask=None, segments=None, cache=None):
    ids = torch.zeros(batch, length, dtype=torch.long)
    mask, segments = (None if value is None else torch.tensor(value) for value in (mask, segments))
    return look(CONFIG, torch.float32, ids, mask, None, segments, cache)


def rows(allowed):
    return ["".join(str(int(cell)) for cell in row) for row in allowed[0, 0]]


def test_without_anything_attention_is_plainly_causal():
    tokens, view = call(3, batch=2)
    assert view.allowed is None and tokens.mask is None and tokens.memory is None
    assert tokens.positions.tolist() == [[0, 1, 2]] * 2


def test_padding():
    tokens, view = call(4, batch=2, mask=[[0, 0, 1, 1], [1, 1, 1, 0]])
    assert tokens.positions.tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
    assert tokens.mask.tolist() == [[False, False, True, True], [True, True, True, False]]
    assert rows(view.allowed[:1]) == ["1000", "0100", "0010", "0011"]
    assert rows(view.allowed[1:]) == ["1000", "1100", "1110", "1111"]


def test_segments():
    tokens, view = call(5, segments=[[7, 7, 3, 3, 3]])
    assert tokens.positions.tolist() == [[0, 1, 0, 1, 2]]
    assert rows(view.allowed) == ["10000", "11000", "00100", "00110", "00111"]
    assert tokens.segments.tolist() == [[7, 7, 3, 3, 3]]


def test_a_cache_counts_on():
    cache = DecoderCache()
    call(3, mask=[[0, 1, 1]], cache=cache)
    tokens, view = call(2, cache=cache)
    assert tokens.positions.tolist() == [[2, 3]] and tokens.mask is None and tokens.memory is cache.memory
    assert rows(view.allowed) == ["01110", "01111"]
    tokens, view = call(1, mask=[[0, 1, 1, 1, 1, 1]], cache=cache)
    assert tokens.positions.tolist() == [[4]] and tokens.mask.tolist() == [[True]]
    assert rows(view.allowed) == ["011111"]
