"""What one caller sees of the adapters: its tenant's, and those that are shared with it.

What a caller does not see is refused by name alone, before anything is looked up: a foreign adapter
and a missing one take the same path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from loramux.errors import AdapterNotFound, InvalidRequest
from loramux.registry.access import NO_ACCESS, AccessSnapshot
from loramux.registry.keys import matches
from loramux.registry.names import (
    DEFAULT_TENANT,
    NAME,
    AdapterName,
    NameReference,
    parse_name_reference,
)
from loramux.registry.records import VersionRecipe
from loramux.types.caller import ANONYMOUS, Caller

LOCAL_SOURCE = "local"


@dataclass(frozen=True, slots=True)
class View:
    """Decides by names, without a query."""

    caller: Caller = ANONYMOUS
    home_tenant: str = DEFAULT_TENANT
    access: AccessSnapshot = NO_ACCESS
    shared_names: tuple[str, ...] = ()
    """Patterns of the given names that all tenants may use."""
    has_fetched: Callable[[str, str], bool] = lambda tenant, name: False
    """Whether requests of a tenant have named an adapter by its source."""

    @property
    def is_confined(self) -> bool:
        """Whether the caller sees only what belongs to its tenant or is shared with it."""
        return not self.caller.is_operator

    @property
    def is_whole(self) -> bool:
        """Whether the caller sees everything."""
        return self.caller.is_operator and self.caller.adapters is None

    @property
    def tenant(self) -> str:
        return self.caller.tenant or self.home_tenant

    # Names of the registry

    def homes(self, text: str) -> Iterator[str | None]:
        """Yield the tenants in which a reference without one is looked up; None: the home."""
        tenant = self.caller.tenant
        if tenant and tenant != self.home_tenant and "/" not in text and NAME.fullmatch(tenant):
            yield tenant
        yield None

    def allows(self, reference: NameReference) -> bool:
        """Whether the caller may use what the reference names, if it exists.

        Of an adapter of which versions are shared, the reference must name one of these.
        """
        adapter = reference.adapter
        if not matches(self.caller.adapters, str(adapter), adapter.name):
            return False
        if self.caller.is_operator or adapter.tenant == self.tenant:
            return True
        shared = self.access.shared_versions(adapter, self.tenant)
        return "" in shared or (reference.version is not None and str(reference.version) in shared)

    def allows_name(self, text: str) -> bool:
        """Whether the caller may use a full name of the registry, such as acme/sql@1.4.2."""
        try:
            return self.allows(parse_name_reference(text, home_tenant=self.home_tenant))
        except InvalidRequest:
            return False

    def sees(self, adapter: AdapterName) -> bool:
        """Whether the caller sees an adapter, or at least one version of it, if it exists."""
        if self.allows(NameReference(adapter)):
            return True
        is_named = matches(self.caller.adapters, str(adapter), adapter.name)
        return is_named and bool(self.access.shared_versions(adapter, self.tenant))

    def shared_adapters(self) -> list[AdapterName]:
        """Return the other tenants' adapters of which all versions are shared with the caller."""
        shared = [
            adapter
            for adapter in self.access.shares
            if adapter.tenant != self.tenant and self.allows(NameReference(adapter))
        ]
        return sorted(shared)

    def shared_versions(self, adapter: AdapterName) -> frozenset[str] | None:
        """Return the versions that the caller sees of an adapter; None: all of them."""
        if self.caller.is_operator or adapter.tenant == self.tenant:
            return None
        versions = self.access.shared_versions(adapter, self.tenant)
        return None if "" in versions else versions

    def has_parts(self, recipe: VersionRecipe | None, owner: str | None) -> bool:
        """Whether the tenant of a recipe may still use all its parts; operators always may."""
        if recipe is None or owner is None or self.caller.is_operator:
            return True
        return all(
            part.adapter is None
            or part.adapter.tenant == owner
            or self.access.is_shared(part.adapter, owner, part.version)
            for part in recipe.parts
        )

    def parse(self, text: str) -> NameReference:
        """Parse the name of an adapter that the caller may change; raise AdapterNotFound.

        A name without a tenant is one of the caller's tenant.
        """
        home = self.tenant if self.is_confined else self.home_tenant
        reference = parse_name_reference(text, home_tenant=home)
        adapter = reference.adapter
        is_own = self.caller.is_operator or adapter.tenant == self.tenant
        if not (is_own and self.allows(reference)):
            raise unknown_adapter(adapter)
        return reference

    # Given names

    def sees_given(self, name: str) -> bool:
        """Whether the caller may use a given name, if it exists."""
        tenant, slash, rest = name.partition("/")
        is_qualified = bool(slash and NAME.fullmatch(tenant) and NAME.fullmatch(rest))
        owner = tenant if is_qualified else self.home_tenant
        full = name if is_qualified else f"{owner}/{name}"
        if not matches(self.caller.adapters, full, rest if is_qualified else name):
            return False
        if self.caller.is_operator or owner == self.tenant:
            return True
        is_shared = any(fnmatchcase(name, pattern) for pattern in self.shared_names)
        return is_shared or self.has_fetched(self.tenant, name)

    def may_fetch(self, source: str) -> bool:
        """Whether the caller may name adapters by a source such as hub, s3 or local."""
        if self.caller.adapters is not None:
            # A source has no name that a pattern could match.
            return False
        return self.caller.is_operator or source != LOCAL_SOURCE

    def visible(self, given: Iterable[str], registered: Iterable[str]) -> list[str]:
        """Return the names that the caller sees: given ones, and full names of the registry."""
        names = [name for name in given if self.sees_given(name)]
        names += [name for name in registered if self.allows_name(name)]
        return list(dict.fromkeys(names))


WHOLE_VIEW = View()


def unknown_adapter(adapter: AdapterName) -> AdapterNotFound:
    """Return the error of an adapter that is not there, or that the caller does not see."""
    return AdapterNotFound(f"No adapter {adapter} is in the registry. Push it first.")
