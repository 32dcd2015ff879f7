"""Configurations of published settings that come with the package, by name."""

from importlib import resources
from pathlib import Path

from thalweg.errors import UnknownNameError

PREFIX = "preset:"


def names() -> list[str]:
    """Names that :func:`find` knows."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def find(given: str) -> Path:
    """``preset:NAME`` -> the file that comes with the package; any other text is the path of a file. Raises: UnknownNameError."""
    if not given.startswith(PREFIX):
        return Path(given)
    name = given.removeprefix(PREFIX)
    if name not in names():
        raise UnknownNameError("preset", name, names(), more="Or give the path of a .toml file.")
    return _folder() / f"{name}.toml"


def _folder() -> Path:
    return Path(str(resources.files("thalweg"))) / "presets"
