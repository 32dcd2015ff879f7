"""Hidden units that grow: `thalweg.surgery.grow_width` beside gromo (TINY, GradMax) on one map, same data, weights, units and updates.

pip install gromo==0.1.0 --no-deps deprecated torchmetrics lightning-utilities
python benchmarks/compare_growth.py --seeds 5
"""

import argparse
import importlib.metadata
import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from thalweg import __version__
from thalweg.models import Encoder, EncoderConfig
from thalweg.surgery import carry_optimizer, grow_width

WIDTH, UNITS, START, ADDED = 16, 8, 2, 2  # of the map; of the teacher; of the student, and how many come at a time
RATE, SAMPLES = 1e-2, 1024
SCALES = [2.0**i for i in range(-8, 3)]  # among which TINY's step is searched, on the training data
GROMO = {  # options by which gromo's own docstring makes the published methods
    "TINY": {"use_covariance": True, "use_projection": True},
    "GradMax": {"use_covariance": False, "alpha_zero": True, "use_projection": False, "ignore_singular_values": True},
}


@dataclass
class Growth:
    """What one growth did: largest change of an output, change of the loss, squared gradient on the new weights."""

    drift: float
    loss: float
    gradient: float


@dataclass
class Found:
    growths: list[Growth] = field(default_factory=list)
    train: float = 0.0
    test: float = 0.0


def data(seed: int, samples: int = 2 * SAMPLES) -> tuple[Tensor, Tensor]:
    """Gaussian inputs [n d] and what a teacher of ``UNITS`` GELU units makes of them."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(samples, WIDTH, generator=generator)
    up, down = (torch.randn(*shape, generator=generator) for shape in ((UNITS, WIDTH), (WIDTH, UNITS)))
    return x, nn.functional.gelu(x @ up.T / WIDTH**0.5) @ down.T / UNITS**0.5


def loss_of(out: Tensor, wanted: Tensor) -> Tensor:
    return (out - wanted).square().sum(-1).mean()


def ours(x: Tensor, units: int, seed: int) -> Encoder:
    """An encoder that is nothing but one feed-forward sublayer: no residual, no norm, its embedding table the inputs, its head unread."""
    config = EncoderConfig(
        vocab_size=len(x), width=WIDTH, depth=1, heads=1, layers=("feed_forward",), feed_forward="gelu", ffn_width=units,
        connection="none", connection_options={"input_norm": False, "final_norm": False}, classes=2, bias=False,
    )  # fmt: skip
    model = Encoder(config, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        model.embedding.weight.copy_(x)
        for linear in (model.sublayers[0].up, model.sublayers[0].down):  # spread as the inputs ask
            linear.weight.mul_(linear.in_features**-0.5 / linear.weight.std())
    model.embedding.weight.requires_grad_(False)
    return model


def output(model: nn.Module, x: Tensor) -> Tensor:
    """The map [n d] -> [n d] of either library's model."""
    if isinstance(model, Encoder):
        known = torch.equal(x, model.embedding.weight[: len(x)])
        ids = torch.arange(len(x)) + (0 if known else len(model.embedding.weight) - len(x))
        return model(ids[:, None]).last_hidden_state[:, 0]
    return model(x)


def theirs(model: Encoder) -> nn.Module:
    """gromo's model with the weights of ours."""
    from gromo.containers.growing_mlp import GrowingMLP

    up, down = (linear.weight for linear in (model.sublayers[0].up, model.sublayers[0].down))
    made = GrowingMLP(
        in_features=WIDTH, out_features=WIDTH, hidden_size=len(up), number_hidden_layers=1, activation=nn.GELU(),
        use_bias=False, device=torch.device("cpu"),
    )  # fmt: skip
    with torch.no_grad():
        for layer, weight in zip(made.layers, (up, down), strict=True):
            layer.weight.copy_(weight)
    return made


def statistics_of(model: nn.Module, x: Tensor, wanted: Tensor, added: int, **options) -> None:
    """gromo's directions for ``added`` units, by the sum of the losses as it asks; they are computed and not applied yet."""
    model.init_computation()
    model.zero_grad()
    (loss_of(model(x), wanted) * len(x)).backward()
    model.update_computation()
    model.compute_optimal_updates(maximum_added_neurons=added, compute_delta=False, **options)
    model.reset_computation()
    model.select_best_update()


def grow_theirs(model: nn.Module, method: str, x: Tensor, wanted: Tensor, norm: float) -> nn.Module:
    """``ADDED`` units more. TINY steps as far as lowers the loss most; GradMax gives its new weights the norm that ours draws."""
    statistics_of(model, x, wanted, ADDED, **GROMO[method])
    layer = model.currently_updated_layer
    if method == "TINY":
        losses = {}
        for scale in SCALES:
            model.set_scaling_factor(scale)
            with torch.no_grad():
                losses[scale] = float(loss_of(model.extended_forward(x), wanted))
        model.set_scaling_factor(min(losses, key=losses.__getitem__))
    else:
        model.set_scaling_factor(norm / float(layer.extended_input_layer.weight.detach().norm()))
    model.apply_change(extension_size=ADDED)
    return model


def weights(model: nn.Module) -> list[nn.Parameter]:
    """The two maps [u d] and [d u]."""
    if isinstance(model, Encoder):
        return [model.sublayers[0].up.weight, model.sublayers[0].down.weight]
    return [layer.weight for layer in model.layers]


def gradient_on_new(model: nn.Module, x: Tensor, wanted: Tensor) -> float:
    """Squared norm of the gradient on the last ``ADDED`` units: by how much a unit step of descent on them lowers the loss at first order."""
    up, down = torch.autograd.grad(loss_of(output(model, x), wanted), weights(model))
    return float(up[-ADDED:].square().sum() + down[:, -ADDED:].square().sum())


def run(arm: str, seed: int, updates: int) -> Found:
    x, wanted = data(seed)
    (seen, held_out), (answers, others) = x.split(SAMPLES), wanted.split(SAMPLES)
    found, fixed = Found(), arm == "fixed"
    model: nn.Module = ours(x, UNITS if fixed else START, seed)
    if not fixed and not arm.startswith("thalweg"):
        model = theirs(model)
    optimizer = torch.optim.AdamW(weights(model), lr=RATE, weight_decay=0.0)
    stages = (UNITS - START) // ADDED + 1
    for stage in range(stages):
        for _ in range(updates):
            optimizer.zero_grad()
            loss_of(output(model, seen), answers).backward()
            optimizer.step()
        if stage == stages - 1 or fixed:
            continue
        with torch.no_grad():
            before = output(model, seen)
        units = START + (stage + 1) * ADDED
        generator = torch.Generator().manual_seed(100 * seed + stage)
        if arm.startswith("thalweg"):
            model, change = grow_width(model, ffn_width=units, generator=generator)
            if arm.endswith("carried"):
                carry_optimizer(optimizer, change)
        else:
            twin, _ = grow_width(ours(x, units - ADDED, seed), ffn_width=units, generator=generator)
            model = grow_theirs(model, arm, seen, answers, float(weights(twin)[0][-ADDED:].detach().norm()))
        if not arm.endswith("carried"):
            optimizer = torch.optim.AdamW(weights(model), lr=RATE, weight_decay=0.0)
        with torch.no_grad():
            after = output(model, seen)
        rise = float(loss_of(after, answers) - loss_of(before, answers))
        found.growths.append(Growth(float((after - before).abs().max()), rise, gradient_on_new(model, seen, answers)))
    with torch.no_grad():
        found.train = float(loss_of(output(model, seen), answers))
        found.test = float(loss_of(output(model, held_out), others))
    return found


ARMS = {
    "thalweg, optimiser carried": "thalweg carried",
    "thalweg, new optimiser": "thalweg new",
    "gromo TINY": "TINY",
    "gromo GradMax": "GradMax",
    f"{UNITS} units from the start": "fixed",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=200, help="of AdamW, before each growth and after the last")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        version = importlib.metadata.version("gromo")
    except importlib.metadata.PackageNotFoundError:
        version = None
    print(
        f"{WIDTH} -> units -> {WIDTH} by GELU, teacher of {UNITS} units, student {START} to {UNITS} by {ADDED}, {SAMPLES} samples, "
        f"{args.updates} full-batch updates a stage, {args.seeds} seeds, 1 thread, float32; thalweg {__version__}, torch {torch.__version__}, "
        f"gromo {version or 'not installed'}"
    )
    print(f"{'':28}{'drift':>10}{'loss at growth':>16}{'gradient^2':>12}{'train loss':>20}{'held-out loss':>20}")
    for name, arm in ARMS.items():
        if name.startswith("gromo") and version is None:
            print(f"{name:28}  missing: pip install gromo==0.1.0")
            continue
        found = [run(arm, seed, args.updates) for seed in range(args.seeds)]
        growths = [growth for one in found for growth in one.growths]
        cells = f"{'':>10}{'':>16}{'':>12}"
        if growths:
            mean = [statistics.fmean(getattr(g, n) for g in growths) for n in ("loss", "gradient")]
            cells = f"{max(g.drift for g in growths):10.2g}{mean[0]:+16.4f}{mean[1]:12.4f}"
        ends = [[getattr(one, n) for one in found] for n in ("train", "test")]
        spread = [f"{statistics.fmean(e):.4f} +- {statistics.stdev(e) if len(e) > 1 else 0:.4f}" for e in ends]
        print(f"{name:28}{cells}{spread[0]:>20}{spread[1]:>20}", flush=True)


if __name__ == "__main__":
    main()
