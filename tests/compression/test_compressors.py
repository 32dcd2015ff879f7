"""Every compressor against loops over its equation, in float64, and mutants of it, which the same loops must reject."""

import math

import pytest
import torch

from thalweg.cli.facts import verified
from thalweg.compression import compressors
from thalweg.compression.calibration import Inputs
from thalweg.compression.compressors.awq import Awq
from thalweg.compression.pruning import Structure, lowest
from thalweg.compression.rounding import rounded
from thalweg.errors import InputError, UnknownNameError

OUT, IN, TOKENS = 6, 16, 40


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def x():
    return drawn(TOKENS, IN, seed=1) * torch.exp(drawn(IN, seed=2))


@pytest.fixture(scope="module")
def inputs(x):
    found = Inputs(IN, x)
    for part in x.split(7):
        found.add(part.reshape(1, -1, IN))
    return found


WEIGHT = drawn(OUT, IN)


def made(name, weight=WEIGHT, inputs=None, **options):
    return compressors.create(name, **options).compress(["map"], [weight], inputs)[0]


# references: scalars and loops only


def round_one(values, bits, symmetric):
    if symmetric:
        most = 2 ** (bits - 1) - 1
        scale = max(abs(v) for v in values) / most or 1.0
        return [scale * max(-most, min(most, round(v / scale))) for v in values]
    levels, low, high = 2**bits - 1, min(*values, 0.0), max(*values, 0.0)
    scale = (high - low) / levels or 1.0
    zero = round(-low / scale)
    return [scale * (max(0, min(levels, round(v / scale) + zero)) - zero) for v in values]


def round_matrix(weight, bits, group, symmetric):
    if group == "tensor":
        flat = round_one(weight.flatten().tolist(), bits, symmetric)
        return torch.tensor(flat, dtype=torch.float64).reshape(weight.shape)
    rows = []
    for row in weight.tolist():
        size = len(row) if group == "row" else group
        rows.append([v for i in range(0, len(row), size) for v in round_one(row[i : i + size], bits, symmetric)])
    return torch.tensor(rows, dtype=torch.float64)


def prune_matrix(weight, score, sparsity):
    found = weight.clone()
    for i in range(weight.shape[0]):
        runs = [range(weight.shape[1])]
        count = None
        if isinstance(sparsity, str):
            count, m = map(int, sparsity.split(":"))
            runs = [range(j, j + m) for j in range(0, weight.shape[1], m)]
        for run in runs:
            gone = sorted(run, key=lambda j: (float(score[i][j]), j))
            for j in gone[: count if count is not None else int(len(run) * sparsity)]:
                found[i, j] = 0.0
    return found


def awq_matrices(weights, x, bits, group, symmetric, duo, grid):
    """Weights of the best point of the grid, and its number."""
    mean = [sum(abs(float(x[t][j])) for t in range(len(x))) / len(x) for j in range(IN)]
    importance = [0.0] * IN
    for weight in weights:
        for row in weight.tolist():
            for start in range(0, IN, group):
                part = [abs(v) for v in row[start : start + group]]
                for k, v in enumerate(part):
                    importance[start + k] += v / (max(part) + 1e-6)
    importance = [v / sum(len(w) for w in weights) for v in importance]
    points = (
        [(0.0, False)] + [(i / (grid - 2), True) for i in range(grid - 1)]
        if duo
        else [(i / (grid - 1), False) for i in range(grid)]
    )
    best = None
    for number, (rho, both) in enumerate(points):
        scale = [
            max(m**rho / (w ** (1 - rho) + 1e-4) if both else m**rho, 1e-4)
            for m, w in zip(mean, importance, strict=True)
        ]
        middle = math.sqrt(max(scale) * min(scale))
        s = torch.tensor([v / middle for v in scale], dtype=torch.float64)
        folded = [round_matrix(w * s, bits, group, symmetric) / s for w in weights]
        error = sum(float(((f - w) @ x.T).square().sum()) for f, w in zip(folded, weights, strict=True))
        if best is None or error < best[0] * (1 - 1e-12):
            best = (error, folded, number)
    return best


ROUNDINGS = [(4, 8, False), (3, "row", False), (8, 4, True), (2, "tensor", True), (5, "tensor", False), (2, 8, False)]


@pytest.mark.parametrize(("bits", "group", "symmetric"), ROUNDINGS)
def test_rounding_is_its_equation(bits, group, symmetric):
    weight = WEIGHT.clone()
    weight[0, :8], weight[1] = 0.0, weight[1].abs()  # a group of zeros, one on one side of zero
    found = made("round_to_nearest", weight, bits=bits, group=group, symmetric=symmetric)
    torch.testing.assert_close(found.weight, round_matrix(weight, bits, group, symmetric), rtol=1e-12, atol=1e-12)
    assert not found.weight[0, :8].any()
    size = {"row": IN, "tensor": OUT * IN}.get(group, group)
    assert found.bits == OUT * IN * (bits + (16 + (0 if symmetric else bits)) / size)


@pytest.mark.parametrize("group", [4, "row", "tensor"])
def test_a_group_has_no_more_levels_than_its_bits(group):
    found = made("round_to_nearest", bits=2, group=group).weight
    parts = found.reshape(1, -1) if group == "tensor" else found.reshape(-1, IN if group == "row" else group)
    assert max(len(set(row.tolist())) for row in parts) <= 4


def test_rounding_in_other_axes_or_groups_is_rejected():
    right = round_matrix(WEIGHT, 3, 8, False)
    mutants = {
        "groups along the outputs": rounded(WEIGHT.T.contiguous(), 3, 6, False).T,
        "one scale for a row": rounded(WEIGHT, 3, "row", False),
        "one scale for the matrix": rounded(WEIGHT, 3, "tensor", False),
        "zero in the middle": rounded(WEIGHT, 3, 8, True),
        "a bit more": rounded(WEIGHT, 4, 8, False),
        "not scaled back": WEIGHT.round(),
    }
    for name, wrong in mutants.items():
        assert not torch.allclose(wrong, right, atol=1e-6), name


@pytest.mark.parametrize("sparsity", [0.5, 0.3, "2:4", "4:8", "1:2"])
def test_wanda_is_its_equation(sparsity, x, inputs):
    score = [
        [abs(float(WEIGHT[i, j])) * math.sqrt(sum(float(v) ** 2 for v in x[:, j])) for j in range(IN)]
        for i in range(OUT)
    ]
    found = made("wanda", inputs=inputs, sparsity=sparsity)
    assert torch.equal(found.weight, prune_matrix(WEIGHT, score, sparsity))


@pytest.mark.parametrize("sparsity", [0.5, "2:4"])
def test_other_wandas_are_rejected(sparsity, x, inputs):
    norms = x.square().sum(0).sqrt()
    score, structure = WEIGHT.abs() * norms, Structure.of(sparsity)
    right = prune_matrix(WEIGHT, score, sparsity)
    transposed = Structure(0.5) if structure.m == 0 else Structure(1 / 2, 1, 2)  # six outputs are three runs of two
    mutants = {
        "without the inputs": lowest(WEIGHT.abs(), structure),
        "their mean size in place of the norm": lowest(WEIGHT.abs() * x.mean(0).abs(), structure),
        "their square": lowest(WEIGHT.abs() * norms**4, structure),
        "over the outputs": lowest(score.T.contiguous(), transposed).T,
        "the largest": lowest(-score, structure),
        "over the whole matrix": lowest(score.reshape(1, -1), Structure(0.5)).reshape(OUT, IN),
    }
    for name, gone in mutants.items():
        assert not torch.equal(WEIGHT.masked_fill(gone, 0.0), right), name


def test_of_equal_scores_the_first_go():
    ones = torch.ones(2, 8, dtype=torch.float64)
    assert made("magnitude", ones, sparsity="2:4").weight[0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert made("magnitude", ones, sparsity=0.5, within="row").weight[1].tolist() == [0] * 4 + [1] * 4


@pytest.mark.parametrize(("sparsity", "within"), [(0.4, "row"), (0.4, "matrix"), ("4:8", "matrix")])
def test_magnitude_is_its_equation(sparsity, within):
    found = made("magnitude", sparsity=sparsity, within=within).weight
    flat = within == "matrix" and not isinstance(sparsity, str)
    weight = WEIGHT.reshape(1, -1) if flat else WEIGHT
    assert torch.equal(found, prune_matrix(weight, weight.abs().tolist(), sparsity).reshape(OUT, IN))


def test_the_bits_of_what_is_pruned(inputs):
    numbers = OUT * IN
    assert made("wanda", inputs=inputs, sparsity=0.5).bits == numbers / 2 * 16 + numbers
    assert made("wanda", inputs=inputs, sparsity="2:4").bits == numbers / 2 * (16 + 2)
    assert made("wanda", inputs=inputs, sparsity="4:8").bits == numbers / 2 * (16 + 3)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "duo", "grid"),
    [(3, 8, False, True, 20), (4, 4, True, False, 5), (2, 8, False, False, 20)],
)
def test_awq_is_its_equation(bits, group, symmetric, duo, grid, x, inputs):
    weights = [WEIGHT, drawn(3, IN, seed=5)]
    error, expected, _ = awq_matrices(weights, x, bits, group, symmetric, duo, grid)
    compressor = compressors.create("awq", bits=bits, group=group, symmetric=symmetric, duo=duo, grid=grid)
    found = compressor.compress(["a", "b"], weights, inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.weight, other, rtol=1e-9, atol=1e-9)
    assert found[0].facts["error"] == pytest.approx(error, rel=1e-9)
    assert found[0].facts["error"] <= found[0].facts["error_before_scaling"]


def test_other_awqs_are_rejected(x, inputs):
    _, (right,), number = awq_matrices([WEIGHT], x, 3, 8, False, True, 20)
    assert number > 0  # scaling helps here, or nothing would be tested
    compressor = compressors.create("awq", bits=3, group=8)
    scale = compressor.search([WEIGHT], inputs).scale
    late = [s for *_, s in compressor.scales([WEIGHT], inputs.mean_absolute)][-1]
    alone = Awq.weight_means
    mutants = {
        "scale not divided back": rounded(WEIGHT * scale, 3, 8, False),
        "scale divided first": rounded(WEIGHT / scale, 3, 8, False) * scale,
        "no scale": rounded(WEIGHT, 3, 8, False),
        "the last of the grid": compressor.fold(WEIGHT, late),
        "scaled by the output": rounded(WEIGHT, 3, 8, False) * 1.01,
    }
    for name, wrong in mutants.items():
        assert not torch.allclose(wrong, right, atol=1e-6), name
    assert alone(compressor, [WEIGHT]).shape == (IN,)


def test_without_rounding_awq_is_the_identity():
    """As a function only the rounding changes it: W s s^-1 = W."""
    scale = torch.exp(drawn(IN, seed=9))
    torch.testing.assert_close(WEIGHT * scale / scale, WEIGHT)
    fine = compressors.create("awq", bits=8, group=4).fold(WEIGHT, scale)
    assert float((fine - WEIGHT).norm() / WEIGHT.norm()) < 5e-3


def test_the_products_of_the_inputs_are_the_error_of_the_outputs(x, inputs):
    change = drawn(OUT, IN, seed=4)
    by_hand = sum(sum(float(change[i, j] * x[t, j]) for j in range(IN)) ** 2 for i in range(OUT) for t in range(TOKENS))
    assert float(inputs.energy(change)) == pytest.approx(by_hand, rel=1e-10)
    assert inputs.tokens == TOKENS
    torch.testing.assert_close(inputs.mean_absolute, x.abs().mean(0))


@pytest.mark.parametrize("weighting", ["none", "absolute", "products"])
def test_low_rank_is_the_best_of_its_rank(weighting, x, inputs):
    """Against every step from it that keeps the rank: none leaves a smaller error of what the weighting counts."""
    rank = 3
    found = made("low_rank", inputs=inputs, rank=rank, weighting=weighting)
    assert torch.linalg.matrix_rank(found.weight, rtol=1e-8) == rank
    assert found.bits == 16 * rank * (OUT + IN)
    seen = {
        "none": torch.eye(IN, dtype=torch.float64),
        "absolute": torch.diag(x.abs().mean(0).sqrt()),
        "products": x.T,
    }[weighting]

    def error(weight):
        return float(((weight - WEIGHT) @ seen).square().sum())

    d = torch.linalg.svdvals(WEIGHT @ seen)
    assert error(found.weight) == pytest.approx(float(d[rank:].square().sum()), rel=1e-6)
    left = torch.linalg.qr(found.weight)[0][:, :rank]
    for seed in range(4):
        moved = left + 0.05 * drawn(OUT, rank, seed=seed)
        best = moved @ torch.linalg.lstsq((moved.T @ moved), moved.T @ WEIGHT).solution
        assert error(best) > error(found.weight) * (1 - 1e-9)
    other = {"none": "products", "absolute": "none", "products": "absolute"}[weighting]
    assert error(made("low_rank", inputs=inputs, rank=rank, weighting=other).weight) > error(found.weight) * 1.0001


def test_the_rank_of_a_ratio():
    compressor = compressors.create("low_rank", ratio=0.5)
    assert compressor.rank_of(100, 100) == 25
    assert compressor.rank_of(2, 2) == 1
    assert compressors.create("low_rank", ratio=1.0).rank_of(4, 400) == 3


def test_a_random_error_has_the_size_that_was_asked():
    compressor = compressors.create("random", size=0.1)
    first, again, other = (compressor.one(name, WEIGHT, None).weight - WEIGHT for name in ("a", "a", "b"))
    assert float(first.norm() / WEIGHT.norm()) == pytest.approx(0.1)
    assert torch.equal(first, again)
    assert abs(float((first * other).sum() / first.norm() / other.norm())) < 0.5
    assert not torch.equal(first, compressors.create("random", size=0.1, seed=1).one("a", WEIGHT, None).weight - WEIGHT)


WRONG = [
    ("round_to_nearest", {"bits": 9}, "from 2 to 8, got 9"),
    ("round_to_nearest", {"bits": 4.0}, "must be int"),
    ("round_to_nearest", {"group": "column"}, "'row' or 'tensor'"),
    ("round_to_nearest", {"group": 0}, "from 1 on"),
    ("wanda", {"sparsity": "4:4"}, "1 <= N < M"),
    ("wanda", {"sparsity": 1.0}, "below 1"),
    ("wanda", {"sparsity": "half"}, "N:M such as 2:4"),
    ("awq", {"grid": 1}, "from 3 on"),
    ("low_rank", {"rank": 2, "ratio": 0.5}, "one of them"),
    ("low_rank", {"ratio": 0.0}, "above 0"),
    ("low_rank", {"weighting": "product"}, "Did you mean 'products'"),
    ("random", {}, "one of size"),
    ("random", {"size": -1.0}, "at least 0"),
    ("layer_drop", {}, "one of drop"),
    ("layer_drop", {"count": 0}, "from 1 on"),
    ("magnitude", {"within": "rows"}, "Did you mean 'row'"),
]


@pytest.mark.parametrize(("name", "options", "says"), WRONG)
def test_values_that_cannot_be_are_one_line(name, options, says):
    with pytest.raises(InputError) as raised:
        compressors.create(name, **options)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unknown_names():
    with pytest.raises(UnknownNameError, match="Did you mean 'wanda'"):
        compressors.create("wnda")
    with pytest.raises(UnknownNameError, match=r"wanda\.sparsity"):
        compressors.create("wanda", sparsty=0.5)


def test_groups_that_do_not_divide_say_which_do():
    with pytest.raises(
        InputError,
        match="group 128 does not divide the 96 inputs of b; 8, 12, 16, 24, 48 divide those of all maps, or say 'row'",
    ):
        compressors.create("round_to_nearest").check({"b": (4, 96), "c": (4, 144)})
    with pytest.raises(InputError, match="needs a multiple of 4 inputs, b has 6"):
        compressors.create("wanda", sparsity="2:4").check({"b": (4, 6)})
    with pytest.raises(InputError, match="at most 4"):
        compressors.create("low_rank", rank=5).check({"b": (4, 96)})


@pytest.mark.parametrize("name", compressors.names())
def test_every_compressor_explains_itself(name):
    entry = compressors.registry.entry(name)
    facts = entry.value.facts
    assert all((facts.source, facts.equation, facts.words, facts.calibration, facts.bits, entry.summary, entry.source))
    from thalweg import config

    assert all(field.meaning for field in config.describe(entry.value.Options))
    assert facts.verified


def test_nothing_is_said_to_be_verified_by_default():
    facts = compressors.base.CompressorFacts(source="a", equation="b", words="c", calibration="none", bits="16")
    assert verified(facts) == "its author says nothing"
