"""Where plan files lie: those that come with the package, and those of the current folder."""

import os
from importlib import resources
from pathlib import Path

from thalweg import config
from thalweg.errors import InputError, UnknownNameError


def shipped_folder() -> Path:
    """The folder of the plans that come with the package: inside an installed one, beside ``src`` in a checkout."""
    package = Path(str(resources.files("thalweg")))
    installed = package / "plans"
    return installed if installed.is_dir() else package.parents[1] / "plans"


def shipped() -> dict[str, Path]:
    """Name -> file of every plan that comes with the package."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.toml"))}


def is_path(plan: str | Path) -> bool:
    """Whether ``plan`` is a path and no name: it has a separator, ends in .toml, or is a file. A folder does not hide a shipped plan."""
    text = str(plan)
    return os.sep in text or "/" in text or text.endswith(".toml") or Path(text).is_file()


def find(plan: str | Path) -> Path:
    """The file of a plan given by path, or by the name of a shipped one. Raises: InputError, UnknownNameError."""
    if is_path(plan):
        path = Path(plan)
        if not path.exists():
            raise InputError(
                f"no such plan: {path}; `thalweg list plans` shows the shipped ones, `thalweg study new` writes one"
            )
        return path
    known = shipped()
    if str(plan) not in known:
        raise UnknownNameError("plan", str(plan), known, more="Or give the path of a .toml file.")
    return known[str(plan)]


def rows() -> list[dict[str, str]]:
    """Every shipped plan, and those under ``plans/`` in the current folder, with name, summary and source."""
    folders = {shipped_folder().resolve(), Path("plans").resolve()}
    found = []
    for path in sorted(p for folder in folders if folder.is_dir() for p in folder.glob("*.toml")):
        table = config.read_toml(path)
        scales = ", ".join(table.get("scale", {}))
        found.append(
            {
                "name": path.stem,
                "summary": f"{table.get('title', '')} [{scales}]",
                "source": table.get("source", ""),
                "path": str(path),
            }
        )
    return found
