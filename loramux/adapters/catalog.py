"""Catalog of the adapters that an engine knows: inspects folders, and reads them for the loader.

Inspection reads the config and the header of the weights. Identification also reads the weights,
to hash, check and pack them, unless their values were checked before.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loramux.adapters.identity import FileDigest, compute_cid, make_manifest
from loramux.adapters.loading import AdapterRules, FolderLoader, LoadedAdapter
from loramux.adapters.packed.extras import EMBEDDING, num_tokens_of
from loramux.adapters.packed.image import AdapterImage
from loramux.adapters.peft.doctor import Report, examine
from loramux.adapters.peft.folder import open_folder, refusing_os_errors
from loramux.adapters.peft.inspection import InspectedAdapter
from loramux.adapters.peft.tokenizer_files import digest_of_files
from loramux.adapters.workers import CALLING_THREAD, Workers
from loramux.base.private_files import make_private_folder, private_opener
from loramux.errors import AdapterNotFound, AdapterRefused
from loramux.types.adapter import AdapterCard, InspectedCard
from loramux.types.model import BaseModelInfo

_log = logging.getLogger(__name__)
# Changes when the checks of the values or the content id change: then all are checked again.
_VERIFIED_NAME = "verified-2.jsonl"
_MAX_STALE_LINES = 1024

# (name, size, modification time, inode) of each file: equal signatures mean unchanged files.
Signature = tuple[tuple[str, int, int, int], ...]
# Returns the recorded digests of the files of a folder that an adapter store made, else None.
FindDigests = Callable[[Path], Mapping[str, FileDigest] | None]


@dataclass(frozen=True, slots=True)
class VerifiedValues:
    """The result of a check of the values of an adapter."""

    cid: str
    warnings: tuple[str, ...]
    tokenizer_digest: str = ""


class VerifiedAdapters:
    """Remembers which files passed the check of their values, over restarts of the engine.

    An entry allows to skip the check at registration only: a load reads, hashes and checks the
    files whatever is remembered.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where the file of entries is; None: entries are kept in memory only."""
        self._path = None if folder is None else folder / _VERIFIED_NAME
        self._by_folder: dict[str, tuple[Signature, VerifiedValues]] = {}
        self._by_cid: dict[str, VerifiedValues] = {}
        if self._path is not None:
            self._load(self._path)

    def find(self, folder: Path, signature: Signature) -> VerifiedValues | None:
        entry = self._by_folder.get(str(folder))
        return entry[1] if entry is not None and entry[0] == signature else None

    def find_cid(self, cid: str) -> VerifiedValues | None:
        return self._by_cid.get(cid)

    def add(self, folder: Path, signature: Signature, values: VerifiedValues) -> None:
        self._by_folder[str(folder)] = (signature, values)
        self._by_cid[values.cid] = values
        if self._path is None:
            return
        line = _encode(str(folder), signature, values)
        try:
            make_private_folder(self._path.parent)
            with open(self._path, "ab", opener=private_opener) as file:
                file.write(line)
        except OSError as error:
            _log.warning("cannot write %s: %s", self._path, error)

    def _load(self, path: Path) -> None:
        try:
            lines = path.read_bytes().splitlines()
        except OSError:
            return
        num_damaged = 0
        for line in lines:
            try:
                folder, files, cid, warnings, tokenizer = json.loads(line)
                signature = tuple((str(n), int(s), int(t), int(i)) for n, s, t, i in files)
                values = VerifiedValues(str(cid), tuple(map(str, warnings)), str(tokenizer))
            except (ValueError, TypeError, RecursionError):
                num_damaged += 1
                continue
            self._by_folder[str(folder)] = (signature, values)
            self._by_cid[values.cid] = values
        if num_damaged or len(lines) > len(self._by_folder) + _MAX_STALE_LINES:
            self._rewrite(path)

    def _rewrite(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        try:
            partial.write_bytes(
                b"".join(_encode(folder, *entry) for folder, entry in self._by_folder.items())
            )
            partial.replace(path)
        except OSError as error:
            _log.warning("cannot write %s: %s", path, error)


@dataclass(frozen=True, slots=True)
class IdentifiedAdapter:
    """An adapter whose values passed all checks, with its packed image if it was read for that."""

    card: AdapterCard
    loaded: LoadedAdapter | None
    """None: the values of these files were checked before, and nothing was read."""


class AdapterCatalog:
    """Gives folders their CID (inspect, identify) and CIDs their packed image (read)."""

    def __init__(
        self,
        rules: AdapterRules,
        *,
        find_digests: FindDigests = lambda folder: None,
        verified: VerifiedAdapters | None = None,
        workers: Workers = CALLING_THREAD,
    ) -> None:
        """`workers`: threads that take parts of each load; close() ends them."""
        self.rules = rules
        self._workers = workers
        self._loader = FolderLoader(rules, workers)
        self._find_digests = find_digests
        self._verified = verified or VerifiedAdapters()
        self._known: dict[str, AdapterCard] = {}
        self._lock = threading.RLock()

    @property
    def base(self) -> BaseModelInfo:
        return self.rules.base

    def inspect(self, folder: Path) -> AdapterCard | InspectedCard:
        """Check config and header of a folder; refuse an adapter that must not be served.

        Reads no weights. The adapter is registered if its CID is on record: in the store that made
        the folder, or from an earlier check of the same files.
        """
        folder = open_folder(folder.expanduser())
        signature = _signature(folder)
        found = self._loader.inspect(folder)
        card = self._card(found)
        values = self._verified.find(folder, signature) or self._recorded(folder, found)
        return card if values is None else self.adopt(_identified(card, values))

    def identify(self, folder: Path) -> IdentifiedAdapter:
        """Register a folder after a check of its values, which reads and packs the weights.

        The weights are not read if their values were checked before.
        """
        folder = open_folder(folder.expanduser())
        signature = _signature(folder)
        found = self._loader.inspect(folder)
        values, loaded = self._verified.find(folder, signature), None
        if values is None:
            values, loaded = self._check_values(folder, found)
            self._verified.add(folder, signature, values)
        card = self.adopt(_identified(self._card(found), values))
        return IdentifiedAdapter(card, loaded)

    def adopt(self, card: AdapterCard) -> AdapterCard:
        """Make an adapter known by its card alone; a load checks that the files fit the card."""
        with self._lock:
            self._known[card.cid] = card
        return card

    def forget(self, cid: str) -> None:
        """Remove an adapter from the catalog; do nothing for an unknown CID."""
        with self._lock:
            self._known.pop(cid, None)

    def verify(self, cid: str) -> AdapterCard:
        """Read, hash and check an adapter's folder; refuse it if its files were replaced."""
        known = self.get(cid)
        self._load(known)
        return known

    def examine(self, folder: Path) -> Report:
        """Return the doctor's report on a folder; a refusal is a finding."""
        rules = self.rules
        return examine(
            folder,
            rules.base,
            max_rank=rules.max_rank,
            strict_base=rules.strict_base,
            base_weights=rules.base_weights,
        )

    def get(self, cid: str) -> AdapterCard:
        try:
            return self._known[cid]
        except KeyError:
            raise AdapterNotFound(f"No adapter with content id {cid} is known here.") from None

    def known(self) -> list[AdapterCard]:
        with self._lock:
            return list(self._known.values())

    def read(self, cid: str) -> AdapterImage:
        """Read, hash, check and pack an adapter; called on the loader's threads."""
        return self._load(self.get(cid))

    def close(self) -> None:
        self._workers.close()

    def _card(self, found: InspectedAdapter) -> InspectedCard:
        planned = self._loader.plan(found)
        num_tokens = num_tokens_of(found.extras, EMBEDDING) or self.base.vocab_size
        return InspectedCard(
            path=str(found.path),
            num_bytes=planned.layout.num_elements * self.rules.packing.dtype.itemsize,
            rank=planned.max_rank,
            warnings=found.warnings,
            invocation_tokens=found.config.invocation_tokens,
            only_alone=found.only_alone,
            vocab_size=num_tokens if num_tokens != self.base.vocab_size else 0,
        )

    def _recorded(self, folder: Path, found: InspectedAdapter) -> VerifiedValues | None:
        """Return the CID by the store's record, with the warnings of an earlier check, if any."""
        digests = self._find_digests(folder)
        if digests is None:
            return None
        cid = compute_cid(make_manifest(found.config.canonical(), digests))
        return self._verified.find_cid(cid) or VerifiedValues(cid, (), digest_of_files(digests))

    def _check_values(
        self, folder: Path, found: InspectedAdapter
    ) -> tuple[VerifiedValues, LoadedAdapter | None]:
        recorded = self._recorded(folder, found)
        values = None if recorded is None else self._verified.find_cid(recorded.cid)
        if values is not None:
            return values, None
        loaded = self._loader.load(folder)
        values = VerifiedValues(loaded.image.cid, loaded.warnings, loaded.tokenizer_digest)
        return values, loaded

    def _load(self, known: AdapterCard) -> AdapterImage:
        folder = open_folder(Path(known.path))
        if folder != Path(known.path):
            raise AdapterRefused(
                "changed_on_disk",
                f"{known.path} was replaced by a link to another folder.",
                fix="Load the adapter again, from the folder that it is in now.",
            )
        image = self._loader.load(folder).image
        if image.cid != known.cid:
            raise AdapterRefused(
                "changed_on_disk",
                f"{known.path} no longer holds {known.cid} but {image.cid}: its files were "
                "replaced.",
                fix="Send the request again to use the new files.",
            )
        return image


def _identified(card: InspectedCard, values: VerifiedValues) -> AdapterCard:
    return card.identified(values.cid, values.warnings, values.tokenizer_digest)


def _encode(folder: str, signature: Signature, values: VerifiedValues) -> bytes:
    fields = [folder, signature, values.cid, values.warnings, values.tokenizer_digest]
    return json.dumps(fields).encode() + b"\n"


def _signature(folder: Path) -> Signature:
    files = []
    with refusing_os_errors(folder), os.scandir(folder) as entries:
        for entry in entries:
            # Links that lead nowhere are refused by the inspection, if they are needed.
            with suppress(OSError):
                if entry.is_file():
                    found = entry.stat()
                    files.append((entry.name, found.st_size, found.st_mtime_ns, found.st_ino))
    return tuple(sorted(files))
