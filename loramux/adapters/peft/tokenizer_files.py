"""The tokenizer files of an adapter folder, which are part of its content id.

They are what tokenizer.save_pretrained writes beside the weights: an adapter that has any is
answered with its own tokenizer and chat template.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path

from loramux.adapters.identity import FileDigest
from loramux.adapters.peft.folder import find_file, refusing_os_errors
from loramux.adapters.peft.refusals import RefusalCode
from loramux.base.canonical_json import canonical_json
from loramux.errors import AdapterRefused

VOCABULARY_NAME = "tokenizer.json"
SETTINGS_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
ADDED_NAME = "added_tokens.json"
SPECIAL_NAME = "special_tokens_map.json"
GENERATION_NAME = "generation_config.json"
MAX_BYTES: Mapping[str, int] = {
    VOCABULARY_NAME: 64 * 2**20,
    SETTINGS_NAME: 4 * 2**20,
    TEMPLATE_NAME: 2**20,
    ADDED_NAME: 4 * 2**20,
    SPECIAL_NAME: 2**20,
    GENERATION_NAME: 2**20,
}
"""The files by their names, with the largest size of each."""
MAIN_NAMES = (VOCABULARY_NAME, SETTINGS_NAME, TEMPLATE_NAME)
"""A folder without any of these has no tokenizer of its own; the others only go with them."""
_MAX_KEPT = 4096

# (path, size, modification time, inode): equal for unchanged files.
_FileVersion = tuple[str, int, int, int]


class _Digests:
    """Digests of files by their versions: a load does not hash megabytes of JSON again."""

    def __init__(self) -> None:
        self._found: dict[_FileVersion, FileDigest] = {}
        self._lock = threading.Lock()

    def of(self, path: Path, name: str) -> FileDigest:
        with refusing_os_errors(path):
            status = path.stat()
        version = (str(path), status.st_size, status.st_mtime_ns, status.st_ino)
        with self._lock:
            digest = self._found.get(version)
        if digest is None:
            content = _read(path, name)
            digest = FileDigest(hashlib.sha256(content).hexdigest(), len(content))
            with self._lock:
                if len(self._found) >= _MAX_KEPT:
                    self._found.clear()
                self._found[version] = digest
        return digest


_DIGESTS = _Digests()


def find_tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the tokenizer files of a folder, given by its real path; refuse links outside."""
    if not any((folder / name).exists() for name in MAIN_NAMES):
        return {}
    found = {name: find_file(folder, name) for name in MAX_BYTES}
    return {name: path for name, path in found.items() if path is not None}


def digest_tokenizer_files(folder: Path) -> dict[str, FileDigest]:
    """Return the digests of the tokenizer files of a folder; raise AdapterRefused."""
    return {name: _DIGESTS.of(path, name) for name, path in find_tokenizer_files(folder).items()}


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the tokenizer files of a folder; raise AdapterRefused."""
    return {name: _read(path, name) for name, path in find_tokenizer_files(folder).items()}


def tokenizer_digest(digests: Mapping[str, str]) -> str:
    """Return one digest of files by their names and SHA-256; empty if there are none.

    Names of other files are ignored.
    """
    own = {name: sha256 for name, sha256 in digests.items() if name in MAX_BYTES}
    return "sha256:" + hashlib.sha256(canonical_json(own)).hexdigest() if own else ""


def digest_of_files(files: Mapping[str, FileDigest]) -> str:
    return tokenizer_digest({name: digest.sha256 for name, digest in files.items()})


def digest_of_contents(contents: Mapping[str, bytes]) -> str:
    return tokenizer_digest(
        {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    )


def _read(path: Path, name: str) -> bytes:
    limit = MAX_BYTES[name]
    with refusing_os_errors(path), path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise AdapterRefused(
            RefusalCode.TOKENIZER_TOO_LARGE,
            f"{name} is larger than {limit} bytes.",
            fix="Save the tokenizer again, or remove its files to use that of the base.",
        )
    return content
