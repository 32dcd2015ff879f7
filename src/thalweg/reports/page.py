"""The page: jinja templates with escaping on, written atomically."""

from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from thalweg._version import __version__
from thalweg.records.files import atomic_write_text
from thalweg.reports.text import clean


def environment() -> Environment:
    """Templates of the package; everything is escaped but the SVG that this package drew itself."""
    folder = resources.files("thalweg.reports") / "templates"
    names = (".html", ".css")
    sources = {item.name: item.read_text(encoding="utf-8") for item in folder.iterdir() if item.name.endswith(names)}
    made = Environment(
        loader=DictLoader(sources),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    made.globals.update(version=__version__)
    return made


def write(path: str | Path, template: str, **context: Any) -> Path:
    """Render ``template`` into one file. Returns its path. Raises: InputError (disk full, no permission)."""
    path = Path(path)
    atomic_write_text(path, environment().get_template(template).render(**context))
    return path


def _printable(value: Any) -> Any:
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value
