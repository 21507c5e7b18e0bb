"""The folders of pushed adapters that are still read."""

from __future__ import annotations

from loramux.server.context import HostContext


def folders_in_use(context: HostContext) -> set[str]:
    """Return the folders from which adapters with a name are read."""
    found = set()
    for host in context.hosts:
        for given in host.names.given():
            found.add(given.path)
            card = None if given.cid is None else host.backend.adapters.get(given.cid)
            if card is not None:
                found.add(card.path)
    return found


def forget_unloaded(context: HostContext) -> None:
    """Remove the files of pushed adapters whose names were unloaded."""
    names = {given.name for host in context.hosts for given in host.names.given()}
    context.pushes.forget_all_but(names, folders_in_use(context))
