"""The page: jinja templates with escaping on, written atomically."""

from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined

from thalweg._version import __version__
from thalweg.records.files import atomic_write_text
from thalweg.reports.figures import Figure
from thalweg.reports.text import big, mean_sd, number


def environment() -> Environment:
    """Templates of the package; everything is escaped but the SVG that this package drew itself."""
    folder = resources.files("thalweg.reports") / "templates"
    sources = {item.name: item.read_text(encoding="utf-8") for item in folder.iterdir() if item.name.endswith((".html", ".css"))}
    made = Environment(loader=DictLoader(sources), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters.update(number=number, big=big, mean_sd=mean_sd)
    made.globals.update(version=__version__)
    return made


def write(path: str | Path, template: str, **context: Any) -> Path:
    """Render ``template`` into one file. Returns its path. Raises: InputError (disk full, no permission)."""
    path = Path(path)
    atomic_write_text(path, environment().get_template(template).render(**context))
    return path


__all__ = ["Figure", "environment", "write"]
