"""Requests by seed that no sane client sends, for every route of the server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from loramux.types.routes import ROUTE_ACCESS

MESSAGES = [{"role": "user", "content": "The"}]
COMPLETION = {"model": "base", "prompt": "The", "max_tokens": 1}
CHAT = {"model": "base", "messages": MESSAGES, "max_tokens": 1}
SGLANG = {"text": "The", "sampling_params": {"max_new_tokens": 1}}
LLAMACPP = {"prompt": "The", "n_predict": 1}
OLLAMA = {"model": "base", "prompt": "The", "options": {"num_predict": 1}}
TGI = {"inputs": "The", "parameters": {"max_new_tokens": 1}}
LOAD = {"lora_name": "loaded", "lora_path": "a0"}
# A sound body of each route that takes one; the others get a completion's.
SOUND: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": CHAT,
    "POST /chat/completions": CHAT,
    "POST /v1/completions": COMPLETION,
    "POST /v1/embeddings": {"model": "base", "input": "The"},
    "POST /pooling": {"model": "base", "input": "The"},
    "POST /v1/run": {"model": "base", "input": {"prompt": "The"}},
    "POST /tokenize": {"prompt": "The"},
    "POST /detokenize": {"tokens": [5, 6]},
    "POST /v1/adapters": {"reference": "acme/pushed", "source": "a0"},
    "POST /v1/adapters/plan": {"adapters": 5, "rank": 8, "targets": "q,k"},
    "POST /v1/adapters/{name:path}/promote": {"version": "1.0.0"},
    "POST /v1/adapters/{name:path}/rollback": {},
    "POST /v1/adapters/{name:path}/split": {"targets": [{"version": "1.0.0", "weight": 1}]},
    "POST /v1/keys": {"tenant": "acme", "scopes": ["infer"], "limits": {"max_rank": 8}},
    "POST /v1/keys/{key_id}/rotate": {"overlap_s": 5},
    "POST /v1/load_lora_adapter": LOAD,
    "POST /load_lora_adapter": LOAD,
    "POST /v1/unload_lora_adapter": {"lora_name": "loaded"},
    "DELETE /v1/unload_lora_adapter": {"lora_name": "loaded"},
    "POST /unload_lora_adapter": {"lora_name": "loaded"},
    "POST /v1/messages": CHAT,
    "POST /v1/messages/count_tokens": {"model": "base", "messages": MESSAGES},
    "POST /v1/responses": {"model": "base", "input": "The", "max_output_tokens": 1},
    "POST /": TGI,
    "POST /generate": {**TGI, **SGLANG},
    "POST /generate_stream": TGI,
    "POST /embed": {"inputs": "The"},
    "POST /adapters": {"name": "loaded", "src": "a0"},
    "POST /completion": LLAMACPP,
    "POST /completions": LLAMACPP,
    "POST /lora-adapters": {},
    "POST /api/chat": {"model": "base", "messages": MESSAGES, "options": {"num_predict": 1}},
    "POST /api/generate": OLLAMA,
    "POST /api/embed": {"model": "base", "input": "The"},
    "POST /api/embeddings": OLLAMA,
}
EXTRA: dict[str, Any] = {
    "n": 2,
    "stop": ["x"],
    "stop_token_ids": [5],
    "logit_bias": {"5": 1.0},
    "logprobs": 1,
    "echo": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "seed": 5,
    "adapters": ["acme/sql"],
    "adapter_weights": [0.5],
    "combination": {"method": "ties", "density": 0.5},
    "bad_words": ["x"],
    "allowed_token_ids": [5],
    "prompt_logprobs": 1,
    "guided_regex": "a+",
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "chat_template_kwargs": {"x": 1},
    "cache_salt": "x",
    "timeout": 5,
    "user": "x",
}
NAMES = ("base", "acme/sql", "acme/sql@1.0.0", "acme/sql@prod", "acme/sql+0.5*acme/sql", "loaded")


@dataclass(frozen=True, slots=True)
class HostileRequest:
    method: str
    path: str
    content: bytes
    headers: dict[str, bytes]

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        return [(name.encode(), value) for name, value in self.headers.items()]

    def __str__(self) -> str:
        return f"{self.method} {self.path[:80]} {dict(self.headers)!r:.80} {self.content[:200]!r}"


class HostileRequests:
    """Draws requests; the same seed draws the same."""

    def __init__(self, seed: int, keys: tuple[str, ...] = ()) -> None:
        self._chance = random.Random(seed)
        # A stream without an end; tests/unit/server/test_live.py has its errors.
        self._routes = sorted(ROUTE_ACCESS.keys() - {"GET /v1/live"})
        self._keys = keys

    def draw(self, number: int) -> Iterator[HostileRequest]:
        for _ in range(number):
            yield self._request()

    def _request(self) -> HostileRequest:
        chance = self._chance
        route = chance.choice(self._routes)
        # Routes with bodies have the most to go wrong.
        if route not in SOUND and chance.random() < 0.7:
            route = chance.choice(sorted(SOUND))
        method, _, template = route.partition(" ")
        if chance.random() < 0.02:
            method = chance.choice(("PUT", "PATCH", "OPTIONS", "TRACE", "DELETE", "POST", "BREW"))
        path = self._path(template)
        content = b""
        if method in ("POST", "PUT", "PATCH") or route in SOUND:
            content = self._content(SOUND.get(route, COMPLETION))
        return HostileRequest(method, path, content, self._headers())

    def _path(self, template: str) -> str:
        chance, path = self._chance, template
        while "{" in path:
            start, end = path.index("{"), path.index("}") + 1
            value = chance.choice(NAMES)
            if chance.random() < 0.5:
                value = self._text()[:5_000]
            # Sent as bytes, as surrogates are no text.
            path = path[:start] + quote(value.encode("utf-8", "surrogatepass")) + path[end:]
        if chance.random() < 0.1:
            words = ("adapter", "slow_ms", "limit", "cold", "since", "deep", "order", "model")
            value = quote(self._text()[:2_000].encode("utf-8", "surrogatepass"))
            path += f"?{chance.choice(words)}={value}"
        return path or "/"

    def _headers(self) -> dict[str, bytes]:
        chance = self._chance
        headers = {"content-type": b"application/json"}
        if chance.random() < 0.05:
            kinds = (b"", b"text/plain", b"application/json; charset=utf-7", b"\xff", b"a" * 3_000)
            headers["content-type"] = chance.choice(kinds)
        if chance.random() < 0.1:
            names = ("x-request-id", "x-tenant", "accept", "origin", "x-forwarded-for", "adapter")
            content = self._text()[:500].encode("utf-8", "surrogatepass")
            headers[chance.choice(names)] = bytes(b for b in content if b >= 32) or b"x"
        if self._keys and chance.random() < 0.9:
            headers["authorization"] = b"Bearer " + chance.choice(self._keys).encode("latin-1")
        elif chance.random() < 0.05:
            values = (b"", b"Bearer", b"Bearer ", b"Basic eDp4", b"Bearer \xff", b"Bearer " * 500)
            headers["authorization"] = chance.choice(values)
        return headers

    def _content(self, sound: dict[str, Any]) -> bytes:
        chance = self._chance
        body = json.loads(json.dumps(sound))
        if "model" in body and chance.random() < 0.3:
            body["model"] = chance.choice(NAMES)
        for _ in range(chance.choice((0, 1, 1, 2))):
            name = chance.choice(sorted(EXTRA))
            body[name] = EXTRA[name]
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
            self._spoil(body)
        content = json.dumps(body).encode("utf-8", "surrogatepass")
        draw = chance.random()
        if draw < 0.08:
            return content[: chance.randrange(len(content) + 1)]
        if draw < 0.16:
            changed = bytearray(content)
            for _ in range(chance.randint(1, 6)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            return bytes(changed)
        return chance.choice(RAW) if draw < 0.2 else content

    def _spoil(self, body: dict[str, Any]) -> None:
        """Replace a value at some depth, remove it, or add one."""
        chance = self._chance
        place: Any = body
        while True:
            keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                return
            key = chance.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and chance.random() < 0.6:
                place = place[key]
                continue
            break
        draw = chance.random()
        if draw < 0.1:
            del place[key]
        elif draw < 0.2 and isinstance(place, dict):
            place[self._text()[:1_000]] = self._value()
        else:
            place[key] = self._value()

    def _value(self, depth: int = 0) -> Any:
        chance = self._chance
        draw = chance.random()
        if draw < 0.3:
            return self._text()
        if draw < 0.6:
            return chance.choice(NUMBERS)
        if draw < 0.75:
            return chance.choice((None, True, False, [], {}, [[]], [{}], [None], {"": None}))
        if draw < 0.85 or depth > 3:
            return [chance.choice(NUMBERS)] * chance.choice((1, 100, 20_000))
        if draw < 0.93:
            return [self._value(depth + 1) for _ in range(chance.randint(1, 4))]
        return {self._text()[:100]: self._value(depth + 1) for _ in range(chance.randint(1, 4))}

    def _text(self) -> str:
        chance = self._chance
        piece = chance.choice(TEXTS)
        # Some are large, few are very large.
        times = chance.choices((1, 20, 2_000, 60_000), (70, 20, 9, 1))[0]
        return piece * times if len(piece) < 50 else piece


NUMBERS: list[Any] = [0, -1, 1, 2, 0.5, -0.0, 1e308, -1e308, 1e-320, 10**18, 2**31, 2**63, 2**64]
NUMBERS += [-(2**63), 10**400, 511, 512, 1.5, 128, 4096, float("nan"), float("inf"), True]
TEXTS: list[str] = ["", "x", "a ", "base", "\x00", "\n", "\x1b[2J", "é", "𝕏", "\ud800", "\u202e"]
TEXTS += ["acme/sql", "a/b@c", "../..", "/etc/passwd", "http://127.0.0.1:1/x", "hf:a/b", "s3://a/b"]
TEXTS += ["{{ 7 }}", "{% for i in x %}", "(a+)+$", "[", "\\", "%00", "'; DROP TABLE", "a+0.3*b"]
TEXTS += ["cidv1:sha256:" + "0" * 64, "cidv1:sha256:zz", "rcpt_x", "1.0.0", "🙂‍↔️", "a,b", "${x}"]
RAW: list[bytes] = [b"", b"null", b"5", b"[]", b'"x"', b"{", b"\xff\xfe", b"\x00" * 1000]
RAW += [b"[" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"[[[]]" * 20_000]
RAW += [b'{"prompt": "' + b"\\ud83d" * 1_000 + b'"}', b'{"prompt": NaN}', b"{}" * 50_000]
