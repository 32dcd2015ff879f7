"""What a number came from: versions, machine, threads, device and commit, as a plain table."""

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from thalweg._version import __version__

PACKAGES = ("torch", "transformers", "numpy", "scipy", "safetensors", "tokenizers", "datasets")

# A resumed run repeats the interrupted one bit by bit only while all of these stay the same.
BITWISE = ("platform", "machine", "cpu", "cpu_capability", "device", "threads", "ranks", "versions")


def versions() -> dict[str, str]:
    """Versions of thalweg, Python and the libraries that numbers depend on; those not installed are left out."""
    found = {"thalweg": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def now() -> str:
    """Now, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def collect(device: str | None = None, source: str | Path | None = None) -> dict[str, Any]:
    """Where and with what the program runs now.

    device: the device in use if it is not the CPU. source: folder whose git commit is recorded (default: the current).
    Threads and CPU capability are those of torch when the program has loaded it; nothing is imported for this.
    """
    torch = sys.modules.get("torch")
    return {
        "versions": versions(),
        "platform": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability() if torch else None,
        "threads": torch.get_num_threads() if torch else None,
        "ranks": int(ranks) if (ranks := os.environ.get("WORLD_SIZE", "")).isdecimal() else 1,
        "device": device or "cpu",
        "device_name": torch.cuda.get_device_name(device) if torch and device and device.startswith("cuda") else None,
        "command": " ".join((_program(sys.argv[0]), *map(_without_folder, sys.argv[1:]))) if any(sys.argv[:1]) else "",
        "git": git_commit(source),
    }


def git_commit(folder: str | Path | None = None) -> dict[str, Any] | None:
    """Commit of the git checkout around ``folder`` and whether tracked files differ from it; None outside of one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder or Path.cwd()), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


def bitwise_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What changed between two provenances that breaks bitwise resume, one readable line each."""
    changes = []
    for key in BITWISE:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names = sorted(old.keys() | new.keys())
            changes += [
                f"{name} {old.get(name)} -> {new.get(name)}" for name in names if old.get(name) != new.get(name)
            ]
        elif old != new:
            changes.append(f"{key} {old} -> {new}")
    return changes


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _program(path: str) -> str:
    """What was called: a package by its own name, where it was called as ``python -m``."""
    return Path(path).parent.name if Path(path).name == "__main__.py" else _without_folder(path)


def _without_folder(argument: str) -> str:
    """An absolute path by its name alone: records are shared, and where somebody's folders lie is nobody else's business."""
    if Path(argument).is_absolute():
        return Path(argument).name
    name, given, value = argument.partition("=")  # --flag=PATH
    return f"{name}{given}{_without_folder(value)}" if given else argument
