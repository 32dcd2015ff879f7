"""Words that every floor of the house needs."""


def counted(count: int, noun: str) -> str:
    """``1 seed``, ``5 seeds``, ``2 passes``, ``3 hypotheses``."""
    if count == 1:
        return f"{count:,} {noun}"
    return (
        f"{count:,} {noun[:-2]}es" if noun.endswith("sis") else f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"
    )
