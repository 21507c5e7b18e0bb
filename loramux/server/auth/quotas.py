"""Limits of requests per tenant and per API key, counted in the memory of this server.

Nothing here waits or queries: the table is replaced as a whole when limits change in the registry.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from loramux.base.token_bucket import Clock, TokenBucket
from loramux.errors import RateLimited
from loramux.registry.records import RecentUse
from loramux.types.limits import DEFAULT_SETTINGS, LIMITS, NO_LIMITS, Limits, TenantSettings

NO_BUCKETS: Mapping[str, str] = MappingProxyType({})
SECONDS = 60.0
RETRY_CONCURRENT_S = 1.0
_Given = tuple[Mapping[str, TenantSettings], Mapping[str, Limits], Mapping[str, str]]


class Account:
    """What one tenant or one key has used of its limits."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        """Names the tenant or the key in messages."""
        self.limits = Limits()
        self.buckets: dict[str, TokenBucket] = {}
        self.num_running = 0
        self._clock = clock

    def set_limits(self, limits: Limits) -> None:
        self.limits = limits
        for limit in ("requests_per_minute", "tokens_per_minute"):
            value, bucket = getattr(limits, limit), self.buckets.get(limit)
            if value is None:
                self.buckets.pop(limit, None)
            elif bucket is None:
                self.buckets[limit] = TokenBucket(value, value / SECONDS, self._clock)
            else:
                bucket.resize(value, value / SECONDS)

    def check(self, num_prompt_tokens: int, num_answer_tokens: int = 0) -> None:
        """Raise RateLimited if a request may not begin now that may use so many tokens."""
        running = self.limits.concurrent_requests
        if running is not None and self.num_running >= running:
            raise self._refusal("concurrent_requests", running, 0, RETRY_CONCURRENT_S)
        for limit, bucket in self.buckets.items():
            # Tokens in debt refuse even a request whose prompt is not known yet.
            num_tokens = max(num_prompt_tokens + num_answer_tokens, 1)
            amount = 1 if limit == "requests_per_minute" else num_tokens
            wait_s = bucket.wait_s(amount)
            if wait_s:
                value, left = int(bucket.capacity), max(0, math.floor(bucket.level))
                need = f"needs {amount}"
                if num_answer_tokens and limit == "tokens_per_minute":
                    need = _need(num_prompt_tokens, num_answer_tokens, value)
                raise self._refusal(limit, value, left, wait_s, need)

    def begin(self, num_tokens: int) -> None:
        self.num_running += 1
        self.take(num_requests=1, num_tokens=num_tokens)

    def end(self) -> None:
        self.num_running -= 1

    def take(self, *, num_requests: int, num_tokens: int) -> None:
        for limit, amount in (
            ("requests_per_minute", num_requests),
            ("tokens_per_minute", num_tokens),
        ):
            if limit in self.buckets:
                self.buckets[limit].take(amount)

    def _refusal(
        self, limit: str, value: int, left: int, wait_s: float, need: str = ""
    ) -> RateLimited:
        said = f"{self.name} may use {value} {LIMITS[limit]}, and {left} are left"
        if wait_s < math.inf:
            said += f"; try again in {math.ceil(wait_s)} s."
            return RateLimited(said, limit=limit, retry_after_s=wait_s)
        said += f". This request {need}: ask for less, or have the limit raised."
        return RateLimited(said, limit=limit, retry_after_s=None)


class QuotaTable:
    """The accounts of all tenants and keys that have limits, and the settings of tenants.

    replace() may be called from any thread; all else belongs to the thread of the event loop.
    """

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._tenants: dict[str, Account] = {}
        self._keys: dict[str, Account] = {}
        self._buckets: dict[str, Account] = {}
        """Accounts of keys by the first key of which they are rotations."""
        self._settings: Mapping[str, TenantSettings] = {}
        self._key_limits: Mapping[str, Limits] = {}
        self._next: _Given | None = None

    def replace(
        self,
        tenants: Mapping[str, TenantSettings],
        keys: Mapping[str, Limits],
        buckets: Mapping[str, str] = NO_BUCKETS,
    ) -> None:
        """Set the limits of all tenants and keys; running requests and used tokens stay.

        `keys`: the oldest first; `buckets`: the first key of the rotations of each key.
        """
        self._next = (tenants, keys, buckets)

    def _follow(self) -> None:
        """Apply what replace() was given since the last call."""
        if self._next is None:
            return
        (self._settings, self._key_limits, buckets), self._next = self._next, None
        named = {tenant: one.limits for tenant, one in self._settings.items()}
        self._tenants = self._accounts("tenant", named, self._tenants)
        # A key and its rotations share a bucket, with the limits of the newest.
        newest = {buckets.get(key, key): key for key in self._key_limits}
        shared = {bucket: self._key_limits[key] for bucket, key in newest.items()}
        self._buckets = self._accounts("API key", shared, self._buckets)
        for bucket, account in self._buckets.items():
            account.name = f"The API key {newest[bucket]}"
        found = {key: self._buckets.get(buckets.get(key, key)) for key in self._key_limits}
        self._keys = {key: account for key, account in found.items() if account is not None}

    def _accounts(
        self, kind: str, limits: Mapping[str, Limits], known: Mapping[str, Account]
    ) -> dict[str, Account]:
        accounts = {}
        for name, one in limits.items():
            if one.is_rate_limited:
                account = known.get(name) or Account(f"The {kind} {name}", self._clock)
                account.set_limits(one)
                accounts[name] = account
        return accounts

    def recall(self, uses: Iterable[RecentUse]) -> None:
        """Take what was used just before the start of this server from the buckets."""
        for use in uses:
            for account in self._of(use.tenant, use.api_key_id):
                account.take(num_requests=use.num_requests, num_tokens=use.num_tokens)

    def settings_of(self, tenant: str) -> TenantSettings:
        self._follow()
        return self._settings.get(tenant, DEFAULT_SETTINGS)

    def limits_of_key(self, api_key_id: str) -> Limits:
        self._follow()
        return self._key_limits.get(api_key_id, NO_LIMITS)

    def open(self, tenant: str, api_key_id: str | None) -> Admission | None:
        """Return the admission of a new request, or None if no limit applies to it."""
        accounts = self._of(tenant, api_key_id)
        return Admission(accounts) if accounts else None

    def _of(self, tenant: str, api_key_id: str | None) -> tuple[Account, ...]:
        self._follow()
        found = (self._tenants.get(tenant), self._keys.get(api_key_id or ""))
        return tuple(account for account in found if account is not None)


class Admission:
    """The charge of one request on the accounts of its tenant and its key."""

    def __init__(self, accounts: tuple[Account, ...]) -> None:
        self._accounts = accounts
        self._num_charged = 0
        self._is_running = False

    def check(self, num_prompt_tokens: int = 0, num_answer_tokens: int = 0) -> None:
        """Raise RateLimited if the request may not begin now; 0: whatever it may use."""
        for account in self._accounts:
            account.check(num_prompt_tokens, num_answer_tokens)

    def begin(self, num_prompt_tokens: int, num_answer_tokens: int = 0) -> None:
        """Reserve the prompt and the longest answers, or raise RateLimited and charge nothing.

        end() gives back the unused part, so that requests at the same time exceed no limit.
        """
        self.check(num_prompt_tokens, num_answer_tokens)
        self._num_charged = num_prompt_tokens + num_answer_tokens
        for account in self._accounts:
            account.begin(self._num_charged)
        self._is_running = True

    def end(self, num_tokens: int | None) -> None:
        """Corrects the charge to the tokens that were used; None: the request never ran.

        Only the first call after begin() counts.
        """
        if not self._is_running:
            return
        self._is_running = False
        num_requests, used = (-1, 0) if num_tokens is None else (0, num_tokens)
        for account in self._accounts:
            account.end()
            account.take(num_requests=num_requests, num_tokens=used - self._num_charged)

    def headers(self) -> dict[str, str]:
        """Return the headers that OpenAI's clients read, of the account with the least left."""
        headers: dict[str, str] = {}
        for limit, word in (("requests_per_minute", "requests"), ("tokens_per_minute", "tokens")):
            buckets = [one.buckets[limit] for one in self._accounts if limit in one.buckets]
            if buckets:
                tightest = min(buckets, key=lambda bucket: bucket.level)
                left = max(0, math.floor(tightest.level))
                reset_s = min(tightest.wait_s(tightest.capacity), SECONDS * SECONDS)
                headers[f"x-ratelimit-limit-{word}"] = str(int(tightest.capacity))
                headers[f"x-ratelimit-remaining-{word}"] = str(left)
                headers[f"x-ratelimit-reset-{word}"] = duration_text(reset_s)
        return headers


def _need(num_prompt_tokens: int, num_answer_tokens: int, limit: int) -> str:
    room = limit - num_prompt_tokens
    said = f"may use {num_prompt_tokens + num_answer_tokens}, {num_prompt_tokens} of its prompt"
    if room <= 0:
        return said
    return f"{said} and {num_answer_tokens} of max_tokens times n, which fits up to {room}"


def duration_text(seconds: float) -> str:
    """Write a duration as OpenAI's headers do, such as 6m0s or 120ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s" if whole >= 60 else f"{whole}s"
