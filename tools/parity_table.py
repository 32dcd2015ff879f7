"""Makes the tables of docs/parity.md: which public implementation each connection and mixer was compared with, and what came out.

    python tools/parity_table.py          write the page from docs/parity.json
    python tools/parity_table.py --run    run the comparisons first, print the versions, keep the measured errors
    python tools/parity_table.py --check  write nothing; exit with 1 if the page is stale

What ``--run`` cannot run (a package is missing, a comparison fails) loses its number and shows red.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from generated import ROOT, Part, main, table

from thalweg import connections, mixers
from thalweg.connections.layouts import LAYOUTS

LEDGER = ROOT / "docs" / "parity.json"
GREEN, YELLOW, RED = "🟢", "🟡", "🔴"
EMPTY_RUN = 5  # what pytest ends with when it has collected no test


@dataclass(frozen=True)
class Row:
    """One public implementation and one connection or mixer.

    key: of the measured errors in the ledger, which tests/parity writes. within: a bound that a test of ``make test`` holds, where no error
    is kept. neither: nothing was run, or there is nothing to run: ``other`` says why (red), and with ``different`` that it is another
    method (yellow). note: the options that make both agree, and what no option expresses.
    """

    subject: str
    implementation: str
    note: str = ""
    key: str = ""
    within: str = ""
    other: str = ""
    different: bool = False


HYPER = "PyPI `hyper-connections`"
ITS_NORM = "its norm has a weight, which the converter folds into the projections, and no eps (`coefficient_eps=0`)"
FRACTIONS = "no option for `num_fracs`, `num_input_views` above 1: a state of another shape"
ITS_MHC = (
    "`coefficients=per_stream`, `mixer_options={exact: columns}`, `contraction=sum`: it normalises every stream by itself, and the rows of "
    f"alpha[from, to] last, so that what a stream receives sums to one only nearly (the paper: exactly); {ITS_NORM}; it starts from "
    f"one-hot and identity as logits (mix diagonal 0.475, write 1.46), which are values; {FRACTIONS}; `num_dynamic_alpha_proposals` above 1 "
    "(a mean of several matrices)"
)
NO_PACKAGE = "the authors' code is a training repository, not a package"
ROWS = [
    Row("additive", "transformers: Llama", within="1e-8, float64, whole models"),
    Row("additive", "transformers: Qwen3, Phi; Gemma 2 with `update_norm`", within="1e-8, float64, whole models"),
    Row(
        "layerscale",
        "transformers: Granite, the scale held at its residual multiplier",
        within="1e-8, float64, whole models",
    ),
    Row("post_norm", "`torch.nn.TransformerEncoder(norm_first=False)`", within="1e-9, float64, whole models"),
    Row(
        "hyper_connections",
        f"{HYPER}: `HyperConnections`, dynamic",
        f"{ITS_NORM}; one scale for read and mix, here one each; {FRACTIONS}; stream embeddings and attention pooling at the ends",
        key="hyper_connections_dynamic",
    ),
    Row(
        "hyper_connections",
        f"{HYPER}: `HyperConnections`, static",
        "`dynamic=False`; over there projections of zero",
        key="hyper_connections_static",
    ),
    Row(
        "hyper_connections",
        "the authors' Algorithm 2",
        other="printed in the paper, no package; the package above follows it",
    ),
    Row(
        "mhc",
        "transformers: `DeepseekV4DecoderLayer`, `DeepseekV4HyperHead`",
        "`read_eps=1e-6`, `mixer_options={eps: 1e-6}`, `contraction=head`; comb[from, to] is our mix transposed (layout `deepseek_v4`)",
        key="deepseek_v4_layer",
    ),
    Row(
        "mhc",
        "transformers: `DeepseekV4Model`, embedding to final norm",
        "the same",
        key="deepseek_v4_model",
    ),
    Row(
        "mhc",
        "PyPI `tile-kernels`: DeepSeek's torch reference",
        "the same options; 20 iterations, where its function defaults to 10, and twice the sigmoid, where it defaults to once",
        key="tile_kernels",
    ),
    Row("mhc", f"{HYPER}: `ManifoldConstrainedHyperConnections`", ITS_MHC, key="hyper_connections_mhc"),
    Row(
        "mhc",
        f"{HYPER}: the same in `mHCv2`",
        "as above; no option for `mix_streams_before_norm`",
        key="hyper_connections_mhc_v2",
    ),
    Row(
        "mhc",
        "PyPI `liger-kernel`: `LigerMHC` under Triton's interpreter",
        "`mixer_options={eps: 1e-6, exact: columns}` (layout `paper`): it normalises columns of res[to, from] last and contracts the second "
        "index, so that what a stream receives sums to one only nearly; it starts at the uniform matrix with alpha 1, which are values; its "
        "16-bit path needs a GPU and was not run",
        key="liger_mhc",
    ),
    Row(
        "mhc",
        "PyPI `mhc` 0.5.5",
        "read, not run: it mixes the last few states of a chain of layers by a softmax; no streams, no mixing matrix",
        different=True,
    ),
    Row(
        "mhc",
        "NVIDIA Megatron-LM",
        other="megatron-core 0.16.1, the newest that could be installed, has no hyper-connections",
    ),
    Row("mhc", "NVIDIA TransformerEngine", other="needs a CUDA device"),
    Row("mhc", "mHC.cu", other="needs a CUDA device"),
    Row(
        "attention_residuals",
        "PyPI `liger-kernel`: `liger_attn_res` under Triton's interpreter",
        "the attention over depth itself; where the end of the network attends is ours",
        key="liger_attn_res",
    ),
    Row(
        "orthogonal",
        f"{HYPER}: `OrthogonalResidualUpdate`",
        "`eps=0`: over there the stream is divided by its length, at least 1e-12",
        key="hyper_connections_orthogonal",
    ),
    Row("mhc_delta", "none", other="ours: there is no other implementation"),
    Row("tangent_projector", "none", other="ours: there is no other implementation"),
    Row("mgt", "none", other="published without code"),
    Row("denseformer", "epfml/DenseFormer", other=NO_PACKAGE),
]
MIXER_ROWS = [
    Row(
        "sinkhorn",
        "transformers",
        "inside the comparison of `mhc` above; as inside those of tile-kernels, hyper-connections and liger-kernel, each in its row",
        key="deepseek_v4_layer",
    ),
    Row("unconstrained", HYPER, "inside the comparison of `hyper_connections` above", key="hyper_connections_dynamic"),
    Row("permutation", "FFTYYY/mhc-lite", "its initial values agree to six digits", other=NO_PACKAGE),
    Row(
        "kronecker",
        "wz1119/KromHC",
        "its initial values agree to six digits",
        other=f"{NO_PACKAGE}, and has no licence",
    ),
    Row("orthostochastic", "itstorque/go-mHC", other="the repository lacks the module that holds it"),
    Row("transport", "alyubinin/tbp-mHC", "its values at zero and at +-8 agree to six digits", other=NO_PACKAGE),
    Row("transport_recursive", "alyubinin/tbp-mHC", other=NO_PACKAGE),
    Row("spectral_sphere", "6zHAOyi/s2HC", "its initial values agree to six digits", other=NO_PACKAGE),
    Row("birkhoff_projection", "yixuan/mHC-proj", other="needs a CUDA device"),
]
PINNED = re.compile(r"^([\w.-]+)==([\w.]+)", re.MULTILINE)


def parts() -> list[Part]:
    """Everything that this script makes."""
    heads = ["", "public implementation", "result", "options and differences"]
    page = ROOT / "docs" / "parity.md"
    ours = [row.subject for row in ROWS]
    rest = [Row(name, "none", other="no comparison yet") for name in names(connections) if name not in ours]
    mixing = [row.subject for row in MIXER_ROWS]
    rest_of_mixers = [Row(name, "none", other="no comparison yet") for name in names(mixers) if name not in mixing]
    layouts = [[f"`{name}`", layout.summary, layout.source] for name, layout in sorted(LAYOUTS.items())]
    return [
        (page, "parity", table(["connection", *heads[1:]], [cells(row) for row in ordered(ROWS + rest)])),
        (
            page,
            "parity of mixers",
            table(["mixer", *heads[1:]], [cells(row) for row in ordered(MIXER_ROWS + rest_of_mixers)]),
        ),
        (page, "layouts", table(["layout", "what it holds", "of"], layouts)),
    ]


def names(kind: Any) -> list[str]:
    """Connections or mixers of this package; those of other distributions are documented there."""
    return [entry.name for entry in kind.entries() if entry.value.__module__.startswith("thalweg.")]


def ordered(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.subject)


def cells(row: Row) -> list[str]:
    return [f"`{row.subject}`", row.implementation, result(row), row.note]


def result(row: Row) -> str:
    """The mark and the measured errors, or why there are none."""
    if row.key:
        return measured(row.key, ledger(), pins())
    if row.within:
        return f"{GREEN} within {row.within}; held by `make test`"
    return f"{YELLOW} another method" if row.different else f"{RED} not run: {row.other}"


def measured(key: str, kept: dict[str, Any], pinned: dict[str, str]) -> str:
    """Green with the errors and versions; red where the comparison did not run or ran on another version than the pinned one."""
    found = kept.get(key)
    if found is None:
        return f"{RED} not run"
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    moved = [name for name, value in found["versions"].items() if pinned.get(plain(name), value) != value]
    if moved:
        return f"{RED} not run on the pinned version of {', '.join(moved)}; last on {versions}"
    return f"{GREEN} outputs {found['outputs']:.0e}, gradients {found['gradients']:.0e} ({found['dtype']}; {versions})"


def plain(name: str) -> str:
    """A distribution's name as every index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def ledger() -> dict[str, Any]:
    return json.loads(LEDGER.read_text(encoding="utf-8")) if LEDGER.exists() else {}


def pins() -> dict[str, str]:
    return {
        plain(name): value for name, value in PINNED.findall((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    }


@dataclass(frozen=True)
class Tier:
    """Comparisons that run together: what pytest is told, and what its environment needs."""

    title: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)


TIERS = [
    Tier("in make test", ["-k", "deepseek or hyper_connections"]),
    Tier("in make test-parity", ["-m", "parity"], {"TRITON_INTERPRET": "1"}),
]


def run() -> None:
    """Run every comparison from an empty ledger, and say what came out. Where one fails, nothing that ran beside it counts."""
    LEDGER.write_text("{}\n", encoding="utf-8")
    for tier in TIERS:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/parity", *tier.arguments]
        environment = {**os.environ, "THALWEG_PARITY": "write", **tier.environment}
        before = LEDGER.read_text(encoding="utf-8")
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        if code not in (0, EMPTY_RUN):
            LEDGER.write_text(before, encoding="utf-8")
        print(
            f"{tier.title}: {'passed' if code == 0 else 'nothing to run' if code == EMPTY_RUN else 'not all passed'}",
            flush=True,
        )
    kept = ledger()
    for row in (row for row in ROWS if row.key):
        print(f"{row.implementation.replace('`', '')}: {measured(row.key, kept, pins())}")


if __name__ == "__main__":
    if "--run" in sys.argv:
        sys.argv.remove("--run")
        run()
    main(parts())
