"""``thalweg doctor``: is this installation sound, and what can it do here?"""

import importlib.metadata
import os
import platform
import shutil
import tempfile
from pathlib import Path

from thalweg.cli.console import emit, table
from thalweg.errors import ExitCode

EXAMPLES = """examples:
  thalweg doctor
  thalweg doctor --json"""

CORE = ("torch", "transformers", "numpy", "scipy", "safetensors", "tokenizers", "jinja2", "rich")
EXTRAS = {
    "datasets": "data",
    "lm_eval": "eval",
    "gguf": "gguf",
    "compressed_tensors": "packed",
    "accelerate": "gguf",
    "tensorboard": "track",
    "trackio": "track",
    "wandb": "wandb",
}
LEAST_FREE = 1 << 30


def configure(parser) -> None:
    parser.add_argument("--compile", action="store_true", help="also try torch.compile (up to a minute)")


def run(args) -> ExitCode:
    rows = [*_packages(), *_devices(), *_places(), _battery()]
    if args.compile:
        rows.append(_compiles())
    failed = any(row["state"] == "fail" for row in rows)
    if args.json:
        emit({"ok": not failed, "checks": rows})
    else:
        table(rows, {"state": "", "check": "check", "found": "found"})
    return ExitCode.INPUT if failed else ExitCode.OK


def _row(state: str, check: str, found: str) -> dict[str, str]:
    return {"state": state, "check": check, "found": found}


def _packages() -> list[dict[str, str]]:
    rows = [_row("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    for name in ("thalweg", *CORE):
        try:
            rows.append(_row("ok", name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append(_row("fail", name, f"not installed; run: pip install {name}"))
    for name, extra in EXTRAS.items():
        try:
            rows.append(_row("ok", f"{name} (extra)", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append(_row("-", f"{name} (extra)", f"not installed; pip install 'thalweg[{extra}]' brings it"))
    return rows


def _devices() -> list[dict[str, str]]:
    import torch

    cpu = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    gpu = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "none: runs on the CPU"
    return [
        _row("ok", "cpu", cpu),
        _row("ok" if torch.cuda.is_available() else "-", "gpu", gpu),
        _row(
            "ok" if torch.distributed.is_available() else "fail",
            "distributed",
            "gloo" if torch.distributed.is_available() else "missing",
        ),
    ]


def _places() -> list[dict[str, str]]:
    from thalweg.config import cache_folder

    rows = []
    for name, folder in (("cache", cache_folder()), ("current folder", Path.cwd())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder):
                pass
            free = shutil.disk_usage(folder).free
            rows.append(_row("ok" if free > LEAST_FREE else "fail", name, f"{folder}, {free / 2**30:.1f} GiB free"))
        except OSError as error:
            rows.append(_row("fail", name, f"{folder} cannot be written: {error.strerror or error}"))
    return rows


def _battery() -> dict[str, str]:
    """The loop-written reference of one connection, as a smoke test of the numerics on this machine."""
    from thalweg.testing import check_connection

    report = check_connection("additive", only=("reference",), raises=False)
    return _row(
        "ok" if report.passed else "fail", "numerics", "additive equals its reference" if report.passed else str(report)
    )


def _compiles() -> dict[str, str]:
    import torch

    try:
        double = torch.compile(lambda x: x * 2 + 1, fullgraph=True)
        good = bool(torch.equal(double(torch.ones(3)), torch.full((3,), 3.0)))
        return _row("ok" if good else "fail", "torch.compile", "works" if good else "wrong result")
    except Exception as error:
        return _row("fail", "torch.compile", f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
