"""What a name in a request means: the base, an adapter given by name, or one of the registry."""

from __future__ import annotations

import re
from dataclasses import dataclass

from loramux.adapters.identity import CID_PREFIX, is_digest_start
from loramux.backend import AdapterCard
from loramux.errors import AdapterNotFound, AdapterRefused, InvalidRequest
from loramux.registry.records import Resolved
from loramux.server.context import Context

# ~/.cache/huggingface/hub/models--owner--name/snapshots/…
HUB_CACHE = re.compile(r"models--(?:[^/]+?)--(?P<name>[^/]+)/snapshots/")


@dataclass(frozen=True, slots=True)
class Asker:
    """Whose request it is: decides where a bare name is looked for, and on which side of a split
    it falls."""

    tenant: str = ""
    user: str | None = None

    @property
    def sticky_key(self) -> str | None:
        return self.user or self.tenant or None


@dataclass(frozen=True, slots=True)
class Named:
    adapter: str | None
    """The name by which the engine knows it; None: the base."""
    resolved: Resolved | None = None
    """What the registry said; None: it was not asked."""


NOBODY = Asker()


async def find_named(
    context: Context,
    text: str,
    *,
    param: str,
    asker: Asker = NOBODY,
    own_base_only: bool = False,
) -> Named | None:
    """None: nothing here is called so. A registry's adapter is known to the engine afterwards.

    own_base_only: one that records another base's name is refused, even if its shapes would fit.
    """
    if text in context.base_names:
        return Named(None)
    if is_given(context, text):
        return Named(text)
    resolved = await _resolve(context, text, param, asker)
    if resolved is None or context.registry is None:
        return _find_by_cid(context, text, param)
    if own_base_only:
        _require_own_base(context, resolved)
    await context.registry.make_known(context.backend, resolved)
    return Named(resolved.cid, resolved)


def is_given(context: Context, name: str) -> bool:
    """Whether the adapter was given by name, at start or since."""
    return name in context.backend.adapters and not name.startswith(CID_PREFIX)


def given_adapters(context: Context) -> dict[str, AdapterCard]:
    """Without those that the engine knows by their CID alone."""
    return {
        name: card for name, card in context.backend.adapters.items() if is_given(context, name)
    }


def full_name(resolved: Resolved) -> str:
    """With its version; a CID alone has no name."""
    if resolved.name is None:
        return resolved.cid
    return f"{resolved.tenant}/{resolved.name}@{resolved.version}"


def short_base_name(name: str) -> str:
    """Without owner, folders or the hub cache's layout."""
    path = name.replace("\\", "/").rstrip("/")
    cached = HUB_CACHE.search(path)
    return (cached["name"] if cached else path.rsplit("/", 1)[-1]).lower()


async def _resolve(context: Context, text: str, param: str, asker: Asker) -> Resolved | None:
    if context.registry is None:
        return None
    try:
        return await context.registry.resolve(
            text, sticky_key=asker.sticky_key, tenant=asker.tenant
        )
    except AdapterNotFound:
        return None
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param=param) from error


def _require_own_base(context: Context, resolved: Resolved) -> None:
    recorded, card = resolved.base_model, context.backend.card
    if recorded is None:
        return
    own = {short_base_name(name) for name in (card.name, card.path, *context.base_names)}
    if short_base_name(recorded) not in own:
        raise AdapterRefused(
            "other_base",
            f"{full_name(resolved)} was made for the base {recorded[:200]!r}, and this server has "
            f"{context.base_names[0]!r}.",
            fix="Send it to a server of its own base.",
        )


def _find_by_cid(context: Context, text: str, param: str) -> Named | None:
    digits = text.removeprefix(CID_PREFIX)
    if not is_digest_start(digits):
        return None
    given = given_adapters(context)
    found = {
        card.cid: name for name, card in given.items() if card.cid.startswith(CID_PREFIX + digits)
    }
    if len(found) > 1:
        raise InvalidRequest(
            f"{len(found)} content ids begin with {CID_PREFIX}{digits}. Give more digits.",
            param=param,
        )
    return Named(next(iter(found.values()))) if found else None
