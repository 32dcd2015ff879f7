"""Keys and values that are rounded or forgotten, against loops over tokens in float64; with and without a cache, padded or not."""

import pytest
import torch
from edit_subjects import padded, tiny, words
from small_models import ours

from thalweg import compression
from thalweg.capture.attention import attention_tap
from thalweg.errors import InputError
from thalweg.models import DecoderCache

CASES = {
    "by channel": {"bits": 2, "group": 2},
    "with a residual": {"bits": 3, "group": 2, "residual": 3, "symmetric": True},
    "the other axes": {"bits": 2, "group": 3, "keys": "token", "values": "channel"},
    "sinks and a window": {"window": 4, "sink": 2},
    "both": {"bits": 2, "group": 2, "window": 5, "sink": 1},
}


@torch.no_grad()
def run(model, ids, **more):
    return model(ids, **more).logits


def round_run(values, bits, symmetric):
    if symmetric:
        most = 2 ** (bits - 1) - 1
        scale = max(map(abs, values)) / most or 1.0
        return [scale * max(-most, min(most, round(v / scale))) for v in values]
    low, high, levels = min(*values, 0.0), max(*values, 0.0), 2**bits - 1
    scale = (high - low) / levels or 1.0
    zero = round(-low / scale)
    return [scale * (max(0, min(levels, round(v / scale) + zero)) - zero) for v in values]


def memory(x, axis, t, o):
    """Keys or values [tokens d] as query t reads them, in loops."""
    x = x[: t + 1].tolist()
    found, d = [list(row) for row in x], len(x[0])
    if o.get("bits") is None:
        return torch.tensor(found, dtype=torch.float64)
    group, residual, symmetric = o["group"], o.get("residual", 0), o.get("symmetric", False)
    for start in range(0, len(x) if axis == "channel" else 0, group):
        end = start + group - 1
        if end <= t - residual:  # full, and outside the residual
            for c in range(d):
                for i, v in enumerate(round_run([x[s][c] for s in range(start, end + 1)], o["bits"], symmetric)):
                    found[start + i][c] = v
    for s in range(len(x) if axis == "token" else 0):
        if s <= t - residual:
            found[s] = [v for c in range(0, d, group) for v in round_run(x[s][c : c + group], o["bits"], symmetric)]
    return torch.tensor(found, dtype=torch.float64)


def by_hand(q, k, v, scale, o):
    """Attention [h t dv] of queries [h t d] on keys and values [kv t d]."""
    heads, tokens, _ = q.shape
    rows = torch.zeros(heads, tokens, v.shape[-1], dtype=torch.float64)
    for h in range(heads):
        kv = h // (heads // k.shape[0])
        for t in range(tokens):
            keys, values = (
                memory(x[kv], o.get(name, default), t, o)
                for x, name, default in ((k, "keys", "channel"), (v, "values", "token"))
            )
            seen = [s for s in range(t + 1) if o.get("window") is None or s < o.get("sink", 4) or t - s < o["window"]]
            weights = torch.softmax(scale * keys[seen] @ q[h, t], 0)
            rows[h, t] = weights @ values[seen]
    return rows


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["llama", "ours"])
def test_attention_is_its_equation(kind, case):
    model = ours(kv_heads=2).double() if kind == "ours" else tiny("llama", dtype=torch.float64)
    ids, o, seen, after = words(1, 9), CASES[case], [], []
    with attention_tap(model, lambda call: seen.append((call.query[0], call.key[0], call.value[0]))):
        run(model, ids)
    with (
        compression.compress_cache(model, layers="first", **o),
        attention_tap(model, lambda call: after.append(call.output[0])),
    ):
        run(model, ids)
    q, k, v = (x.detach() for x in seen[0])
    scale = q.shape[-1] ** -0.5
    expected = by_hand(q, k, v, scale, o).transpose(0, 1)
    torch.testing.assert_close(after[0].detach(), expected, rtol=1e-9, atol=1e-9)
    plain = by_hand(q, k, v, scale, {}).transpose(0, 1)
    assert not torch.allclose(expected, plain, atol=1e-4)
    others = (
        [{**o, "residual": o.get("residual", 0) + 1}, {**o, "group": 6}, {**o, "keys": "token", "values": "token"}]
        if "bits" in o
        else []
    )
    others += [{**o, "window": o["window"] + 1}, {**o, "sink": o["sink"] - 1}] if "window" in o else []
    for other in others:  # mutants: residual off by one, other groups, other axes, window or sinks off by one
        if other.get("keys") != o.get("keys") or "keys" not in other:
            assert not torch.allclose(by_hand(q, k, v, scale, other).transpose(0, 1), expected, atol=1e-6), other


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_cache_and_padding_change_nothing(case, backend):
    dtype = (
        torch.float64 if backend == "sdpa" else torch.float32
    )  # eager attention of transformers cannot pad in float64
    model, ids = tiny("llama", backend, dtype), words(2, 13)
    with compression.compress_cache(model, **CASES[case]):
        whole = run(model, ids)
        with torch.no_grad():
            first = model(ids[:, :7], use_cache=True)
            one = model(ids[:, 7:8], cache=first.past_key_values, use_cache=True)
            rest = model(ids[:, 8:], cache=one.past_key_values)
            left = model(**padded(ids, "left")).logits[:, 3:]
        short = run(model, ids[:, :6])
    torch.testing.assert_close(torch.cat([first.logits, one.logits, rest.logits], 1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(left, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(short, whole[:, :6], rtol=1e-5, atol=1e-5)  # nothing is read of what comes after


def test_a_cache_of_ours():
    model, ids = ours(kv_heads=2), words(2, 13)
    with compression.compress_cache(model, bits=2, group=2, residual=2, window=6):
        whole, cache = run(model, ids), DecoderCache()
        parts = [run(model, ids[:, a:b], cache=cache) for a, b in ((0, 6), (6, 7), (7, 13))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def test_what_holds_everything_changes_nothing():
    model, ids = tiny("llama"), words(2, 9)
    before = run(model, ids)
    with compression.compress_cache(model, window=9, sink=0):
        torch.testing.assert_close(run(model, ids), before, rtol=1e-5, atol=1e-6)
    with compression.compress_cache(model, bits=2, group=2, residual=9):
        torch.testing.assert_close(run(model, ids), before, rtol=1e-5, atol=1e-6)
    assert torch.equal(run(model, ids), before)


def test_layers_that_are_not_chosen_keep_their_memory():
    model, ids, outputs = tiny("llama"), words(1, 9), {}
    for name, layers in (("none", None), ("last", "last")):
        found = outputs.setdefault(name, [])
        if layers is None:
            with attention_tap(model, lambda call, f=found: f.append(call.output.clone())):
                run(model, ids)
        else:
            with (
                compression.compress_cache(model, bits=2, group=2, layers=layers),
                attention_tap(model, lambda call, f=found: f.append(call.output.clone())),
            ):
                run(model, ids)
    assert [torch.equal(a, b) for a, b in zip(outputs["none"], outputs["last"], strict=True)] == [True, True, False]


def test_the_bytes_of_a_cache():
    with compression.compress_cache(tiny("llama"), bits=4, group=2, residual=3) as rounded:
        assert rounded.bits_per_number == 4 + (16 + 4) / 2
        assert rounded.bytes(10, 100) == 100 * (3 * 16 + 7 * 14) / 8
    with compression.compress_cache(tiny("llama"), window=5) as short:
        assert short.bytes(100, 8) == 8 * (4 + 5) * 2
        assert short.bytes(6, 8) == 8 * 6 * 2


WRONG = [
    ({}, "give bits"),
    ({"bits": 1}, "from 2 to 8"),
    ({"bits": 4, "keys": "head"}, "unknown value for keys"),
    ({"window": 0}, "from 1 on"),
    ({"bits": 4, "layers": [9]}, "layers are numbers from 0 to 2"),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_values_that_cannot_be(options, says):
    with pytest.raises(InputError, match=says), compression.compress_cache(tiny("llama"), **options):
        pass


def test_models_and_places_that_cannot_be():
    model = tiny("llama")
    with (
        compression.compress_cache(model, window=4),
        pytest.raises(InputError, match="compressed already"),
        compression.compress_cache(model, bits=4),
    ):
        pass
    with pytest.raises(InputError, match="an encoder keeps no cache"), compression.compress_cache(tiny("bert"), bits=4):
        pass
    with (
        pytest.raises(InputError, match="group 32 does not divide the 6 channels"),
        compression.compress_cache(model, bits=4),
    ):
        run(model, words())
    before = run(model, words())
    with pytest.raises(RuntimeError, match="stop"), compression.compress_cache(model, window=2, sink=0):
        raise RuntimeError("stop")
    assert torch.equal(run(model, words()), before)
