"""Frozen dataclasses from TOML files and flags: strict types, unknown keys rejected with the nearest name."""

import dataclasses
import inspect
import json
import os
import re
import tempfile
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from thalweg.errors import InputError, UnknownNameError

C = TypeVar("C")


def read_toml(path: str | Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises: InputError that names the file and, for broken syntax, the line.
    """
    path = checked_path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"no such file: {path}; give the path of a TOML file") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; give the path of a TOML file") from None
    except PermissionError:
        raise InputError(f"{path} cannot be read: permission denied") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); TOML must be UTF-8"
        ) from None
    except ValueError as error:  # TOMLDecodeError is one; so is a number of thousands of digits
        raise InputError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise InputError(f"{path} is nested too deeply; give a flatter table") from None


def checked_path(given: str | Path, *, expand: bool = False) -> Path:
    """``given`` as a path; with ``expand`` a leading ``~`` is the home folder. Raises: InputError for what no file can be called."""
    if "\0" in str(given):
        raise InputError(f"a path cannot hold a NUL byte, got {str(given)!r}; give another name")
    try:
        return Path(given).expanduser() if expand else Path(given)
    except RuntimeError:
        raise InputError(f"{given} names the home folder of an unknown user; write the whole path") from None


def cache_folder(given: str | Path | None = None) -> Path:
    """The cache folder: ``given``, else ``$THALWEG_CACHE``, else ``~/.cache/thalweg``. Raises: InputError for no path."""
    named = given or os.environ.get("THALWEG_CACHE")
    if named:
        return checked_path(named, expand=True)
    try:
        return Path.home() / ".cache" / "thalweg"
    except RuntimeError:  # no home
        return Path(tempfile.gettempdir()) / "thalweg"


def check_new(folder: str | Path) -> Path:
    """The folder as a path, if something new can be written there. Raises: InputError."""
    if not str(folder):
        raise InputError("the output needs a name, got an empty one")
    path = checked_path(folder, expand=True)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists and is not an empty folder; choose another name")
    check_writable(path)
    return path


def check_writable(folder: Path) -> None:
    """That a folder, or the nearest one above it that is there, takes files. Raises: InputError."""
    there = next((place for place in (folder, *folder.absolute().parents) if place.exists()), None)
    if there is not None:
        check_takes_files(there, folder)


def check_takes_files(folder: Path, wanted: Path) -> None:
    """That ``wanted`` can be made in a folder that is there, by making a file: rights alone do not say it. Raises: InputError."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        why = f"takes no file ({error.strerror or error})" if folder.is_dir() else "is a file"
        raise InputError(f"{wanted} cannot be written: {folder} {why}; choose another place") from None


def is_path(where: object) -> bool:
    """Whether this names a place on the disk, there or not, rather than a repository of a hub."""
    if not isinstance(where, str | os.PathLike):
        return False
    path = Path(where)
    return path.exists() or path.is_absolute() or str(where).startswith((".", "~")) or len(path.parts) > 2


def build(cls: type[C], values: Mapping[str, Any], where: str = "") -> C:
    """Make the dataclass ``cls`` from plain values, strictly.

    ``where`` is the path shown in errors (``model.width``). Nested dataclasses are built from nested tables; a list becomes a tuple
    where the field asks for one; an int is taken for a float, never the reverse.

    Raises: UnknownNameError for a key that is no field; InputError for a wrong type or a missing required key.
    """
    if not isinstance(values, Mapping):
        raise InputError(f"{where or cls.__name__} must be a table, got {type(values).__name__}")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    for key in values:
        if key not in fields:
            raise UnknownNameError(
                "key", f"{where}.{key}" if where else key, [f"{where}.{k}" if where else k for k in fields]
            )
    given = {key: convert(hints[key], value, f"{where}.{key}" if where else key) for key, value in values.items()}
    missing = [
        name
        for name, f in fields.items()
        if name not in given and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InputError(
            f"{where or cls.__name__} lacks the required key{'s' * (len(missing) > 1)} {', '.join(missing)}"
        )
    return cls(**given)


def convert(hint: Any, value: Any, where: str) -> Any:
    """Check ``value`` against the type ``hint`` and return it in that type. Raises: InputError."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        if not any(value == allowed and type(value) is type(allowed) for allowed in args):
            if isinstance(value, str):
                raise UnknownNameError(f"value for {where}:", value, [str(a) for a in args])
            raise InputError(f"{where} must be one of {', '.join(map(repr, args))}, got {value!r}")
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        errors: list[InputError] = []
        for option in (a for a in args if a is not type(None)):
            try:
                return convert(option, value, where)
            except InputError as error:
                errors.append(error)
        raise errors[0] if len(errors) == 1 else _wrong(where, hint, value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else build(hint, value, where)
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise _wrong(where, hint, value)
        if origin is tuple and args and args[-1] is not Ellipsis:
            if len(value) != len(args):
                raise InputError(f"{where} needs {len(args)} values, got {len(value)}")
            return tuple(convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))
        return origin(convert(args[0] if args else Any, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict or hint is dict or origin is Mapping:
        if not isinstance(value, Mapping):
            raise _wrong(where, hint, value)
        return {str(k): convert(args[1] if args else Any, v, f"{where}.{k}") for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if isinstance(hint, type) and isinstance(value, hint) and not (isinstance(value, bool) and hint in (int, float)):
        return value
    raise _wrong(where, hint, value)


def _wrong(where: str, hint: Any, value: Any) -> InputError:
    name = getattr(hint, "__name__", None) if get_origin(hint) is None else None
    if hint is dict or any(get_origin(part) is dict for part in (hint, *get_args(hint))):
        name = "a table"
    return InputError(
        f"{where} must be {name or str(hint).replace('typing.', '')}, got {value!r} ({type(value).__name__})"
        + ("; write true or false" if hint is bool else "")
    )


def parse_assignments(pairs: list[str], where: str = "option") -> dict[str, Any]:
    """Turn ``["alpha=0.5", "preset=paper"]`` into typed values; a value that is no TOML literal is taken as a string."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key.strip():
            raise InputError(f"{where} must look like NAME=VALUE, got {pair!r}")
        if "\n" in pair or "\r" in pair:
            raise InputError(f"{where} must stand on one line, got {pair!r}; give one NAME=VALUE at a time")
        try:
            values[key.strip()] = tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            values[key.strip()] = text
        except ValueError as error:  # a number of thousands of digits
            raise InputError(f"the value of {key.strip()} cannot be read: {error}") from None
        except RecursionError:
            raise InputError(f"the value of {key.strip()} is nested too deeply; give a flatter one") from None
    return values


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge of two tables; ``over`` wins. Neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both_tables else value
    return merged


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and paths as plain JSON/TOML values; ``None`` entries of tables are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: to_plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if getattr(value, f.name) is not None
        }
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def meanings(cls: type) -> dict[str, str]:
    """What the docstring of a dataclass, and those of the classes it extends, say of each field.

    A passage reads ``name: meaning`` or ``name, name: meaning`` and begins a paragraph, or follows a sentence or a semicolon; a sentence
    of two words may head it. The nearest class that explains a field wins.
    """
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(owner) or "__doc__" not in vars(owner):
            continue
        name = "|".join(re.escape(f.name) for f in dataclasses.fields(owner))
        for paragraph in re.split(r"\n\s*\n|\n(?=Raises:)", inspect.cleandoc(owner.__doc__ or "")):
            text = " ".join(paragraph.split())
            parts = re.split(rf"(?:^|(?<=[.;] ))((?:{name})(?:, (?:{name}))*): ", text)
            for names, meaning in zip(parts[1::2], parts[2::2], strict=True):
                found |= dict.fromkeys(names.split(", "), meaning.strip().rstrip(".;"))
    return found


def allowed(hint: Any, mark: str = "") -> str:
    """A type for people: the values of a Literal, each between ``mark``, or a word for what is taken."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"{mark}{value}{mark}" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(allowed(arg, mark) for arg in args if arg is not type(None))
    if origin in (tuple, list):
        return f"list, each {allowed(args[0], mark)}" if args else "list"
    if origin is dict or hint is dict:
        return "table"
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}.get(hint, str(hint))


@dataclasses.dataclass(frozen=True)
class Described:
    """A field of a dataclass for people: what it takes, its default as TOML (``none`` where there is none), what it means.

    one_of: whether what it takes are the values of a Literal.
    """

    name: str
    allowed: str
    default: str
    meaning: str
    one_of: bool


def describe(cls: type) -> list[Described]:
    """Every field of a dataclass, in order; the meanings as they are read in a terminal."""
    hints, meaning = get_type_hints(cls), meanings(cls)
    return [
        Described(
            f.name,
            allowed(hints[f.name]),
            default_of(f),
            unmarked(meaning.get(f.name, "")),
            get_origin(hints[f.name]) is Literal,
        )
        for f in dataclasses.fields(cls)
        if f.init
    ]


def default_of(field: dataclasses.Field) -> str:
    """The default of a field as it would be written."""
    if field.default_factory is not dataclasses.MISSING:
        return _literal(to_plain(field.default_factory()))
    if field.default is dataclasses.MISSING:
        return "required"
    plain = to_plain(field.default)
    return "none" if plain is None else plain if isinstance(plain, str) else _literal(plain)


def unmarked(text: str) -> str:
    """Without the marks of reStructuredText."""
    return re.sub(r":\w+:`~?([^`]+)`", r"\1", text).replace("``", "")


def to_toml(value: Any) -> str:
    """A config as TOML text that :func:`build` reads back equal."""
    lines: list[str] = []
    _write_table(to_plain(value), (), lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    scalars = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    if path and (scalars or not table):
        lines.extend(["", f"[{'.'.join(map(_key, path))}]"])
    lines.extend(f"{_key(k)} = {_literal(v)}" for k, v in scalars.items())
    for key, inner in table.items():
        if isinstance(inner, Mapping):
            _write_table(inner, (*path, key), lines)


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else json.dumps(key)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(k)} = {_literal(v)}" for k, v in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # JSON strings are TOML basic strings but for DEL
    if isinstance(value, float):
        return repr(value)  # inf and nan are spelled alike in TOML
    return str(value)
