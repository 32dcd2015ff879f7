"""Every test of a marked tier is listed in TIERS.md with its reason, and nothing else is."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
MARK = re.compile(r"@pytest\.mark\.(slow|gpu|parity|models)\b(?:.*\n)*?def (test_\w+)")


def marked() -> set[tuple[str, str]]:
    found = set()
    for path in TESTS.rglob("test_*.py"):
        if path != Path(__file__):
            found |= {(f"{path.relative_to(TESTS)}::{name}", tier) for tier, name in MARK.findall(path.read_text())}
    return found


def listed() -> set[tuple[str, str]]:
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| .+ \|$", (TESTS / "TIERS.md").read_text(), re.MULTILINE)
    return set(rows)


def test_tiers_are_listed():
    assert marked() == listed()


def test_nothing_is_skipped():
    marks = ("pytest.mark." + "skip", "pytest." + "skip(", "mark." + "xfail")
    offenders = [p.name for p in TESTS.rglob("*.py") if any(mark in p.read_text() for mark in marks)]
    assert offenders == []
