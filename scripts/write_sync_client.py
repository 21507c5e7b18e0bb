"""Writes loramux/client/client.py, the synchronous client, from async_client.py.

python scripts/write_sync_client.py            (write it)
python scripts/write_sync_client.py --check    (fail if it is not what would be written)
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "loramux" / "client"
SOURCE, TARGET = FOLDER / "async_client.py", FOLDER / "client.py"
HEAD = '"""The synchronous Python client, which scripts/write_sync_client.py writes."""\n'
DOCSTRING = '''
    """Client of one server. `**sampling` takes the fields of the HTTP API: temperature, seed, …

    A refused request (429, 503, connection refused) is retried up to max_retries times. timeout_s
    limits the wait for the next bytes, not the whole reply.
    """
'''
CHANGES = (
    (r'\A"""[^"]*"""\n', HEAD),
    (r'(class AsyncClient:\n)    """[^"]*"""\n', r"\1" + DOCSTRING.lstrip("\n")),
    (r"\bimport asyncio\b", "import time"),
    (r"\bAsyncGenerator, Awaitable, Callable\b", "Callable, Generator"),
    (r"AsyncGenerator\[(\w+), None\]", r"Generator[\1, None, None]"),
    (r"Awaitable\[None\]\] = asyncio\.sleep", "None] = time.sleep"),
    (r"\bAsyncClient\b", "Client"),
    (r"\baclosing\b", "closing"),
    (r"__a(enter|exit)__", r"__\1__"),
    (r"\ba(close|read)\(", r"\1("),
    (r"\b(?:async|await) ", ""),
)


def sync_client() -> str:
    """Return the text of the synchronous client."""
    text = SOURCE.read_text()
    for pattern, new in CHANGES:
        text, count = re.subn(pattern, new, text)
        if not count:
            raise SystemExit(f"{SOURCE}: nothing matches {pattern}")
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def main() -> int:
    text = sync_client()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text)
        return 0
    if TARGET.read_text() == text:
        return 0
    print(f"{TARGET} is not what {SOURCE.name} says: run scripts/write_sync_client.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
