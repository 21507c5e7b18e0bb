"""Servers of two tenants on the same registry, and requests to every route of the access table."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2

from loramux.backend.text import Delta
from loramux.types.access import KeyScope
from loramux.types.pooling import ModelPooling, Pooling
from loramux.types.request import FinishReason, Request
from loramux.types.routes import ROUTE_ACCESS, Access
from tests.unit.server.registry_app import RegistryApp, make_registry_app
from tests.unit.server.scripted_backend import CARD, say_hello
from tests.unit.server.scripted_images import PICTURE

TENANTS = ("acme", "globex")
# Rights of the keys of each tenant; the last one is revoked.
KEYS: tuple[dict[str, Any], ...] = (
    {},
    {"scopes": (KeyScope.INFER,)},
    {"scopes": (KeyScope.PUSH, KeyScope.METRICS)},
    {"adapters": ("sql*",)},
    {"may_use_base": False},
    {},
)
OWN = ("sql", "sql@1.0.0", "{own}/sql", "{own}/sql@prod", "{own}/sql@1.1.0", "{own}/private")
FOREIGN = ("{other}/sql", "{other}/private", "{other}/sql@1.0.0", "sql+0.5*{other}/private")
MISSING = ("{other}/absent", "{own}/absent", "absent", "umbrella/absent", "umbrella/part")
IMAGES = ("ink", "{own}/ink@1.0.0", "{own}/ink", "{other}/ink", "umbrella/blob", "ink+0.5*sql")
SHARED = ("umbrella/open", "umbrella/part@1.0.0", "umbrella/part@1.1.0", "legal", "team/polite")
OTHERS = ("tiny-base", "tiny-base:sql", "0*sql", "{own_cid}", "{other_cid}", "{other_cid_start}")
NAMES = (*OWN, *FOREIGN, *MISSING, *IMAGES, *SHARED, *OTHERS)
MESSAGES = [{"role": "user", "content": "hi"}]
HIDDEN = 32


async def answer(request: Request) -> AsyncIterator[Delta]:
    """Answers with text, or with a vector where one is asked for."""
    if request.pooling is None:
        async for delta in say_hello(request):
            yield delta
        return
    vector = struct.pack(f"<{HIDDEN}f", *range(1, HIDDEN + 1))
    yield Delta(
        index=0,
        text="",
        token_ids=(),
        logprobs=None,
        finish_reason=FinishReason.STOP,
        pooled=vector,
    )


# What is sent in a body to each route, by method and path.
Body = Callable[[str], dict[str, Any]]
CHAT: Body = lambda name: {"model": name, "messages": MESSAGES, "max_tokens": 2}  # noqa: E731
TEXT: Body = lambda name: {"model": name, "prompt": "hi", "max_tokens": 2}  # noqa: E731
INPUT: Body = lambda name: {"model": name, "input": "hi"}  # noqa: E731
LORAX: Body = lambda name: {  # noqa: E731
    "inputs": "hi",
    "parameters": {"adapter_id": name, "max_new_tokens": 2},
}
HOLE: Body = lambda name: {  # noqa: E731
    "model": name,
    "prompt": "a",
    "input_prefix": "a",
    "input_suffix": "b",
    "suffix": "b",
}
SCORE: Body = lambda name: {"model": name, "text_1": "a", "text_2": "b"}  # noqa: E731
RERANK: Body = lambda name: {"model": name, "query": "a", "documents": ["b"]}  # noqa: E731
IMAGE: Body = lambda name: {"prompt": "a fox", "adapters": [name], "n": 2, "seed": 7}  # noqa: E731
SHEAF: Body = lambda name: {  # noqa: E731
    "model_type": "diffusion",
    "model_name": "tiny-flux",
    "prompt": "a fox",
    "adapters": [name],
    "seed": 7,
}
SMALL = {"width": 64, "height": 64, "steps": 2, "seed": 7}
LOAD: Body = lambda name: {"lora_name": name, "lora_path": "/nowhere"}  # noqa: E731
BODIES: Mapping[str, Body] = {
    "POST /v1/chat/completions": CHAT,
    "POST /chat/completions": CHAT,
    "POST /v1/messages": CHAT,
    "POST /v1/messages/count_tokens": lambda name: {"model": name, "messages": MESSAGES},
    "POST /v1/completions": TEXT,
    "POST /completion": TEXT,
    "POST /completions": TEXT,
    "POST /v1/fim/completions": HOLE,
    "POST /infill": HOLE,
    "POST /invocations": TEXT,
    "POST /tokenize": lambda name: {"model": name, "prompt": "hi"},
    "POST /detokenize": lambda name: {"model": name, "tokens": [104, 105]},
    "POST /v1/responses": INPUT,
    "POST /v1/embeddings": INPUT,
    "POST /pooling": INPUT,
    "POST /classify": INPUT,
    "POST /api/embed": INPUT,
    "POST /api/embeddings": lambda name: {"model": name, "prompt": "hi"},
    "POST /embed": lambda name: {"inputs": "hi", "parameters": {"adapter_id": name}},
    "POST /score": SCORE,
    "POST /v1/score": SCORE,
    "POST /rerank": RERANK,
    "POST /v1/rerank": RERANK,
    "POST /v2/rerank": RERANK,
    "POST /v1/images/generations": IMAGE,
    "POST /v1/images/edits": lambda name: IMAGE(name) | {"image": PICTURE},
    "POST /sdapi/v1/txt2img": lambda name: {"prompt": f"a fox <lora:{name}:1>", **SMALL},
    "POST /sdapi/v1/img2img": lambda name: {
        "prompt": f"a fox <lora:{name}:1>",
        "init_images": [PICTURE],
        **SMALL,
    },
    "POST /sdapi/v1/options": lambda name: {"sd_model_checkpoint": name},
    "POST /{name}/predict": SHEAF,
    "POST /{name}/stream": SHEAF,
    "POST /v1/run": lambda name: {"artifact": name, "input": "hi", "raw": True},
    "POST /": LORAX,
    "POST /generate": LORAX,
    "POST /generate_stream": LORAX,
    "POST /api/chat": lambda name: {"model": name, "messages": MESSAGES, "stream": False},
    "POST /api/generate": lambda name: {"model": name, "prompt": "hi", "stream": False},
    "POST /api/show": lambda name: {"model": name},
    "POST /v1/adapters": lambda name: {
        "reference": name,
        "recipe": {"adapters": ["sql", "umbrella/open"]},
    },
    "POST /v1/adapters/{name:path}/promote": lambda name: {"version": "1.0.0"},
    "POST /v1/adapters/{name:path}/rollback": lambda name: {},
    "POST /v1/adapters/{name:path}/split": lambda name: {"weights": {"1.0.0": 1, "1.1.0": 1}},
    "POST /v1/adapters/plan": lambda name: {"adapters": 1, "like": [name]},
    "POST /v1/adapters/{name:path}:push": lambda name: {"shm": name},
    "POST /v1/load_lora_adapter": LOAD,
    "POST /v1/unload_lora_adapter": LOAD,
    "DELETE /v1/unload_lora_adapter": LOAD,
    "POST /load_lora_adapter": LOAD,
    "POST /unload_lora_adapter": LOAD,
    "POST /adapters": lambda name: {"name": name, "src": "/nowhere"},
    "POST /lora-adapters": lambda name: [{"id": 0, "scale": 1.0}],
    "POST /v1/keys": lambda name: {
        "note": name[:40],
        **({"tenant": name.partition("/")[0]} if "/" in name else {}),
    },
    "POST /v1/keys/{key_id}/rotate": lambda name: {},
}
WITHOUT_BODY = {
    *("POST /health", "POST /ping", "POST /flush_cache", "POST /reset_prefix_cache"),
    *(f"POST /v1/adapters/{{name:path}}/{word}" for word in ("pin", "warm")),
}
# Query strings of lists, tried in turn.
QUERIES: Mapping[str, tuple[str, ...]] = {
    "GET /v1/receipts": ("", "?adapter={name}", "?tenant={other}", "?status=completed&limit=9"),
    "GET /v1/adapters": ("", "?order=busiest", "?stored=1", "?stored=1&search={other}"),
    "GET /tokenizer_info": ("", "?model={name}"),
    "GET /health": ("", "?deep=1"),
}


@dataclass(frozen=True)
class Step:
    """One request of a tenant."""

    tenant: int
    key: int
    route: str
    name: str
    variant: int = 0
    """The form of the query, and the number of the receipt that is asked for."""

    @property
    def access(self) -> Access:
        return ROUTE_ACCESS[self.route]


class World:
    """A server whose requests are counted by tenant."""

    def __init__(self, template: Template, folder: Path) -> None:
        shutil.copytree(template.folder, folder, dirs_exist_ok=True)
        self._template = template
        self.served = make_registry_app(
            folder, allow_runtime_lora_updating=True, shared_names=("team/*",), has_images=True
        )
        self.served.adapters.follow_access()
        backend = self.served.backend
        backend.script = answer
        backend.card = replace(CARD, pooling=ModelPooling(pooling=Pooling.LAST))
        self.receipts: dict[int, list[str]] = {0: [], 1: []}
        self.keys: dict[int, list[str]] = {0: [], 1: []}
        """The ids of keys that each tenant has made."""
        # Lists have the adapters that the engine knows, and its use by either tenant makes one of
        # both known to it.
        texts = ("umbrella/open", "umbrella/part@1.0.0")
        uses = [Step(0, 0, "POST /v1/completions", name) for name in texts]
        uses.append(Step(0, 0, "POST /v1/images/generations", "umbrella/blob"))
        for step, response in self.run(uses):
            assert response.status_code == 200, (step, response.text)
        self.receipts[0].clear()

    def close(self) -> None:
        self.served.registry.close()

    async def ask(self, client: httpx2.AsyncClient, step: Step) -> httpx2.Response:
        method, path = step.route.split(" ", 1)
        name = self._template.fill(step.name, step.tenant)
        for parameter in ("{name:path}", "{model_id:path}", "{path:path}"):
            path = path.replace(parameter, name)
        path = path.replace("/{name}/", "/tiny-flux/")
        path = path.replace("{receipt_id}", self._receipt(step))
        path = path.replace("{key_id}", self.key_id(step))
        queries = QUERIES.get(step.route, ("",))
        query = queries[step.variant % len(queries)]
        path += self._template.fill(query.replace("{name}", name), step.tenant)
        body = BODIES.get(step.route)
        response = await client.request(
            method,
            path.replace("+", "%2B"),
            headers=self._template.headers[step.tenant][step.key],
            json=None if body is None else body(name),
        )
        if (receipt := response.headers.get("x-loramux-receipt")) is not None:
            self.receipts[step.tenant].append(receipt)
        if step.route.startswith("POST /v1/keys") and response.status_code == 200:
            self.keys[step.tenant].append(response.json()["id"])
        return response

    def run(self, steps: list[Step]) -> list[tuple[Step, httpx2.Response]]:
        async def work() -> list[tuple[Step, httpx2.Response]]:
            transport = httpx2.ASGITransport(self.served.app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
                return [(step, await self.ask(client, step)) for step in steps]

        return asyncio.run(work())

    def state(self, tenant: str) -> dict[str, Any]:
        """Return what the registry has of a tenant."""
        registry = self.served.registry
        names = registry.adapters(tenant=tenant)
        return {
            "adapters": [repr(registry.show(str(name))) for name in names],
            "keys": [repr(key) for key in registry.access.keys(tenant=tenant)],
            "shares": [repr(registry.access.shares(name)) for name in names],
        }

    def _receipt(self, step: Step) -> str:
        """Return a receipt of the other tenant, or one that does not exist."""
        others = self.receipts[1 - step.tenant]
        own = self.receipts[step.tenant]
        found = own if step.variant % 2 else others
        return found[step.variant % len(found)] if found else "rcpt_" + "0" * 32

    def key_id(self, step: Step) -> str:
        """Return a key that the tenant has made, one of the other tenant, or one that does not
        exist.
        """
        made = self.keys[step.tenant]
        if step.variant % 2:
            return made[step.variant % len(made)] if made else "0" * 12
        return self._template.key_ids(1 - step.tenant)[step.variant % len(KEYS)]


class Template:
    """A registry with the adapters, shares and keys of both tenants, which worlds copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        served = make_registry_app(folder)
        self.cids = [self._push(served, tenant, number) for number, tenant in enumerate(TENANTS)]
        for name, versions in (("open", ("1.0.0",)), ("part", ("1.0.0", "1.1.0"))):
            for version in versions:
                served.push(f"umbrella/{name}@{version}", 50 + len(name) + int(version[2]))
        served.push_image("umbrella/blob@1.0.0", 70)
        for tenant in TENANTS:
            served.share("umbrella/blob", tenant)
            served.share("umbrella/open", tenant)
            served.share("umbrella/part@1.0.0", tenant)
        self.headers = [[self._key(served, tenant, dict(r)) for r in KEYS] for tenant in TENANTS]
        for headers in self.headers:
            served.registry.access.revoke_key(headers[-1]["authorization"].split("_")[1])
        served.registry.close()

    def fill(self, text: str, tenant: int) -> str:
        other = self.cids[1 - tenant]
        return text.format(
            own=TENANTS[tenant],
            other=TENANTS[1 - tenant],
            own_cid=self.cids[tenant],
            other_cid=other,
            other_cid_start=other[: len("cidv1:sha256:") + 16],
        )

    def key_ids(self, tenant: int) -> list[str]:
        return [headers["authorization"].split("_")[1] for headers in self.headers[tenant]]

    def secrets(self, tenant: int) -> list[str]:
        """Return what only a tenant may see: its name, its key ids, and the digest of
        its content.
        """
        return [TENANTS[tenant], *self.key_ids(tenant), self.cids[tenant].rpartition(":")[2]]

    def _push(self, served: RegistryApp, tenant: str, number: int) -> str:
        # The same content in both tenants, and one of its own.
        served.push(f"{tenant}/sql@1.0.0", 1)
        served.push(f"{tenant}/sql@1.1.0", 2)
        served.registry.promote(f"{tenant}/sql", "1.0.0", alias="prod")
        served.push_image(f"{tenant}/ink@1.0.0", 60 + number)
        return served.push(f"{tenant}/private@1.0.0", 10 + number)

    def _key(self, served: RegistryApp, tenant: str, rights: dict[str, Any]) -> dict[str, str]:
        return served.key(tenant, *rights.pop("scopes", ()), **rights)


# Times, and ids that are drawn for each request.
VOLATILE = {
    *("created", "created_at", "time", "latency_ms", "ttft_ms", "queue_ms", "load_ms", "timings"),
    *("e2e_latency", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration"),
    *("modified_at", "expires_at", "last_use", "completed_at", "ends_at", "job_timestamp"),
    # Both tenants may have pushed the same content: its place is the server's.
    *("tier", "tier_found", "cold_miss"),
}
DRAWN = re.compile(
    r"lmx_[0-9a-f]{12}_[A-Za-z0-9_-]{43}"
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|(?<![0-9a-f])(?:[0-9a-f]{24,32}|[0-9a-f]{12})(?![0-9a-f])"
)
HEADERS = {"x-request-id", "content-length", "x-loramux-tier"}


def normal(response: httpx2.Response) -> tuple[Any, ...]:
    """Return what must be equal of two answers to the same request."""
    headers = {
        name: DRAWN.sub("ID", value)
        for name, value in response.headers.items()
        if name not in HEADERS and "time" not in name
    }
    return response.status_code, headers, _normal_text(response.text)


def _normal_text(text: str) -> Any:
    lines = text.splitlines()
    if len(lines) > 1:
        return [_normal_text(line.removeprefix("data: ").removeprefix("data:")) for line in lines]
    try:
        return _without_times(json.loads(text))
    except ValueError:
        return DRAWN.sub("ID", text)


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(one) for key, one in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [_without_times(one) for one in value]
    if isinstance(value, str):
        # A1111's info is JSON in a string.
        return _normal_text(value) if value.startswith("{") else DRAWN.sub("ID", value)
    return value
