"""Plans of tests as tables, with values put over those of their text."""

import tomllib


def put_over(text, over):
    """The tables of a plan; ``over``: dotted path with __ for a dot -> value."""
    made = tomllib.loads(text)
    for path, value in over.items():
        *heads, last = path.split("__")
        place = made
        for key in heads:
            place = place[int(key)] if isinstance(place, list) else place[key]
        place[last] = value
    return made
