"""Matches the regular expressions of an adapter config with a bound on the matching time."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

from loramux.adapters.peft import pattern_scan
from loramux.adapters.peft.pattern_scan import Hit, scan
from loramux.adapters.peft.refusals import RefusalCode
from loramux.errors import AdapterRefused

MAX_PATTERNS = 4096
MAX_PATTERN_CHARS = 4096
# Of all patterns of a field. A character takes up to 10 us to compile, a class up to 0.5 ms.
MAX_TOTAL_CHARS = 2**17
MAX_CLASSES = 2048
# A class with a range of Unicode takes 10 ms to compile, and names of modules are ASCII.
UNICODE = re.compile(r"\\[uUN]|[^\x00-\x7f]")
# About a second of matching. Patterns that may take longer run in a child process with a timeout,
# because `re` holds the GIL until it returns.
MAX_STEPS_HERE = 100_000_000
MAX_CHILD_SECONDS = 10.0
ENDLESS = 10**18
FEWER = "Name the modules in fewer words, such as their last name part."
TOKENS = re.compile(
    r"(?P<escape>\\.)|(?P<nested>\)[*+{])|(?P<repeat>[*+]\??|\{)"
    r"|(?P<open>\(\??)|(?P<option>\?)|(?P<bar>\|)",
    re.DOTALL,
)
# In verbose mode a space or a comment may separate a group from its quantifier.
VERBOSE = re.compile(r"\(\?[a-zA-Z-]*x")


def first_matches(
    field: str,
    patterns: Sequence[str],
    keys: Sequence[str],
    *,
    template: str = "{}",
    whole: bool = False,
) -> list[Hit | None]:
    """Run `scan` with each pattern inserted into `template`; errors name the config's `field`."""
    check_sizes(field, patterns)
    filled = [template.replace("{}", pattern) for pattern in patterns]
    for pattern, expression in zip(patterns, filled, strict=True):
        check_syntax(field, pattern, expression)
    longest = max(map(len, keys), default=0)
    steps = sum(worst_steps(expression, longest) for expression in filled) * len(keys)
    if steps <= MAX_STEPS_HERE:
        return scan(filled, keys, whole=whole)
    return scan_in_child(field, filled, keys, whole=whole)


def check_sizes(field: str, patterns: Sequence[str]) -> None:
    """Refuses patterns that take long to compile."""
    if len(patterns) > MAX_PATTERNS or any(len(text) > MAX_PATTERN_CHARS for text in patterns):
        raise AdapterRefused(
            RefusalCode.BAD_PATTERN,
            f"{field} has over {MAX_PATTERNS} patterns or one of over {MAX_PATTERN_CHARS} "
            "characters.",
            fix=FEWER,
        )
    num_chars, num_classes = sum(map(len, patterns)), sum(text.count("[") for text in patterns)
    if num_chars > MAX_TOTAL_CHARS or num_classes > MAX_CLASSES:
        raise AdapterRefused(
            RefusalCode.BAD_PATTERN,
            f"{field} has {num_chars} characters and {num_classes} character classes; at most "
            f"{MAX_TOTAL_CHARS} and {MAX_CLASSES} are allowed.",
            fix=FEWER,
        )
    found = next((text for text in patterns if UNICODE.search(text)), None)
    if found is not None:
        raise AdapterRefused(
            RefusalCode.BAD_PATTERN,
            f"{field} has a pattern with characters that are not ASCII: {found[:100]!r}.",
            fix="Names of modules are ASCII; remove them.",
        )


def check_syntax(field: str, pattern: str, expression: str) -> None:
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterRefused(
            RefusalCode.BAD_PATTERN,
            f"{field} has {pattern[:100]!r}, which is not a regular expression: {error}.",
            fix="Correct it in adapter_config.json.",
        ) from error


def worst_steps(expression: str, key_length: int) -> int:
    """Return an upper bound for the backtracking steps of one match."""
    counts = Counter(token.lastgroup for token in TOKENS.finditer(expression))
    if counts["nested"] or VERBOSE.search(expression):
        return ENDLESS
    ways_to_repeat = math.comb(key_length + counts["repeat"], counts["repeat"])
    return min(ENDLESS, ways_to_repeat << (counts["option"] + counts["bar"]))


def scan_in_child(
    field: str, expressions: Sequence[str], keys: Sequence[str], *, whole: bool
) -> list[Hit | None]:
    task = json.dumps({"patterns": list(expressions), "keys": list(keys), "whole": whole})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", pattern_scan.__file__],
            input=task,
            capture_output=True,
            text=True,
            timeout=MAX_CHILD_SECONDS,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise AdapterRefused(
            RefusalCode.BAD_PATTERN,
            f"{field} has a pattern that could not be matched within {MAX_CHILD_SECONDS:.0f} s.",
            fix="List the modules instead, without nested repetitions.",
        ) from error
    return [None if hit is None else (hit[0], hit[1]) for hit in json.loads(done.stdout)]
