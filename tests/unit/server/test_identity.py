"""Tokens of an identity provider: what is accepted, and each forgery that is refused."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from loramux.config.file import load_serve_config
from loramux.errors import InvalidRequest, SourceFailed
from loramux.launch.serve import make_authenticator
from loramux.server.auth import identity
from loramux.server.auth.authentication import CredentialAuthenticator, Credentials
from loramux.server.auth.identity import IdentityTokens, TokenRules, check_url
from loramux.server.errors import Unauthenticated
from loramux.types.access import KeyScope
from loramux.types.caller import Caller
from tests.unit.server.asgi_client import request, run
from tests.unit.server.registry_app import Make
from tests.unit.server.test_authentication import ask, bearer

ISSUER, AUDIENCE = "https://login.example.org", "loramux"
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()


def jwk(algorithm: Any, private: Any, key_id: str, **more: Any) -> dict[str, Any]:
    public = algorithm.to_jwk(private.public_key(), as_dict=True)
    return {**public, "kid": key_id, **more}


SECRET = {"kty": "oct", "kid": "secret", "k": base64.urlsafe_b64encode(b"x" * 32).decode()}
KEYS = [
    jwk(jwt.algorithms.RSAAlgorithm, RSA, "rsa"),
    jwk(jwt.algorithms.ECAlgorithm, EC, "ec"),
    jwk(jwt.algorithms.OKPAlgorithm, ED, "ed"),
    jwk(jwt.algorithms.RSAAlgorithm, OTHER, "ps", alg="PS256"),
    jwk(jwt.algorithms.RSAAlgorithm, OTHER, "enc", use="enc"),
    SECRET,
]


def claims(**changed: Any) -> dict[str, Any]:
    now = int(time.time())
    given = {"iss": ISSUER, "aud": AUDIENCE, "exp": now + 300, "sub": "alice", "tenant": "acme"}
    merged = {**given, "scope": "openid infer loramux:push", **changed}
    return {name: value for name, value in merged.items() if value is not None}


def token(
    key: Any = RSA, algorithm: str = "RS256", *, kid: str | None = "rsa", **changed: Any
) -> str:
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode(claims(**changed), key, algorithm=algorithm, headers=headers)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": KEYS}))
    return path


Check = Callable[[str], Caller]


def tokens_of(keys: object, **rules: Any) -> IdentityTokens:
    given = None if keys is None else str(keys)
    return IdentityTokens(TokenRules(issuer=ISSUER, audience=AUDIENCE, keys=given, **rules))


@pytest.fixture
def check(file: Path) -> Check:
    return lambda text: run(tokens_of(file).caller(text))


@pytest.mark.parametrize(
    ("key", "algorithm", "kid"),
    [
        (RSA, "RS256", "rsa"),
        (RSA, "PS384", "rsa"),
        (EC, "ES256", "ec"),
        (ED, "EdDSA", "ed"),
        (OTHER, "PS256", "ps"),
    ],
)
def test_a_token_has_the_tenant_and_the_scopes_of_its_claims(
    check: Check, key: Any, algorithm: str, kid: str
) -> None:
    caller = check(token(key, algorithm, kid=kid))
    assert (caller.tenant, caller.is_operator, caller.key_id) == ("acme", False, "jwt:alice")
    assert caller.scopes == {KeyScope.INFER, KeyScope.PUSH}
    assert caller.ends_at == claims()["exp"]


def unsigned(header: dict[str, Any], signature: bytes = b"") -> str:
    parts = [json.dumps(header).encode(), json.dumps(claims()).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


def signed_with_the_public_key() -> str:
    """Return a token whose HMAC has the public key as its secret."""
    pem = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    start = unsigned({"alg": "HS256", "typ": "JWT", "kid": "rsa"}).rpartition(".")[0]
    digest = hmac.new(pem, start.encode(), hashlib.sha256).digest()
    return f"{start}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


FORGED: dict[str, Callable[[], str]] = {
    "none": lambda: unsigned({"alg": "none", "kid": "rsa"}),
    "None": lambda: unsigned({"alg": "None", "kid": "rsa"}),
    "hmac_with_the_public_key": signed_with_the_public_key,
    "hmac_with_a_published_secret": lambda: token(b"x" * 32, "HS256", kid="secret"),
    "of_another_key": lambda: token(OTHER, kid="rsa"),
    "of_a_key_for_encryption": lambda: token(OTHER, kid="enc"),
    "of_another_algorithm_than_the_key": lambda: token(OTHER, "RS256", kid="ps"),
    "of_another_type_of_key": lambda: token(EC, "ES256", kid="rsa"),
    "unknown_key": lambda: token(kid="other"),
    "no_key_id": lambda: token(kid=None),
    "key_in_the_header": lambda: jwt.encode(
        claims(), OTHER, "RS256", headers={"kid": "mine", "jwk": {**KEYS[3], "kid": "mine"}}
    ),
    "expired": lambda: token(exp=int(time.time()) - 60),
    "without_an_end": lambda: token(exp=None),
    "too_early": lambda: token(nbf=int(time.time()) + 600),
    "wrong_issuer": lambda: token(iss="https://login.example.org.evil"),
    "without_an_issuer": lambda: token(iss=None),
    "wrong_audience": lambda: token(aud="another-service"),
    "without_an_audience": lambda: token(aud=None),
    "without_a_tenant": lambda: token(tenant=None),
    "tenant_of_no_form": lambda: token(tenant="acme/../globex"),
    "tenant_of_another_type": lambda: token(tenant=["acme"]),
    "changed": lambda: ".".join([*token().split(".")[:2], token(sub="bob").split(".")[2]]),
    "no_json": lambda: "a.b.c",
    "empty_parts": lambda: "..",
}


@pytest.mark.parametrize("case", FORGED)
def test_other_tokens_are_refused(check: Check, case: str) -> None:
    with pytest.raises(Unauthenticated):
        check(FORGED[case]())


def test_claims_may_be_nested_and_scopes_a_list(file: Path) -> None:
    tokens = tokens_of(file, tenant_claim="org.name", scopes_claim="https://x/scopes")
    given = {"org": {"name": "globex"}, "https://x/scopes": ["receipts", 7, "loramux:metrics"]}
    caller = run(tokens.caller(token(**given)))
    assert (caller.tenant, caller.scopes) == ("globex", {KeyScope.RECEIPTS, KeyScope.METRICS})
    assert run(tokens.caller(token(org={"name": "a"}, scope="infer"))).scopes == frozenset()


def test_a_file_is_read_again_for_new_keys_but_not_for_every_token(file: Path) -> None:
    now = 0.0
    rules = TokenRules(issuer=ISSUER, audience=AUDIENCE, keys=str(file))
    tokens = IdentityTokens(rules, clock=lambda: now)
    new = token(OTHER, kid="new")

    async def work() -> None:
        nonlocal now
        await tokens.caller(token())
        file.write_text(json.dumps({"keys": [jwk(jwt.algorithms.RSAAlgorithm, OTHER, "new")]}))
        with pytest.raises(Unauthenticated):
            await tokens.caller(new)
        now += identity.RETRY_S
        assert (await tokens.caller(new)).tenant == "acme"
        with pytest.raises(Unauthenticated):
            await tokens.caller(token())
        # Keys that cannot be read again are used for a while.
        file.unlink()
        now += identity.FRESH_S
        assert (await tokens.caller(new)).tenant == "acme"
        now += identity.MAX_STALE_S
        for _ in range(2):
            with pytest.raises(SourceFailed):
                await tokens.caller(new)

    run(work())


class Provider:
    """An identity provider on this machine."""

    def __init__(self) -> None:
        self.documents: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked.append(self.path)
                status, body = provider.documents.get(self.path, (404, b""))
                self.send_response(status)
                self.send_header("location", "/keys")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.close()


def test_keys_are_fetched_once_by_the_issuers_discovery(provider: Provider) -> None:
    keys = json.dumps({"keys": KEYS}).encode()
    document = {"issuer": provider.url, "jwks_uri": f"{provider.url}/keys"}
    provider.documents = {
        identity.DISCOVERY: (200, json.dumps(document).encode()),
        "/keys": (200, keys),
    }
    tokens = IdentityTokens(TokenRules(issuer=provider.url, audience=AUDIENCE))

    async def work() -> None:
        for _ in range(3):
            assert (await tokens.caller(token(iss=provider.url))).tenant == "acme"

    run(work())
    assert provider.asked == [identity.DISCOVERY, "/keys"]


@pytest.mark.parametrize(
    "answer",
    [(404, b""), (302, b""), (200, b"no json"), (200, b'{"keys": 1}'), (200, b" " * (2**20 + 1))],
)
def test_a_provider_that_fails_is_not_believed(
    provider: Provider, answer: tuple[int, bytes]
) -> None:
    provider.documents["/keys"] = (200, json.dumps({"keys": KEYS}).encode())
    provider.documents["/other"] = answer
    with pytest.raises(SourceFailed):
        run(tokens_of(f"{provider.url}/other").caller(token()))
    assert provider.asked == ["/other"]


def test_urls_of_keys_must_be_safe_from_others() -> None:
    for url in ("http://login.example.org/keys", "ftp://x/keys", "http://127.0.0.1.evil.org/keys"):
        with pytest.raises(InvalidRequest, match="https"):
            check_url(url)
    check_url("https://login.example.org/keys")


def test_a_server_accepts_keys_and_tokens_side_by_side(file: Path) -> None:
    from loramux.server.app import create_app
    from loramux.server.context import ServerOptions
    from tests.unit.server.scripted_backend import ScriptedBackend

    credentials = Credentials(api_keys=["a.b.c"], tokens=tokens_of(file))
    backend = ScriptedBackend()
    authenticator = CredentialAuthenticator(credentials)
    app = create_app(backend, ServerOptions(), names=backend.names, authenticator=authenticator)
    assert authenticator.needs_key and ask(app).status_code == 401
    assert ask(app, "/v1/stats", bearer("a.b.c")).status_code == 200
    assert ask(app, "/v1/models", bearer(token())).status_code == 200
    assert ask(app, "/v1/receipts", bearer(token())).status_code == 403
    refused = ask(app, "/v1/models", bearer(token(OTHER)))
    assert refused.status_code == 401 and token()[:20] not in refused.text


def test_a_key_made_with_a_token_ends_with_the_token(registry_app: Make, file: Path) -> None:
    served = registry_app(tokens=tokens_of(file))
    end = int(time.time()) + 300
    header = bearer(token(exp=end, scope="loramux:admin loramux:infer"))
    for body in ({}, {"expires_in_s": 1e6}):
        made = request(served.app, "POST", "/v1/keys", headers=header, json=body)
        assert (made.status_code, made.json()["ends_at"]) == (200, end), made.text
        path = f"/v1/keys/{made.json()['id']}/rotate"
        rotated = request(served.app, "POST", path, headers=header, json={})
        assert rotated.json()["ends_at"] == pytest.approx(end)


def test_the_settings_make_a_verifier(file: Path) -> None:
    config = load_serve_config(
        {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_keys": str(file)}
    )
    assert make_authenticator(config, None, {}).needs_key
    for wrong in ({"jwt_issuer": ISSUER}, {"jwt_audience": "x"}, {"jwt_keys": "x"}):
        with pytest.raises(InvalidRequest, match="jwt"):
            load_serve_config(wrong)
    insecure = load_serve_config({"jwt_issuer": "http://x.org", "jwt_audience": "x"})
    with pytest.raises(InvalidRequest, match="https"):
        make_authenticator(insecure, None, {})
