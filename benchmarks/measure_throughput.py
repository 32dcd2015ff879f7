"""Measuring against a plain forward pass, and against other tools on the same statistics: the coefficient of every update along the stream.

python benchmarks/measure_throughput.py --threads 1 --rows 2 --length 512 --rounds 5
"""

import argparse
import importlib.util
import time
from importlib import metadata

import torch

from thalweg.capture import locate, watch
from thalweg.capture.opening import open_model
from thalweg.capture.statistics import Statistics, StatisticsOptions
from thalweg.capture.tables import Units
from thalweg.data.tasks.austen import HELD_OUT, novels

SETS = {
    "default": StatisticsOptions(),
    "with heads": StatisticsOptions(values=True),
    "with heads and A_tt": StatisticsOptions(values=True, own_weights=True),
    "rank of every state": StatisticsOptions(rank=True),
    "likeness of layers": StatisticsOptions(cka=True),
}


def coefficient(state, update):
    """Mean over tokens of <update, state> / |state|^2."""
    return ((update * state).sum(-1) / state.square().sum(-1)).mean()


def ours(model, ids, located, statistics):
    def run():
        with watch(located, statistics, bool(statistics.heads), statistics.options.own_weights):
            statistics.begin(torch.zeros(len(ids), dtype=torch.long))
            model(input_ids=ids)

    return run


def only_coefficient(model, ids, located):
    """Our watch with the one statistic that the peers take."""

    def run():
        found = []
        with watch(located, lambda event: found.append(coefficient(event.state, event.branch))):
            model(input_ids=ids)
        return torch.stack(found)

    return run


def transformer_lens(model, ids, name):
    """``run_with_cache`` keeps every activation, then the statistic is taken."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(name, dtype=torch.float32)
    layers = len(model.model.layers)

    def run():
        _, cache = bridge.run_with_cache(ids)
        found = []
        for i in range(layers):
            for state, update in (("hook_resid_pre", "hook_attn_out"), ("hook_resid_mid", "hook_mlp_out")):
                found.append(coefficient(cache[f"blocks.{i}.{state}"], cache[f"blocks.{i}.{update}"]))
        return torch.stack(found)

    return run


def nnsight(model, ids):
    """One trace; the statistic is taken inside it."""
    from nnsight import NNsight

    wrapped = NNsight(model)

    def run():
        found = []
        with wrapped.trace(input_ids=ids):
            for layer in wrapped.model.layers:
                state = layer.input
                update = layer.self_attn.output[0]
                found.append(coefficient(state, update).save())
                found.append(coefficient(state + update, layer.mlp.output).save())
        return torch.stack(found)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a model at hand, or the folder of a Llama (smollm2)")
    parser.add_argument("--folder", help="of the same model, for TransformerLens (the model's name, if it is a folder)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    opened = open_model(args.model)
    model, located = opened.model, locate(opened.model)
    tokens = opened.tokenizer(novels()[HELD_OUT][: 8 * args.rows * args.length], verbose=False)["input_ids"]
    ids = torch.tensor(tokens[: args.rows * args.length]).view(args.rows, args.length)

    jobs = {"plain forward pass": lambda: model(input_ids=ids)}
    for name, options in SETS.items():
        jobs[f"measure: {name}"] = ours(model, ids, located, Statistics(located, Units(1, "documents"), options))
    jobs["coefficient alone: thalweg"] = only_coefficient(model, ids, located)
    missing = []
    folder = args.folder or getattr(model.config, "name_or_path", "")
    for peer, package, make in (
        ("TransformerLens", "transformer_lens", lambda: transformer_lens(model, ids, folder)),
        ("nnsight", "nnsight", lambda: nnsight(model, ids)),
    ):
        if importlib.util.find_spec(package) is None:
            missing.append(peer)
            continue
        jobs[f"coefficient alone: {peer} {metadata.version(package)}"] = make()

    times = {name: [] for name in jobs}
    values = {}
    for turn in range(args.rounds + 1):
        for name, job in jobs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            values[name] = job()
            if turn:  # the first round warms up
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))

    versions = ", ".join(f"{p} {metadata.version(p)}" for p in ("torch", "transformers"))
    print(
        f"{opened.name}, float32, {args.rows} x {args.length} tokens, {args.threads} thread(s), best of {args.rounds}; {versions}"
    )
    print(f"{'':44}  wall [s]  throughput  by CPU time")
    plain = [min(column) for column in zip(*times["plain forward pass"], strict=True)]
    for name, found in times.items():
        wall, cpu = (min(column) for column in zip(*found, strict=True))
        print(f"{name:44}  {wall:8.3f}  {plain[0] / wall:10.2f}  {plain[1] / cpu:11.2f}")
    ours_alone = values["coefficient alone: thalweg"]
    for name, value in values.items():
        if name.startswith("coefficient alone") and not name.endswith("thalweg"):
            print(f"{name}: largest difference from ours {float((value - ours_alone).abs().max()):.1e}")
    for peer in missing:
        print(f"{peer}: MISSING, not installed here")


if __name__ == "__main__":
    main()
