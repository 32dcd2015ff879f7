"""Parts of the documentation that are made from the code: text between two markers, written or compared."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Part = tuple[Path, str, str]  # file, name of the part, its text


def put(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between the markers of part ``name``. Raises: ValueError if they do not stand there once each."""
    begin, end = f"<!-- {name}: made by tools/, do not edit -->\n", f"<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page needs the markers {begin.strip()!r} and {end!r} once each")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text.strip()}\n\n{end}{rest.split(end)[1]}"


def stale(parts: list[Part]) -> list[str]:
    """The parts that are not what the code makes now, as ``file: part``."""
    found = []
    for path, name, text in parts:
        page = path.read_text(encoding="utf-8")
        if put(page, name, text) != page:
            found.append(f"{path.relative_to(ROOT)}: {name}")
    return found


def write(parts: list[Part]) -> None:
    for path, name, text in parts:
        path.write_text(put(path.read_text(encoding="utf-8"), name, text), encoding="utf-8")


def main(parts: list[Part]) -> None:
    """Write the parts, or with ``--check`` say which are stale and exit with 1."""
    parser = argparse.ArgumentParser(description="write the generated parts of the documentation")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a part is stale")
    if not parser.parse_args().check:
        write(parts)
    elif found := stale(parts):
        sys.exit(f"stale: {', '.join(found)}; run the script without --check")


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; bars and line breaks in the cells are made harmless."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in line)} |" for line in lines
    )
