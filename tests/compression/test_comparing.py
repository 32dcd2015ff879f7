"""``compression.compare``: nothing where nothing changed, planted errors with their size, every mode against passes written out by hand."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from small_models import VOCAB, ours
from tiny_families import tiny

from thalweg.capture import locate, watch
from thalweg.compression import compare, compress, diagnose
from thalweg.compression.layer_numbers import correlations
from thalweg.compression.pairing import Read, Side
from thalweg.compression.record import CompressionRecord
from thalweg.editing import edit
from thalweg.errors import CaptureError

ALL = ("local", "isolated", "global")


def fresh(kind="llama", dtype=torch.float32):
    """A copy that may be changed."""
    return copy.deepcopy(tiny(kind, dtype))


def documents(*lengths, seed=2):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=g).tolist() for n in lengths]


TEXTS = documents(14, 14, 9)
ONE = documents(12)


def one(rows, measure, **where):
    found = list(rows.where(measure=measure, **where))
    assert len(found) == 1, (measure, where, len(found))
    return found[0]


def changed(model, scale=0.02, seed=5):
    """A copy with noise on all matrices."""
    made, g = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if p.ndim == 2 and "embed" not in name:
                p.add_(scale * torch.randn(p.shape, generator=g).to(p.dtype))
    return made


def errors_of(rows):
    return [
        r.value
        for r in rows
        if r.measure.startswith(("error.total", "error.along", "error.across.")) and "median" not in r.measure
    ]


@pytest.fixture(scope="module")
def noisy():
    """A pair in float64 and its rows in all modes, on one document."""
    base = fresh("llama", torch.float64)
    twin = changed(base)
    return base, twin, compare(base, twin, ONE, mode=ALL, length=12)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "gemma2", "olmo2", "qwen3_moe", "bert", "deepseek_v4"])
@pytest.mark.parametrize("low", [False, True])
def test_a_model_against_itself_has_no_error_to_the_last_bit(kind, low):
    """Float32, padded batch. Catches any other input than the dense one, and an update seen at another place in one of the passes."""
    base = fresh(kind)
    rows = compare(base, copy.deepcopy(base), TEXTS, mode=ALL, length=14, low_memory=low)
    found = errors_of(rows)
    assert found and set(found) == {0.0}
    assert all(row.value == 1 for row in rows.where(site="layers") if row.measure.startswith("error.cosine"))
    if kind != "bert":
        assert (
            one(rows, "kl").value == 0
            and one(rows, "loss.change").value == 0
            and one(rows, "top_token_agreement").value == 1
        )


@pytest.mark.parametrize(
    "connection", ["additive", "mhc", "hyper_connections", "attention_residuals", "post_norm", "delta"]
)
def test_our_decoders_in_every_mode(connection):
    """States of every kind are handed on: one stream, several, a history."""
    base = ours(connection)
    rows = compare(base, copy.deepcopy(base), TEXTS, mode=ALL, length=14, layer_kl=True)
    assert set(errors_of(rows)) == {0.0}
    assert {row.value for row in rows.where(measure="kl.layer")} == {0.0}
    other = compare(base, changed(base), TEXTS, mode=ALL, length=14)
    assert all(0 < row.value < 2 for row in other.where(measure="error.total.local", site="layers"))


def test_low_memory_changes_no_number():
    base = fresh("llama")
    twin = changed(base)
    some, other = (compare(base, twin, TEXTS, mode=ALL, length=14, low_memory=low) for low in (False, True))
    key = lambda row: (row.measure, row.site, row.branch, row.head or -1, row.model)  # noqa: E731
    for a, b in zip(sorted(some, key=key), sorted(other, key=key), strict=True):
        assert key(a) == key(b)
        assert a.value == b.value or (math.isnan(a.value) and math.isnan(b.value)), a.measure


def rotated(weight, size):
    """(1 + size S) W with S of quarter turns of neighbouring channels: x . S x = 0 and |S x| = |x|."""
    turned = torch.empty_like(weight)
    turned[0::2], turned[1::2] = -weight[1::2], weight[0::2]
    return weight + size * turned


@pytest.mark.parametrize(("kind", "size"), [("parallel", 0.1), ("parallel", -0.3), ("across", 0.2)])
def test_planted_errors_are_found_with_their_size(kind, size):
    """Catches: along and across mixed up, a projection on the stream, a norm that is not that of the dense update."""
    base = fresh("llama", torch.float64)
    twin = copy.deepcopy(base)
    with torch.no_grad():
        for layer in twin.model.layers:
            for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                matrix.copy_(matrix * (1 + size) if kind == "parallel" else rotated(matrix, size))
    rows = compare(base, twin, TEXTS, mode=("isolated",), length=14)
    signed, across = (size, 0.0) if kind == "parallel" else (0.0, size)
    for layer in range(2):
        for branch in ("attention", "feed_forward", "layer"):
            at = {"branch": branch, "layer": layer}
            assert one(rows, "error.signed.isolated", **at).value == pytest.approx(signed, abs=1e-12)
            assert one(rows, "error.along.isolated", **at).value == pytest.approx(abs(signed), abs=1e-12)
            assert one(rows, "error.across.isolated", **at).value == pytest.approx(across, abs=1e-12)
            assert one(rows, "error.total.isolated", **at).value == pytest.approx(abs(size), rel=1e-12)
            assert one(rows, "error.pooled.isolated", **at).value == pytest.approx(abs(size), rel=1e-12)
            assert one(rows, "error.sqnr.isolated", **at).value == pytest.approx(-20 * math.log10(abs(size)))
        value = one(rows, "error.total.isolated", branch="value", layer=layer, head=None)
        assert value.value == 0  # nothing changed before the output projection


class ByHand:
    """Updates of a tiny Llama by calling its blocks one after another: no hook of the package is used."""

    def __init__(self, model):
        self.model = model
        ids = torch.tensor(ONE)
        self.x = model.model.embed_tokens(ids)
        self.rope = model.model.rotary_emb(self.x, torch.arange(ids.shape[1])[None])

    def block(self, layer, x, middle=None):
        """What attention and feed-forward add, and the heads; ``middle``: what the feed-forward sublayer reads, else the running stream."""
        block, kept = self.model.model.layers[layer], []
        handle = block.self_attn.o_proj.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        attention = block.self_attn(block.input_layernorm(x), position_embeddings=self.rope, attention_mask=None)[0]
        handle.remove()
        middle = x + attention if middle is None else middle
        return attention, block.mlp(block.post_attention_layernorm(middle)), kept[0]

    @torch.no_grad()
    def all(self):
        """For every layer: its input, both updates, the heads."""
        x, found = self.x, []
        for layer in range(len(self.model.model.layers)):
            attention, forward, heads = self.block(layer, x)
            found.append((x, attention, forward, heads))
            x = x + attention + forward
        return found


def mean_total(dense, found):
    """Mean over tokens of |e| / |dense|, by loops."""
    ratios = []
    for d, c in zip(dense[0].tolist(), found[0].tolist(), strict=True):
        top = sum((a - b) ** 2 for a, b in zip(c, d, strict=True))
        ratios.append(math.sqrt(top / sum(b * b for b in d)))
    return sum(ratios) / len(ratios)


def mean_signed(reference, dense, found):
    """Mean over tokens of e . r / |r|^2, by loops."""
    values = []
    for r, d, c in zip(reference[0].tolist(), dense[0].tolist(), found[0].tolist(), strict=True):
        values.append(sum((a - b) * z for a, b, z in zip(c, d, r, strict=True)) / sum(z * z for z in r))
    return sum(values) / len(values)


@torch.no_grad()
def test_every_mode_is_what_blocks_called_by_hand_give(noisy):
    """Local, isolated and global against blocks called one by one; and each wrong way gives another number."""
    base, twin, rows = noisy
    dense, mine = ByHand(base), ByHand(twin)
    whole = mine.all()
    for layer, (x, attention, forward, heads) in enumerate(dense.all()):
        local = mine.block(layer, x)
        alone = mine.block(layer, x, middle=x + attention)
        at = {"layer": layer, "head": None}
        for mode, (a, f, h) in (("local", local), ("isolated", alone), ("global", whole[layer][1:])):
            wanted = {
                "attention": (attention, a),
                "feed_forward": (forward, f),
                "layer": (attention + forward, a + f),
                "value": (heads, h),
            }
            for branch, (d, c) in wanted.items():
                got = one(rows, f"error.total.{mode}", branch=branch, **at).value
                assert got == pytest.approx(mean_total(d, c), rel=1e-9), (mode, branch, layer)
                signed = one(rows, f"error.signed.{mode}", branch=branch, **at).value
                assert signed == pytest.approx(mean_signed(d, d, c), rel=1e-7, abs=1e-12)
        d, c = attention, local[0]
        got = one(rows, "error.total.local", branch="attention", **at).value
        signed = one(rows, "error.signed.local", branch="attention", **at).value
        layer_error = one(rows, "error.total.local", branch="layer", **at).value
        mutants = {
            "reference is the compressed update": (got, mean_total(c, d)),
            "projection on the stream": (signed, mean_signed(x, d, c)),
            "a layer without its attention": (layer_error, mean_total(forward, local[1])),
            "a change of the state taken for an update": (
                layer_error,
                mean_total(x + attention + forward, x + local[0] + local[1]),
            ),
        }
        if layer:  # before the first layer both models have one input
            mutants["local mode fed with the compressed input"] = (got, mean_total(d, whole[layer][1]))
        for what, (right, wrong) in mutants.items():
            assert abs(right - wrong) > 1e-3 * abs(right), what


def test_heads_are_split_in_value_space(noisy):
    base, twin, rows = noisy
    dense, mine = ByHand(base).all(), ByHand(twin).all()
    for layer in range(2):
        for head in range(4):
            d, c = (found[layer][3].detach().unflatten(-1, (4, -1))[:, :, head] for found in (dense, mine))
            got = one(rows, "error.total.global", layer=layer, head=head)
            assert got.value == pytest.approx(mean_total(d, c), rel=1e-9)
            assert got.branch == "value" and got.site == f"layers.{layer}.attention.value"


def test_norm_identity_null_and_intervals(noisy):
    _, _, rows = noisy
    for row in rows.where(measure="error.pooled.local", branch="attention", layer=1):
        assert row.n == 1 and row.low is None  # one document in one window: no interval
    for name in ("along", "across", "cosine", "signed"):
        row = one(rows, f"error.{name}.local", layer=1, branch="attention")
        assert row.null is not None and "same norm" in row.null_kind
    share = one(rows, "error.across_share.local", layer=1, branch="attention")
    assert share.null == math.sqrt(1 - 1 / 32) and "isotropic" in share.null_kind
    base = fresh("llama")
    many = compare(base, changed(base), documents(*[10] * 9), mode="local", length=10)
    row = one(many, "error.total.local", layer=0, branch="layer")
    assert row.n == 9 and "over 9 documents" in row.interval and row.low < row.value < row.high


def test_predictions_are_those_of_transformers(noisy):
    base, twin, rows = noisy
    ids = torch.tensor(ONE)
    with torch.no_grad():
        p, q = (F.log_softmax(m(ids).logits.double(), -1)[0] for m in (base, twin))
    assert one(rows, "kl").value == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-6)
    losses = [float(F.nll_loss(x[:-1], ids[0, 1:])) for x in (p, q)]
    assert one(rows, "loss.dense").value == pytest.approx(losses[0], rel=1e-6)
    assert one(rows, "loss.change").value == pytest.approx(losses[1] - losses[0], rel=1e-5)
    assert one(rows, "top_token_agreement").value == pytest.approx(
        float((p.argmax(-1) == q.argmax(-1)).double().mean())
    )


def test_layer_wise_kl_is_the_dense_network_with_one_output_replaced():
    """Against a hook on the block's output in a whole pass. Catches layers behind that are compressed too, and a replaced layer off by one."""
    base = fresh("llama")
    twin = changed(base)
    rows = compare(base, twin, ONE, mode="local", length=12, layer_kl=True)
    ids, dense = torch.tensor(ONE), ByHand(base)
    with torch.no_grad():
        clean = F.log_softmax(base(ids).logits, -1)[0]
        for layer, (x, *_) in enumerate(dense.all()):
            attention, forward, _ = ByHand(twin).block(layer, x)
            put = x + attention + forward
            handle = base.model.layers[layer].register_forward_hook(lambda *_, put=put: put)
            got = F.log_softmax(base(ids).logits, -1)[0]
            handle.remove()
            wanted = float((clean.exp() * (clean - got)).sum(-1).mean())
            assert one(rows, "kl.layer", layer=layer).value == pytest.approx(wanted, rel=2e-3)
    assert "forward" not in base.model.layers[0].__dict__


def test_dropped_layers_count_with_an_update_of_zero():
    base = fresh("llama")
    rows = compare(base, lambda copy: compress(copy, "layer_drop", drop="0"), ONE, mode=("local", "global"), length=12)
    for branch in ("attention", "feed_forward", "layer"):
        at = {"layer": 0, "branch": branch}
        assert one(rows, "error.total.local", **at).value == pytest.approx(1)
        assert one(rows, "error.signed.local", **at).value == pytest.approx(-1)
        assert one(rows, "error.total.local", layer=1, branch=branch).value == 0  # on the dense input nothing changed
        assert one(rows, "error.total.global", layer=1, branch=branch).value > 0.01
    kl = compare(base, lambda copy: compress(copy, "layer_drop", drop="0"), ONE, length=12, layer_kl=True)
    assert one(kl, "kl.layer", layer=0).value == pytest.approx(one(rows, "kl").value, rel=1e-3)
    assert one(kl, "kl.layer", layer=1).value == 0


def test_transforms_in_python():
    """A context manager on the model itself, a function that changes a copy, one that gives a context manager: all are one pair."""
    base = fresh("llama")
    before = {name: p.clone() for name, p in base.named_parameters()}

    def halve(model):
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.mul_(0.5)

    found = compare(base, halve, ONE, length=12)
    assert all(torch.equal(p, before[name]) for name, p in base.named_parameters())
    assert one(found, "error.signed.local", branch="attention", layer=1).value == pytest.approx(-0.5, abs=1e-6)
    options = {"site": "value", "parallel": 0.0}
    direct = compare(base, edit(base, **options), ONE, length=12)
    made = compare(base, lambda copy: edit(copy, **options), ONE, length=12)
    assert one(direct, "error.total.local", branch="value", layer=1, head=None).value > 0.01
    for a, b in zip(direct, made, strict=True):
        assert (a.measure, a.value) == (b.measure, b.value) or math.isnan(a.value)


def test_the_preset_paper_reads_the_last_token_of_each_document():
    base = fresh("llama", torch.float64)
    twin = changed(base)
    rows = diagnose(base, twin, documents(12, 9, 5), preset="paper", length=10)
    assert rows.options.modes == ("local",) and rows.plan.counted == 3 and rows.plan.windows == 3
    whole = []
    for ids in documents(12, 9, 5):
        kept: list[list[torch.Tensor]] = [[], []]
        for model, into in zip((base, twin), kept, strict=True):
            with watch(
                locate(model), lambda e, into=into: into.append(e.branch[0, -1]) if e.place.index == 0 else None
            ):
                model(torch.tensor([ids[:10]]))
        dense, found = kept[0][0], kept[1][0]  # of the first sublayer, whose inputs are the same
        whole.append(float((found - dense).norm() / dense.norm()))
    got = one(rows.rows, "error.total.local", branch="attention", layer=0)
    assert got.value == pytest.approx(sum(whole) / 3, rel=1e-9) and got.n == 3


def test_numbers_over_layers_are_those_of_scipy():
    base = ours("additive", depth=7)
    twin = changed(base, 0.05)
    rows = compare(base, twin, TEXTS, mode="local", length=14)
    by = {(r.measure, r.branch, r.layer): r.value for r in rows if r.layer is not None and r.head is None}
    layers = range(7)
    total, across = ([by[f"error.{n}.local", "attention", i] for i in layers] for n in ("total", "across"))
    row = one(rows, "agreement.spearman.across.local", branch="attention")
    assert row.value == pytest.approx(stats.spearmanr(total, across).statistic) and row.n == 7
    row = one(rows, "agreement.pearson.across.local", branch="attention")
    assert row.value == pytest.approx(stats.pearsonr(total, across).statistic) and row.low <= row.value <= row.high
    assert one(rows, "error.total.local", site="layers", branch="attention").value == pytest.approx(np.mean(total))
    weights = [by["error.weights", "layer", i] for i in layers]
    row = one(rows, "agreement.spearman.weights.local", branch="attention")
    assert row.value == pytest.approx(stats.spearmanr(total, weights).statistic)
    x, y = np.random.default_rng(0).normal(size=(2, 3, 9))
    got = correlations(x, y, ranks=True)
    assert got.tolist() == pytest.approx([stats.spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)])


def test_bytes_of_a_protected_layer_come_from_the_record():
    base = fresh("llama")
    found = diagnose(base, lambda copy: compress(copy, "round_to_nearest", bits=4, group="row"), ONE, length=12)
    record = found.compressed.record
    assert isinstance(record, CompressionRecord)
    saved = sum(math.prod(r.shape) * (16 - r.bits_per_weight) / 8 for r in record.linears if r.layer == 1)
    assert found.protected[1] == round(saved) and "16 bits" in found.bytes_rule
    assert one(found.rows, "protect.bytes", layer=1).value == round(saved)
    unknown = diagnose(base, changed(base), ONE, length=12)
    assert unknown.protected == {} and unknown.bytes_rule.startswith("unknown")


def test_the_plan_is_told_before_the_first_pass_and_keeps_what_it_says():
    base, plans = fresh("llama"), []
    compare(base, changed(base), TEXTS, length=14, batch_size=2, progress=lambda done, plan: plans.append((done, plan)))
    assert [done for done, _ in plans] == [0, 1, 2] and plans[0][1].seconds is None and plans[1][1].seconds > 0
    lines = " ".join(plans[0][1].lines)
    assert (
        "37 tokens of 3 documents" in lines
        and "MiB of weights at once" in lines
        and "local and global: 3 passes" in lines
    )


def test_a_model_that_does_not_repeat_itself_is_refused_in_local_mode():
    base = fresh("llama")
    state = {"calls": 0}

    def drift(module, args, output):
        state["calls"] += 1
        return output * (1 + 1e-3 * state["calls"])

    handle = base.model.layers[0].mlp.register_forward_hook(drift)
    with pytest.raises(
        CaptureError, match=r"gives other updates than before at layers\.0\.feed_forward.*use --mode global"
    ):
        compare(base, fresh("llama"), ONE, length=12)
    handle.remove()


def test_sides_are_opened_one_at_a_time_in_low_memory():
    base, twin, open_now, most = fresh("llama"), changed(fresh("llama")), [], []

    def side(name, model):
        def opens():
            open_now.append(name)
            most.append(tuple(open_now))
            made = copy.deepcopy(model)
            torch.nn.Module.register_forward_hook(made, lambda *_: None)
            import weakref

            weakref.finalize(made, open_now.remove, name)
            return Read(made)

        return Side(name, opens)

    rows = compare(side("base", base), side("twin", twin), ONE, length=12, low_memory=True)
    assert most == [("twin",), ("base",), ("twin",)]
    assert one(rows, "kl").value > 0
