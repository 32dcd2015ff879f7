"""Refuse to pull a CUDA build of torch onto a machine without a GPU: a dry run of the resolver, before anything is downloaded."""

import importlib.util
import shutil
import subprocess
import sys


def main() -> int:
    if importlib.util.find_spec("torch") is not None or shutil.which("nvidia-smi"):
        return 0
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--report",
        "-",
        "-c",
        "constraints.txt",
        "torch",
    ]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        print(f"torch cannot be resolved here: {found.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return 1
    if '"name": "triton"' in found.stdout or '"nvidia-' in found.stdout:
        print(
            "this machine has no GPU but pip would fetch a CUDA build of torch (gigabytes); use the CPU index:\n"
            "  pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu\n"
            "in .venv first, or set THALWEG_ALLOW_CUDA=1",
            file=sys.stderr,
        )
        import os

        return 0 if os.environ.get("THALWEG_ALLOW_CUDA") else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
