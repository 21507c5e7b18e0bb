"""Matches regular expressions to module paths.

It also runs as a script in a child process, so it imports no other module of loramux.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

# The index of the first pattern that matched, and the text of its group "idx".
Hit = tuple[int, str | None]


def scan(patterns: Sequence[str], keys: Sequence[str], *, whole: bool) -> list[Hit | None]:
    """Return, for each key, the first pattern that matches its start (with `whole`, all of it)."""
    compiled = [re.compile(pattern) for pattern in patterns]
    return [first_hit(compiled, key, whole=whole) for key in keys]


def first_hit(patterns: Sequence[re.Pattern[str]], key: str, *, whole: bool) -> Hit | None:
    for index, pattern in enumerate(patterns):
        match = pattern.fullmatch(key) if whole else pattern.match(key)
        if match is not None:
            return index, match.groupdict().get("idx")
    return None


def main() -> None:
    task = json.load(sys.stdin)
    json.dump(scan(task["patterns"], task["keys"], whole=task["whole"]), sys.stdout)


if __name__ == "__main__":
    main()
