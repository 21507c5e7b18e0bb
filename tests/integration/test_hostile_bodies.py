"""500 bodies that no sane client sends: each is answered with 4xx that names the fault."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.engine_factory import save_model_with_tokenizer
from tests.serve_factory import RunningServer, running_server

pytestmark = pytest.mark.slow

ROUTES = ("/v1/completions", "/v1/chat/completions")
GOOD: dict[str, dict[str, Any]] = {
    ROUTES[0]: {"model": "base", "prompt": "The", "max_tokens": 1},
    ROUTES[1]: {
        "model": "base",
        "messages": [{"role": "user", "content": "The"}],
        "max_tokens": 1,
    },
}
NEGATIVE = [-1, -(2**63), -0.5, -1e308]
WRONG: dict[str, list[Any]] = {
    "model": [5, [], {}, "nobody", "x" * 100_000],
    "max_tokens": [*NEGATIVE, "ten", [], {}, 1.5, True, 10**30],
    "temperature": [*NEGATIVE, "hot", [], {}, 10**400],
    "top_p": [*NEGATIVE, 0, 1.01, "x", [], {}],
    "top_k": [-2, 1.5, "x", [], {}],
    "min_p": [*NEGATIVE, 2, "x", []],
    "n": [*NEGATIVE, 0, 10**6, "x", [], 1.5],
    "seed": ["x", [], {}, 1.5],
    "stop": [5, [5], {}, [[]], [""], ""],
    "logit_bias": [5, [], "x", {"a": 1}, {"5": "x"}, {"5": 1e9}, {"999999": 1}],
    "presence_penalty": [3, -3, "x", []],
    "frequency_penalty": [3, -3, "x", {}],
    "repetition_penalty": [0, -1, "x"],
    "stream": ["yes", 5, [], {}],
    "stream_options": [5, "x", []],
    "adapters": [5, "a", [5], [[]], ["nobody"], ["a", "b"], {}],
    "adapter_weights": [5, "x", ["x"], [1.0]],
    "response_format": [{"type": "xml"}, 5, {}, {"type": "json_schema"}],
    "guided_json": [{"not": {}}, {"$ref": "#/x"}, {"type": "x"}, "{", 5],
    "guided_regex": ["(", "(?=a)", "[", 5, ""],
    "guided_choice": [[], [""], "x", [5]],
    "guided_grammar": ["start: x", "root ::= (", 5],
    "structured_outputs": [{}, 5, {"json": {}, "regex": "x"}],
    "min_tokens": [-1, "x", 10**6],
    "bad_words": [[""], "x", [5]],
    "allowed_token_ids": [[], [-1], [10**9], "x"],
}
COMPLETION_ONLY: dict[str, list[Any]] = {
    "prompt": [None, 5, {}, [], [[]], [None], [{}], [-1], [10**9], ["a", 5], "", "a " * 2_000],
    "logprobs": [-1, 1000, "x", []],
    "suffix": ["x"],
    "echo": [5, "x", []],
}
CHAT_ONLY: dict[str, list[Any]] = {
    "messages": [
        None,
        5,
        "x",
        {},
        [],
        [5],
        [{}],
        [{"role": "user"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "a " * 2_000}],
    ],
    "top_logprobs": [-1, 1000, "x"],
    "tools": [[{"type": "function", "function": {"name": "f g"}}], 5, [5], [{}]],
    "tool_choice": ["required", 5, {}],
}
RAW: list[bytes] = [
    b"",
    b"null",
    b"5",
    b"[]",
    b'"x"',
    b"{",
    b'{"model": "base"',
    b"\xff\xfe",
    b'{"model": "\xff"}',
    b'{"model": "base", "prompt": "\xc3\x28"}',
    b'{"model": "base", "prompt": "\\ud800"}',
    b"[" * 200_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"model": "base", "prompt": NaN}',
    b'{"model": "base", "max_tokens": 1e999, "prompt": "a"}',
    b"\x00" * 1000,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("served")
    save_model_with_tokenizer(folder / "model")
    flags = ["--model", str(folder / "model"), "--served-model-name", "base"]
    with running_server(folder / "log", *flags, "--device-memory", "16MiB") as running:
        yield running


def bodies() -> list[tuple[str, bytes, str | None]]:
    """(route, body, the parameter that must be named)"""
    cases: list[tuple[str, bytes, str | None]] = []
    for route in ROUTES:
        own = COMPLETION_ONLY if route == ROUTES[0] else CHAT_ONLY
        for name, values in {**WRONG, **own}.items():
            for value in values:
                body = json.dumps({**GOOD[route], name: value}).encode()
                cases.append((route, body, name))
        cases += [(route, raw, None) for raw in RAW]
        large = json.dumps({**GOOD[route], "prompt": "x" * 10_000_000, "messages": None})
        cases.append((route, large.encode(), None))
    draw = random.Random(0)
    while len(cases) < 500:
        route = draw.choice(ROUTES)
        body = bytearray(json.dumps(GOOD[route]).encode())
        for _ in range(draw.randint(1, 6)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        cases.append((route, bytes(body), None))
    return cases


def rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def test_each_gets_4xx_with_the_parameter_named_and_memory_stays_flat(
    server: RunningServer,
) -> None:
    cases = bodies()
    assert len(cases) >= 500
    headers = {"content-type": "application/json"}
    with httpx2.Client(base_url=server.url, timeout=60, headers=headers) as client:

        def send(route: str, body: bytes) -> httpx2.Response:
            return client.post(route, content=body)

        for route, body, _ in cases[:: len(cases) // 50]:
            send(route, body)
        before = rss_mib(server.process.pid)
        faults = [fault for case in cases if (fault := judge(send, *case)) is not None]
        grown = rss_mib(server.process.pid) - before
        assert not faults, "\n".join(faults[:20])
        assert grown < 64, f"the server grew by {grown:.0f} MiB"
        assert client.get("/health").json()["restarts"] == 0
        assert client.post(ROUTES[0], json=GOOD[ROUTES[0]]).status_code == 200


def judge(
    send: Callable[[str, bytes], httpx2.Response], route: str, body: bytes, param: str | None
) -> str | None:
    answer = send(route, body)
    shown = f"{route} {body[:120]!r} -> {answer.status_code} {answer.text[:160]}"
    if param is None:
        # A random change may leave the body sound, or make a field unknown.
        return shown if answer.status_code >= 500 else None
    if not 400 <= answer.status_code < 500:
        return shown
    error = answer.json()["error"]
    named = error["param"] or ""
    return None if param in named or param in error["message"] else shown
