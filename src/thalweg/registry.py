"""One generic registry: names to things, found by themselves, open to third parties by entry points."""

import importlib
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Generic, TypeVar, cast

from thalweg.errors import InputError, ThalwegWarning, UnknownNameError

T = TypeVar("T")
C = TypeVar("C")  # what a decorator takes and gives back unchanged

# What ``verified`` of a connection or mixer of this package says: a word of its authors, which nobody else inherits.
REFERENCE = "loop-written reference in float64, outputs and all gradients"


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered thing with what ``thalweg list`` prints of it."""

    name: str
    value: T
    summary: str
    source: str
    aliases: tuple[str, ...] = ()


class Registry(Generic[T]):
    """Names to values of one kind.

    The modules of ``package`` are imported at the first look-up, so a new file with a ``register`` call is found by itself; then the
    entry points of ``group`` are loaded, so other distributions can add to it. Registering one name twice is an error. An entry point that
    cannot be loaded is named by one ThalwegWarning and takes nothing but itself away: who asks for its name gets the error.
    """

    def __init__(self, kind: str, package: str, group: str):
        self.kind = kind
        self.package = package
        self.group = group
        self._entries: dict[str, Entry[T]] = {}
        self._aliases: dict[str, str] = {}
        self._broken: dict[str, str] = {}  # name of an entry point -> why it cannot be loaded
        self._discovered = False

    def register(self, name: str, *, summary: str, source: str, aliases: tuple[str, ...] = ()) -> Callable[[C], C]:
        """Decorator that stores a value under ``name``."""

        def add(value: C) -> C:
            for key in (name, *aliases):
                if key in self._entries or key in self._aliases:
                    raise InputError(f"{self.kind} {key!r} is registered already; choose another name")
            self._entries[name] = Entry(name, cast(T, value), summary, source, aliases)
            self._aliases.update(dict.fromkeys(aliases, name))
            return value

        return add

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True  # before the imports: a module may look names up while it loads
        try:
            home = importlib.import_module(self.package)
            for module in pkgutil.iter_modules(home.__path__):
                if not module.name.startswith("_"):
                    importlib.import_module(f"{self.package}.{module.name}")
            for point in entry_points(group=self.group):
                self._load_entry_point(point)
        except BaseException:
            self._discovered = False
            raise

    def _load_entry_point(self, point) -> None:
        try:
            point.load()  # importing the module runs its ``register`` call
        except (Exception, SystemExit) as error:
            why = " ".join((str(error) or type(error).__name__).split())
            self._broken[point.name] = (
                f"{self.kind} entry point {point.name!r} ({point.value}) cannot be loaded: {why}; fix or uninstall that package"
            )
            warnings.warn(self._broken[point.name], ThalwegWarning, stacklevel=2)

    def names(self) -> list[str]:
        self._discover()
        return sorted(self._entries)

    def entries(self) -> Iterator[Entry[T]]:
        return (self._entries[name] for name in self.names())

    def entry(self, name: str) -> Entry[T]:
        self._discover()
        if not isinstance(name, str):
            raise InputError(f"a {self.kind} is named by a string, got {type(name).__name__}")
        found = self._entries.get(self._aliases.get(name, name))
        if found is None and name in self._broken:
            raise InputError(self._broken[name])
        if found is None:
            missing = f" Not loaded: {', '.join(sorted(self._broken))}." if self._broken else ""
            raise UnknownNameError(
                self.kind,
                name,
                [*self._entries, *self._aliases],
                more=f"Third parties add theirs by the entry point group {self.group!r}.{missing}",
            )
        return found

    def name_of(self, value: T) -> str | None:
        """The name under which ``value`` is registered, or a class that it extends; None for what is not registered."""
        names = {id(entry.value): name for name, entry in self._entries.items()}
        kin = value.__mro__ if isinstance(value, type) else (value,)
        return next((names[id(one)] for one in kin if id(one) in names), None)

    def __getitem__(self, name: str) -> T:
        return self.entry(name).value

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._entries or name in self._aliases
