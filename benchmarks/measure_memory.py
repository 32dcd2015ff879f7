"""Peak memory of a measurement against the length of the text: it must not grow with the tokens, only with the square of the width.

python benchmarks/measure_memory.py --layers 30 --widths 128,256 --tokens 4096,16384,65536
"""

import argparse
import subprocess
import sys

ONE = """
import resource, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
import thalweg
layers, width, tokens, measured = (int(x) for x in sys.argv[1:5])
torch.set_num_threads(1); torch.manual_seed(0)
config = LlamaConfig(vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None)
model = LlamaForCausalLM(config).eval()
texts = [torch.randint(512, (256,)).tolist() for _ in range(tokens // 256)]
if measured:
    thalweg.measure(model, texts, length=256, batch_size=4, values=True, rank=True)
else:
    with torch.no_grad():
        for i in range(0, len(texts), 4):
            model(torch.tensor(texts[i : i + 4]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def peak(*numbers: int) -> float:
    """MiB of a process that does one thing."""
    found = subprocess.run([sys.executable, "-c", ONE, *map(str, numbers)], capture_output=True, text=True, check=True)
    return float(found.stdout.split()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--widths", default="128,256")
    parser.add_argument("--tokens", default="4096,16384,65536")
    args = parser.parse_args()
    widths, tokens = ([int(x) for x in text.split(",")] for text in (args.widths, args.tokens))
    print(
        f"peak resident memory [MiB], {args.layers} layers, heads and the rank of every state measured, windows of 256, 4 at a time"
    )
    print(f"{'width':>6} {'tokens':>8} {'plain':>8} {'measured':>9} {'more':>8}")
    for width in widths:
        for count in tokens:
            plain, measured = (peak(args.layers, width, count, i) for i in (0, 1))
            print(f"{width:6} {count:8} {plain:8.0f} {measured:9.0f} {measured - plain:8.0f}", flush=True)


if __name__ == "__main__":
    main()
