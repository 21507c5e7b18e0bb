"""The files of an adapter folder, opened without leaving it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loramux.adapters.peft.refusals import RefusalCode
from loramux.errors import AdapterNotFound, AdapterRefused


def open_folder(folder: Path) -> Path:
    """The folder's real path."""
    if not folder.is_dir():
        raise AdapterNotFound(
            f"No adapter folder at {folder}. Give the folder that holds adapter_config.json."
        )
    return folder.resolve()


def find_file(folder: Path, name: str) -> Path | None:
    """The real path of `name`, None when the folder has no such entry."""
    entry = folder / name
    if not entry.is_symlink() and not entry.exists():
        return None
    with refusing_os_errors(entry):
        path = entry.resolve(strict=True)
    if not path.is_relative_to(folder) and not is_hub_blob(folder, path):
        raise AdapterRefused(
            RefusalCode.LINK_OUTSIDE,
            f"{name} is a link to a file outside the adapter's folder.",
            fix="Copy the file itself into the folder.",
        )
    if not path.is_file():
        raise AdapterRefused(
            RefusalCode.UNREADABLE,
            f"{name} is not a regular file.",
            fix="Put the file that PEFT's save_pretrained wrote in its place.",
        )
    return path


def is_hub_blob(folder: Path, path: Path) -> bool:
    """The Hugging Face cache keeps snapshots/<commit>/... as links into blobs/ beside it."""
    return any(
        parent.name == "snapshots"
        and parent.parent.name.startswith("models--")
        and path.parent == parent.parent / "blobs"
        for parent in folder.parents
    )


@contextmanager
def refusing_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    # resolve() reports a loop of links as RuntimeError before Python 3.13.
    except (OSError, RuntimeError) as error:
        detail = getattr(error, "strerror", None) or error
        raise AdapterRefused(
            RefusalCode.UNREADABLE,
            f"{path.name} cannot be read: {detail}.",
            fix="Check that the file exists and that the server's user may read it.",
        ) from error
