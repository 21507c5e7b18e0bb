"""The standard cache folder of huggingface_hub, as far as one repository is concerned."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from loramux.base.progress import size_text
from loramux.errors import ModelNotFetched, UnsupportedModel
from loramux.models.folder import read_config, weight_files
from loramux.models.hub.files import SPLIT_GGUF, TOKENIZER_FILES, RemoteFile
from loramux.types.hub_id import HubId

# Space that must stay free besides the download.
MARGIN_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class RepositoryCache:
    """Finds and stores files of a repository; see "cache system" in huggingface_hub's manual."""

    hub_id: HubId

    @property
    def root(self) -> Path:
        return Path(constants.HF_HUB_CACHE)

    @property
    def folder(self) -> Path:
        return self.root / self._folder_name

    @property
    def _folder_name(self) -> str:
        return "--".join(("models", *self.hub_id.repository.split("/")))

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / str(file.blob)

    def partial(self, file: RemoteFile) -> Path:
        """Where the content is until it is complete."""
        return self.folder / "blobs" / f"{file.blob}.incomplete"

    def lock(self, file: RemoteFile) -> Path:
        return self.root / ".locks" / self._folder_name / f"{file.blob}.lock"

    def commit(self) -> str | None:
        """Return the commit that the revision was at when it was last fetched."""
        if self.hub_id.is_commit:
            return self.hub_id.revision
        try:
            return self._ref.read_text().strip()
        except OSError:
            return None

    def remember(self, commit: str, *, replace: bool) -> None:
        """Keep the commit of the revision, so that the model is found without the hub."""
        known = self.commit()
        if known == commit or (known is not None and not replace):
            return
        # With a read-only cache the hub is asked again next time.
        with contextlib.suppress(OSError):
            self._ref.parent.mkdir(parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(dir=self._ref.parent, prefix=".partial-")
            with os.fdopen(descriptor, "w") as file:
                file.write(commit)
            os.replace(partial, self._ref)

    @property
    def _ref(self) -> Path:
        return self.folder / "refs" / self.hub_id.revision

    def find(self, *, with_weights: bool) -> Path:
        """Return the complete model in the cache, or raise ModelNotFetched with what is missing."""
        return self.find_by(lambda folder: self._complete(folder, with_weights=with_weights))

    def find_by(self, complete: Callable[[Path], Path]) -> Path:
        """Return what `complete` finds in the snapshot; it raises UnsupportedModel without it."""
        commit = self.commit()
        if commit is None or not self.snapshot(commit).is_dir():
            raise ModelNotFetched(f"{self.hub_id} is not in the cache {self.root}.")
        try:
            return complete(self.snapshot(commit))
        except UnsupportedModel as error:
            raise ModelNotFetched(f"{self.hub_id} is not complete in the cache: {error}") from None

    def _complete(self, folder: Path, *, with_weights: bool) -> Path:
        name = self.hub_id.file
        if name is None and not any(folder.glob("*.safetensors")):
            found = [path for path in folder.rglob("*.gguf") if not SPLIT_GGUF.search(path.name)]
            if len(found) == 1:
                return found[0]
        if name is not None:
            if not (folder / name).is_file():
                raise UnsupportedModel(f"{name} is missing.")
            return folder / name
        read_config(folder)
        if with_weights:
            weight_files(folder)
            if not any((folder / one).is_file() for one in TOKENIZER_FILES):
                raise UnsupportedModel("tokenizer.json is missing.")
        return folder

    def partial_bytes(self, file: RemoteFile) -> int:
        """How much of a file is here already."""
        if file.blob is None:
            return 0
        for path in (self.blob(file), self.partial(file)):
            with contextlib.suppress(OSError):
                return min(path.stat().st_size, file.size_bytes)
        return 0

    def check_space(self, files: Iterable[RemoteFile]) -> None:
        """Raise ModelNotFetched if the disk cannot hold these files."""
        needed = sum(file.size_bytes - self.partial_bytes(file) for file in files)
        place = next(path for path in (self.root, *self.root.parents) if path.exists())
        free = shutil.disk_usage(place).free
        if needed + MARGIN_BYTES > free:
            raise ModelNotFetched(
                f"{self.hub_id} needs {size_text(needed)} more, and {size_text(MARGIN_BYTES)} to "
                f"spare, but the disk of {self.root} has {size_text(free)} free. Free some space, "
                "or set HF_HOME to a folder on another disk."
            )
