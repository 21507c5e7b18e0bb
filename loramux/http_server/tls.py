"""The TLS context of new connections, made anew when its files change."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Sequence

from loramux.config.connections import ConnectionConfig
from loramux.errors import InvalidRequest

_log = logging.getLogger(__name__)
_Stamp = Sequence[tuple[int, int, int] | None]


class Certificates:
    """Files of a certificate and its key; open connections keep those that they began with."""

    def __init__(self, config: ConnectionConfig) -> None:
        """Raise InvalidRequest if the files cannot be used."""
        self._config = config
        self._stamp = self._read_stamp()
        try:
            self._context = self._load()
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequest(
                f"The certificate {config.ssl_certfile} cannot be used: {_reason(error)}.",
                param="ssl_certfile",
            ) from error

    def context(self) -> ssl.SSLContext:
        """Return the context of the present files, or the last one that could be made."""
        stamp = self._read_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._context = self._load()
                _log.info("The certificate was read again.")
            # Half of the files may be new; the next change is looked at again.
            except (OSError, ssl.SSLError) as error:
                _log.warning(
                    "The changed certificate cannot be used, and the old one stays: %s",
                    _reason(error),
                )
        return self._context

    def _load(self) -> ssl.SSLContext:
        config = self._config
        assert config.ssl_certfile is not None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # An empty password fails; without one, OpenSSL would ask on the terminal.
        password = config.ssl_keyfile_password or ""
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: password)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
        context.verify_mode = ssl.VerifyMode(config.client_certificates)
        return context

    def _read_stamp(self) -> _Stamp:
        config = self._config
        paths = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        return [None if path is None else _stamp_of(path) for path in paths]


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "its key does not fit or has another password").lower()
    return str(error)
