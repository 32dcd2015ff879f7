"""What an edit of updates costs in a training step: time and memory against the same decoder without it, side by side.

python benchmarks/measure_edit_cost.py --threads 1 --width 768 --layers 2 --rows 4 --length 256 --rounds 9
"""

import argparse
import statistics
import time
from importlib import metadata

import torch

from thalweg.models import Decoder, DecoderConfig
from thalweg.models.activations import kept_activations
from thalweg.models.size import parameters

SETTINGS = {
    "value:full:0": {"attention_edit": "value:full:0"},
    "value:full:learned, per head": {"attention_edit": "value:full:learned,per=head"},
    "value:exclude-self:0": {"attention_edit": "value:exclude-self:0"},
    "attention residual:0": {"attention_edit": "residual:0"},
    "mlp residual:0": {"mlp_edit": "residual:0"},
    "both residual:0": {"attention_edit": "residual:0", "mlp_edit": "residual:0"},
    "connection orthogonal": {"connection": "orthogonal"},
}


def step_of(config, ids):
    """One update of AdamW on a new model, as a function."""
    model = Decoder(config, generator=torch.Generator().manual_seed(0)).to(ids.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def clock(device):
    """Seconds: processor time where that is what is used, which other processes disturb less; else of the wall."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kv-heads", type=int, default=None)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), metavar="SETTING")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    plain = DecoderConfig(
        vocab_size=args.vocabulary, width=args.width, depth=args.layers, heads=args.width // 64, kv_heads=args.kv_heads
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(args.vocabulary, (args.rows, args.length), generator=generator).to(device)
    configs = {"unedited": plain, **{name: plain.replace(**SETTINGS[name]) for name in args.only}}
    steps = {name: step_of(config, ids) for name, config in configs.items()}
    ratios = {name: [] for name in args.only}
    for turn in range(args.rounds + 2):
        seconds = {}
        # The order turns round from one round to the next, and the unedited step stands at both ends.
        order = ["unedited", *(args.only if turn % 2 else args.only[::-1]), "unedited"]
        for name in order:
            began = clock(device)
            steps[name]()
            seconds.setdefault(name, []).append(clock(device) - began)
        if turn > 1:  # the first rounds warm up
            base = statistics.mean(seconds["unedited"])
            for name in args.only:
                ratios[name].append(seconds[name][0] / base)

    where = f"{args.device}, {args.threads} thread(s)" if device.type == "cpu" else torch.cuda.get_device_name(device)
    print(
        f"width {args.width}, {args.layers} layers, vocabulary {args.vocabulary}, {args.rows} x {args.length} tokens, float32, {where}; "
        f"median of {args.rounds}; torch {metadata.version('torch')}"
    )
    print(f"{'setting':32}{'time':>9}{'quartiles':>20}{'memory':>10}{'activations':>13}")
    base = memory_of(plain, args)
    for name in args.only:
        low, middle, high = statistics.quantiles(ratios[name], n=4)
        whole, kept = (
            found / plain_one - 1 for found, plain_one in zip(memory_of(configs[name], args), base, strict=True)
        )
        print(f"{name:32}{middle - 1:>+9.1%}{f'{low - 1:+.1%} to {high - 1:+.1%}':>20}{whole:>+10.1%}{kept:>+13.1%}")


def memory_of(config, args):
    """Bytes that a training step holds at its peak (weights, gradients, AdamW and what autograd keeps), and the last of these alone."""
    kept = args.rows * kept_activations(config, args.length).full
    return 16 * sum(parameters(config).values()) + kept, kept


if __name__ == "__main__":
    main()
