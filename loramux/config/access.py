"""Settings of who may call the server: keys, tokens of an identity provider, and proxies."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from loramux.config.fields import Kind, Limit, check_limits, setting
from loramux.errors import InvalidRequest

ACCESS = "Access"
MAX_KEY_CHARACTERS = 256
MIN_KEY_CODE, MAX_KEY_CODE = 33, 126
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_networks(texts: tuple[str, ...]) -> tuple[Network, ...]:
    """Parse addresses and networks such as 10.0.0.0/8; raise InvalidRequest."""
    try:
        return tuple(ipaddress.ip_network(text, strict=False) for text in texts)
    except ValueError as error:
        raise InvalidRequest(f"{error}. Write addresses like 10.1.2.3 or 10.0.0.0/8.") from error


def _are_networks(texts: tuple[str, ...]) -> bool:
    try:
        parse_networks(texts)
    except InvalidRequest:
        return False
    return True


def is_key_text(text: str) -> bool:
    """Whether a key can be sent in a header: printable ASCII without spaces."""
    is_ascii = all(MIN_KEY_CODE <= ord(char) <= MAX_KEY_CODE for char in text)
    return is_ascii and 0 < len(text) <= MAX_KEY_CHARACTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """The part of the settings of `loramux serve` that says who may call the server."""

    api_key: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        ACCESS,
        "Keys that open every route; requests send one as a bearer token or in x-api-key. "
        "Default: $LORAMUX_API_KEY, else $VLLM_API_KEY. Keys with tenants and scopes: see "
        "loramux keys.",
        metavar="KEY…",
        limit=Limit(
            f"1 to {MAX_KEY_CHARACTERS} printable ASCII characters each, without spaces",
            lambda keys: all(map(is_key_text, keys)),
        ),
        is_secret=True,
    )
    insecure_no_auth: bool = setting(
        False,
        Kind.SWITCH,
        ACCESS,
        "Listen on --host even if other machines reach it and no key is needed. Keys that exist "
        "are needed all the same.",
    )
    jwt_issuer: str | None = setting(
        None,
        Kind.TEXT,
        ACCESS,
        "Also accept tokens (JWT) of this identity provider, whose `iss` this is. Needs "
        "--jwt-audience and the extra loramux[jwt].",
        metavar="URL",
    )
    jwt_audience: str | None = setting(
        None, Kind.TEXT, ACCESS, "The `aud` of tokens that are for this server.", metavar="TEXT"
    )
    jwt_keys: str | None = setting(
        None,
        Kind.URL_OR_PATH,
        ACCESS,
        "File or https:// URL of the provider's public keys (JWKS). Default: what the issuer's "
        "/.well-known/openid-configuration names.",
        metavar="URL|PATH",
    )
    jwt_tenant_claim: str = setting(
        "tenant",
        Kind.TEXT,
        ACCESS,
        "The claim with the tenant, such as org.tenant.",
        metavar="NAME",
    )
    jwt_scopes_claim: str = setting(
        "scope",
        Kind.TEXT,
        ACCESS,
        "The claim with the scopes, such as infer or loramux:infer.",
        metavar="NAME",
    )
    trusted_proxies: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        ACCESS,
        "Addresses or networks of proxies whose X-Forwarded-For and --tenant-header are believed.",
        metavar="ADDRESS…",
        limit=Limit("addresses or networks such as 10.0.0.0/8", _are_networks),
    )

    shared_names: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        ACCESS,
        "Patterns of the names given by --lora-modules, --lora-dir and load calls that all tenants "
        "may use, such as 'sql-*'. Default: none; they belong to --home-tenant.",
        metavar="PATTERN…",
    )
    require_signed: bool = setting(
        False,
        Kind.SWITCH,
        ACCESS,
        "Accept only pushes with a signature of one of the tenant's signing keys. See loramux "
        "tenants set.",
    )
    audit_anchor: str | None = setting(
        None,
        Kind.PATH,
        ACCESS,
        "File that gets the end of the audit log after each change; kept outside of the database, "
        "it shows whether entries were cut off.",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if (self.jwt_issuer is None) != (self.jwt_audience is None):
            raise InvalidRequest(
                "--jwt-issuer and --jwt-audience go together: a token of the issuer may be for "
                "another service.",
                param="jwt_audience",
            )
        if self.jwt_keys is not None and self.jwt_issuer is None:
            raise InvalidRequest("--jwt-keys needs --jwt-issuer.", param="jwt_keys")
