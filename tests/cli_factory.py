"""The command line on a registry and a store of its own."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer import testing
from typer.testing import CliRunner, Result

from loramux.cli.main import app
from loramux.registry.registry import Registry
from loramux.store.library import AdapterLibrary
from loramux.store.store import ContentStore
from tests.registry_factory import write_empty_registry
from tests.store_factory import write_tiny

NAME = "alice/flagger"
# Wide, so that tables are not wrapped.
ENVIRONMENT = {"COLUMNS": "240", "LORAMUX_REGISTRY": "", "LORAMUX_DATA": ""}

# Each call of a runner would build all commands from the signatures of their functions once more,
# which takes longer than most commands run.
testing._get_command = functools.cache(testing._get_command)


class Shell:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"

    def run(self, *arguments: object, input: str | None = None) -> Result:
        words = [str(argument) for argument in (*arguments, "--data", self.data)]
        return self.run_bare(*words, input=input)

    def run_bare(self, *arguments: object, input: str | None = None) -> Result:
        words = list(map(str, arguments))
        result = CliRunner().invoke(app, words, env=ENVIRONMENT, input=input)
        is_clean = result.exception is None or isinstance(result.exception, SystemExit)
        assert is_clean, "a traceback would have been shown"
        return result

    def ok(self, *arguments: object) -> str:
        result = self.run(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *arguments: object) -> Any:
        return json.loads(self.ok(*arguments, "--json"))

    def adapter(self, seed: int = 0) -> Path:
        return write_tiny(self.folder / f"adapter-{seed}", seed)

    def push(self, reference: str, seed: int = 0) -> str:
        """Return the CID."""
        if not self.data.exists():
            write_empty_registry(self.data / "registry.db")
        self.ok("push", self.adapter(seed), reference)
        return str(self.in_library(lambda library: library.registry.resolve(reference).cid))

    def in_library(self, question: Callable[[AdapterLibrary], Any]) -> Any:
        with Registry(self.data / "registry.db") as registry:
            return question(AdapterLibrary(ContentStore(self.data / "store"), registry))

    def targets(self, alias: str = "prod") -> list[tuple[str, int]]:
        info = self.in_library(lambda library: library.registry.show(NAME))
        state = next(state for state in info.aliases if state.alias == alias)
        return [(target.version, target.weight) for target in state.targets]

    def blobs(self) -> list[Path]:
        return sorted((self.data / "store" / "blobs").glob("*/*"))
