"""Names of a package that load their module when they are first used, so that importing the package loads neither torch nor transformers."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy(
    package: str, homes: Mapping[str, Iterable[str]] | None = None, parts: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for the module ``package``.

    homes: submodule -> the names that come from it; parts: submodules that are names themselves. For type checkers the package imports
    the same under ``TYPE_CHECKING`` and lists them in ``__all__``.
    """
    home_of = {name: home for home, names in (homes or {}).items() for name in names}
    parts = frozenset(parts)

    def getattribute(name: str) -> Any:
        if name in parts:
            return importlib.import_module(f"{package}.{name}")
        if name in home_of:
            return getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def directory() -> list[str]:
        return sorted(vars(sys.modules[package])["__all__"])

    return getattribute, directory
