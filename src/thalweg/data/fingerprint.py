"""One way to turn what something is made of into a short name that changes when it does."""

import hashlib
import json
from typing import Any


def digest_of(value: Any) -> str:
    """sha256 (hexadecimal) of a plain value, the order of its keys aside."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
