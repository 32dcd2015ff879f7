"""Words that every floor of the house needs."""


def duration(seconds: float) -> str:
    """``0.31 s``, ``25 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def counted(count: int, noun: str) -> str:
    """``1 seed``, ``5 seeds``, ``2 passes``, ``3 hypotheses``."""
    if count == 1:
        return f"{count:,} {noun}"
    return (
        f"{count:,} {noun[:-2]}es" if noun.endswith("sis") else f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"
    )
