"""Checks subjects of commits: `area: what changed`, under 72 characters.

python scripts/check_commit_subject.py MESSAGE_FILE      # as a commit-msg hook
python scripts/check_commit_subject.py --range main..HEAD
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LIMIT = 72
FORM = re.compile(r"[a-z0-9][\w ,./-]*: \S.*")


def faults(subject: str) -> list[str]:
    """Return what is wrong with a subject."""
    found = []
    if len(subject) >= LIMIT:
        found.append(f"has {len(subject)} characters, at most {LIMIT - 1} are allowed")
    if subject.startswith("Merge "):
        found.append("is of a merge: rebase the branch instead")
    elif not FORM.fullmatch(subject):
        found.append("must be `area: what changed`, such as `store: empty files are refused`")
    if subject.endswith("."):
        found.append("ends with a full stop")
    return found


def subject_of(message: str) -> str:
    """Return the first line of a message that is no comment."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    return next((line.strip() for line in lines if line.strip()), "")


def main(arguments: Sequence[str]) -> int:
    """Print the faults of all subjects; return the exit status."""
    if arguments[:1] == ["--range"]:
        command = ["git", "log", "--format=%s", *arguments[1:]]
        subjects = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        given = subjects.splitlines()
    else:
        given = [subject_of(Path(name).read_text(encoding="utf-8")) for name in arguments]
    found = [f"{subject!r} {fault}" for subject in given for fault in faults(subject)]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
