"""Regular expressions over module paths. Also run as a script, so it imports nothing of loramux."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

# Index of the first pattern that matched, and what its group "idx" holds.
Hit = tuple[int, str | None]


def scan(patterns: Sequence[str], keys: Sequence[str], *, whole: bool) -> list[Hit | None]:
    """For each key the first pattern that matches at its start (`whole`: all of it)."""
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
