"""Two connections on the shipped novels, with the same data in the same order, and one HTML report of the second.

python examples/train_and_report.py [STEPS] [FOLDER]
"""

import sys
from pathlib import Path

from thalweg.records import RunFolder
from thalweg.reports import write_run_report
from thalweg.training import TrainConfig, train

ARMS = {"additive": {}, "mgt": {"preset": "residual"}}


def main(steps: int = 150, folder: Path = Path("runs/example")) -> None:
    """Train both arms and write ``report.html`` into ``folder``."""
    for connection, options in ARMS.items():
        config = TrainConfig(
            connection=connection,
            connection_options=options,
            depth=2,
            data="austen",
            sequence_length=64,
            steps=steps,
            eval_every=max(steps // 3, 1),
            threads=1,
        )
        result = train(config, folder / connection)
        null = result.nulls["unigram_entropy"]
        print(
            f"{connection:<9} {result.status}: {result.final_loss or float('nan'):.3f} nats/token (unigram {null:.3f})"
        )
        for row in (
            RunFolder.open(folder / connection)
            .measures()
            .where(measure="effective_rank", step=steps, site="stream.end")
        ):
            print(f"{'':<9} effective rank {row.value:.3f}, of a Gaussian matrix {row.null:.3f}")
    print("report:", write_run_report(RunFolder.open(folder / "mgt"), folder / "report.html"))


if __name__ == "__main__":
    main(*(kind(text) for kind, text in zip((int, Path), sys.argv[1:], strict=False)))
