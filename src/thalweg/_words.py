"""Words that every floor of the house needs."""


def counted(count: int, noun: str) -> str:
    """``1 seed``, ``5 seeds``, ``2 passes``."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"
