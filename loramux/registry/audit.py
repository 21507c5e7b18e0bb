"""The audit log: one entry for each change, chained by digests and signed where there is a key.

An entry of a change of the registry is written in the transaction of the change. The digest of an
entry covers all its fields and the digest of the entry before it, so that a changed or removed
entry is found. The signature of an entry covers its digest, so that only a holder of the key can
write the entries after it anew. The last entries can be cut off together with the recorded end of
the log; an anchor, a copy of the end that is kept elsewhere, finds that.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Row

from loramux.base.canonical_json import canonical_json
from loramux.base.private_files import private_opener
from loramux.base.signing import key_id_of
from loramux.base.token_bucket import Clock, TokenBucket
from loramux.errors import InvalidRequest, LoramuxError
from loramux.registry.database import Database
from loramux.registry.rows import audit as rows

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

FORMAT = "loramux-audit/1"
BATCH = 1000
MAX_TARGET, MAX_REASON, MAX_ADDRESS, MAX_TENANT = 512, 512, 128, 128
# Refused changes cost a client nothing: at most these are recorded at once, and in the long run.
REFUSALS_AT_ONCE, REFUSALS_PER_S = 256, 0.1
MAX_LIMIT = 10_000

_log = logging.getLogger(__name__)


class Action(StrEnum):
    """The changes that the log records."""

    PUSH = "push"
    PROMOTE = "promote"
    SPLIT = "split"
    ROLLBACK = "rollback"
    DELETE = "delete"
    SHARE = "share"
    UNSHARE = "unshare"
    KEY_CREATE = "key.create"
    KEY_ROTATE = "key.rotate"
    KEY_REVOKE = "key.revoke"
    KEY_LIMITS = "key.limits"
    TENANT_SET = "tenant.set"
    SIGNER_ADD = "signer.add"
    SIGNER_REMOVE = "signer.remove"
    PIN = "pin"
    UNPIN = "unpin"
    LOAD = "load"
    UNLOAD = "unload"
    SELECT = "select"
    """The adapters of requests to llama.cpp's routes that name none."""
    GC = "gc"


class Result(StrEnum):
    OK = "ok"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Actor:
    """The tenant, key and address of the caller that changes something."""

    tenant: str = ""
    """Empty: not bound to a tenant."""
    key_id: str = ""
    """Empty: without a key."""
    address: str = ""
    """The client's address, the user of a command, or the setting of a watched folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One change, or the refusal of one."""

    number: int
    """1 for the first entry, then without a gap."""
    created_at: float
    actor: Actor
    action: str
    tenant: str
    """The tenant whose adapters, keys or limits are changed; empty: no tenant's."""
    target: str
    details: Mapping[str, Any]
    result: str
    reason: str
    """Why it was refused; empty if it was done."""
    previous: str
    """The digest of the entry before; empty for the first one."""
    key_id: str
    """The id of the key that signed; empty: unsigned."""

    def digest(self) -> str:
        return hashlib.sha256(canonical_json({"format": FORMAT, **asdict(self)})).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """An entry as the registry stores it."""

    entry: AuditEntry
    digest: str
    signature: str
    """The Ed25519 signature of the digest in Base64; empty: unsigned."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.entry), "digest": self.digest, "signature": self.signature}


@dataclass(frozen=True, slots=True)
class Head:
    """The end of the log: the number and digest of its last entry."""

    number: int
    digest: str

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "number": self.number, "digest": self.digest})


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The result of a verification."""

    num_entries: int
    num_signed: int
    """Entries whose signature was verified."""
    head: Head
    faults: tuple[str, ...]


@dataclass(slots=True)
class Event:
    """What an entry will say of a change, which adds what is known only when it is done."""

    action: Action
    tenant: str
    target: str
    details: dict[str, Any] = field(default_factory=dict)


class Signer:
    """Signs entries with the key of a server."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.key_id = key_id_of(key.public_key())

    def sign(self, digest: str) -> str:
        return base64.b64encode(self._key.sign(_signed_bytes(digest))).decode()


class AuditLog:
    """Appends entries of one actor to the log, and reads it."""

    def __init__(
        self,
        database: Database,
        *,
        clock: Clock = time.time,
        signer: Signer | None = None,
        anchor: Path | None = None,
    ) -> None:
        """`anchor`: a file outside of the database that gets the end of the log."""
        self._database = database
        self._clock = clock
        self._signer = signer
        self._anchor = None if anchor is None else AnchorFile(anchor)
        self._refusals = TokenBucket(REFUSALS_AT_ONCE, REFUSALS_PER_S, time.monotonic)
        self._num_unrecorded = 0
        self._lock = threading.Lock()

    def append(
        self,
        connection: Connection,
        actor: Actor,
        event: Event,
        error: Exception | None = None,
    ) -> Head:
        """Add an entry in the caller's transaction, which must not lock anything else after it."""
        number, previous = rows.lock_head(connection)
        entry = AuditEntry(
            number=number + 1,
            created_at=self._clock(),
            actor=Actor(
                _clean(actor.tenant, MAX_TENANT),
                actor.key_id,
                _clean(actor.address, MAX_ADDRESS),
            ),
            action=event.action,
            tenant=_clean(event.tenant, MAX_TENANT),
            target=_clean(event.target, MAX_TARGET),
            details=_clean_details(event.details),
            result=Result.OK if error is None else Result.REFUSED,
            reason="" if error is None else _clean(str(error), MAX_REASON),
            previous=previous,
            key_id="" if self._signer is None else self._signer.key_id,
        )
        digest = entry.digest()
        signature = "" if self._signer is None else self._signer.sign(digest)
        rows.add_entry(connection, _values(entry, digest, signature))
        return Head(entry.number, digest)

    def record(self, actor: Actor, event: Event) -> None:
        """Add the entry of a change outside of the registry, which was done."""
        with self._database.writing() as connection:
            head = self.append(connection, actor, event)
        self.keep_anchor(head)

    def record_refusal(self, actor: Actor, event: Event, error: Exception) -> None:
        """Add the entry of a change that was refused, unless too many were refused lately.

        The next entry of a refusal says how many were not recorded. An error is recorded once.
        """
        if getattr(error, "is_audited", False):
            return
        with self._lock:
            if not self._refusals.try_take():
                self._num_unrecorded += 1
                return
            num_unrecorded, self._num_unrecorded = self._num_unrecorded, 0
        if num_unrecorded:
            event = replace(event, details={**event.details, "not_recorded": num_unrecorded})
        try:
            with self._database.writing() as connection:
                head = self.append(connection, actor, event, error)
        # The caller gets the reason of the refusal, not that of the log.
        except LoramuxError as failure:
            _log.warning("The refusal of %s is not in the audit log: %s", event.action, failure)
            return
        if isinstance(error, LoramuxError):
            error.is_audited = True
        self.keep_anchor(head)

    def keep_anchor(self, head: Head) -> None:
        """Write the end of the log to the anchor file, if there is one."""
        if self._anchor is not None:
            self._anchor.write(head)

    def head(self) -> Head:
        with self._database.reading() as connection:
            return Head(*(rows.read_head(connection) or (0, "")))

    def entries(
        self,
        *,
        tenant: str | None = None,
        action: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[StoredEntry]:
        """Return entries, the newest first; `before`: only those with a smaller number."""
        if not 1 <= limit <= MAX_LIMIT:
            raise InvalidRequest(f"limit must be 1 to {MAX_LIMIT}.", param="limit")
        with self._database.reading() as connection:
            found = rows.find_entries(
                connection, tenant=tenant, action=action, before=before, limit=limit
            )
        return list(map(_stored, found))

    def all_entries(self) -> Iterator[StoredEntry]:
        """Yield all entries of one snapshot, the oldest first."""
        with self._database.reading() as connection:
            yield from map(_stored, rows.read_all(connection, batch=BATCH))

    def verify(
        self, *, keys: Sequence[Ed25519PublicKey] = (), anchors: Iterable[Head] = ()
    ) -> AuditReport:
        """Check the chain, the signatures of these keys, and that each anchor is in the log."""
        wanted = {anchor.number: anchor for anchor in anchors if anchor.number}
        checker = _Checker(keys)
        with self._database.reading() as connection:
            for row in rows.read_all(connection, batch=BATCH):
                stored = _stored(row)
                checker.add(stored)
                anchor = wanted.pop(stored.entry.number, None)
                if anchor is not None and anchor.digest != stored.digest:
                    checker.faults.append(f"Entry {anchor.number} is not the one of the anchor.")
            head = rows.read_head(connection)
        checker.check_head(head)
        checker.faults += [
            f"The anchor names entry {number}, which is missing: the end of the log was cut off."
            for number in sorted(wanted)
        ]
        return AuditReport(
            num_entries=checker.num_entries,
            num_signed=checker.num_signed,
            head=checker.head,
            faults=tuple(checker.faults),
        )


class _Checker:
    """Follows the chain entry by entry, and collects faults."""

    def __init__(self, keys: Sequence[Ed25519PublicKey]) -> None:
        self._keys = {key_id_of(key): key for key in keys}
        self.faults: list[str] = []
        self.head = Head(0, "")
        self.num_entries = 0
        self.num_signed = 0

    def add(self, stored: StoredEntry) -> None:
        entry = stored.entry
        expected = self.head.number + 1
        if entry.number != expected:
            text = (
                str(expected)
                if entry.number == expected + 1
                else (f"{expected} to {entry.number - 1}")
            )
            self.faults.append(f"Before entry {entry.number}, {text} is missing.")
        elif entry.previous != self.head.digest:
            self.faults.append(f"Entry {entry.number} does not follow the one before it.")
        if _digest_of(entry) != stored.digest:
            self.faults.append(f"Entry {entry.number} was changed.")
        self._check_signature(stored)
        self.num_entries += 1
        self.head = Head(entry.number, stored.digest)

    def check_head(self, head: tuple[int, str] | None) -> None:
        if head != (self.head.number, self.head.digest):
            recorded = "no entry" if head is None else f"entry {head[0]}"
            self.faults.append(
                f"The log ends with entry {self.head.number}, and its recorded end is {recorded}: "
                "entries were cut off, or added by another program."
            )

    def _check_signature(self, stored: StoredEntry) -> None:
        key_id = stored.entry.key_id
        if not self._keys or not key_id:
            return
        key = self._keys.get(key_id)
        if key is None:
            self.faults.append(
                f"Entry {stored.entry.number} was signed with another key, {key_id}."
            )
        elif is_signed(stored.digest, stored.signature, key):
            self.num_signed += 1
        else:
            self.faults.append(f"The signature of entry {stored.entry.number} is not valid.")


class AnchorFile:
    """A file with the end of the log as this process has last seen it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._number = 0

    def write(self, head: Head) -> None:
        with self._lock:
            if head.number <= self._number:
                return
            self._number = head.number
            part = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            try:
                with open(part, "w", encoding="utf-8", opener=private_opener) as file:
                    file.write(head.to_json() + "\n")
                os.replace(part, self._path)
            # The change is done; a missing anchor only weakens a later verification.
            except OSError as error:
                _log.warning("The anchor of the audit log is not written: %s", error)


def read_anchor(path: Path) -> Head:
    """Return the end of the log that a file records; raise InvalidRequest."""
    try:
        value = json.loads(path.read_text("utf-8"))
        if value["format"] != FORMAT:
            raise ValueError
        return Head(int(value["number"]), str(value["digest"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is no anchor of an audit log.") from error


def is_signed(digest: str, signature: str, key: Ed25519PublicKey) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(base64.b64decode(signature, validate=True), _signed_bytes(digest))
    except (InvalidSignature, binascii.Error, ValueError):
        return False
    return True


def _signed_bytes(digest: str) -> bytes:
    """Return the format is part of them, so that the key cannot be made to sign anything else."""
    return f"{FORMAT}\n{digest}".encode()


def _digest_of(entry: AuditEntry) -> str:
    try:
        return entry.digest()
    # Values that have no canonical form were not written by this program.
    except (ValueError, TypeError, RecursionError):
        return ""


def _clean(text: str, max_characters: int) -> str:
    """Return text that every database stores and every terminal shows."""
    cleaned = "".join(one if one.isprintable() else "\ufffd" for one in text)
    cleaned = cleaned.encode("utf-8", "replace").decode()
    return cleaned if len(cleaned) <= max_characters else cleaned[: max_characters - 1] + "…"


def _clean_details(details: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _clean_value(value) for name, value in details.items() if value is not None}


def _clean_value(value: Any) -> Any:
    if isinstance(value, str):
        return _clean(value, MAX_TARGET)
    try:
        canonical_json(value)
    # NaN and integers over 2^53 were refused, and the entry says what was refused.
    except (ValueError, TypeError):
        return _clean(str(value), MAX_TARGET)
    return value


def _values(entry: AuditEntry, digest: str, signature: str) -> dict[str, object]:
    values = asdict(entry)
    actor = values.pop("actor")
    return {
        **values,
        "actor_tenant": actor["tenant"],
        "actor_key": actor["key_id"],
        "address": actor["address"],
        "digest": digest,
        "signature": signature,
    }


def _stored(row: Row[Any]) -> StoredEntry:
    entry = AuditEntry(
        number=row.number,
        created_at=row.created_at,
        actor=Actor(row.actor_tenant, row.actor_key, row.address),
        action=row.action,
        tenant=row.tenant,
        target=row.target,
        details=row.details,
        result=row.result,
        reason=row.reason,
        previous=row.previous,
        key_id=row.key_id,
    )
    return StoredEntry(entry=entry, digest=row.digest, signature=row.signature)
