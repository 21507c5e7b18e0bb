"""Real servers behind two routers under faults of every kind, by a seed.

python -m tests.fleet_storm --seconds 1800 --seed 7

Kills, stops, a server that answers 500, one that lies in its reports, one that hangs in loads,
routers that are killed, keys that are revoked: no answer may be wrong, no load that was
acknowledged may be lost, and no request may be tried more than three times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import torch
from peft import PeftModel

from loramux.registry.keys import KeyRights
from loramux.registry.registry import Registry
from loramux.router.repeats import MAX_TRIES
from loramux.types.access import KeyScope
from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import save_model_with_tokenizer
from tests.fault_proxy import FaultProxy, Tries
from tests.fleet_factory import RouterOptions, RunningReplica, RunningRouter, replicas_of
from tests.s3_server import free_ports

NUM_REPLICAS, NUM_GIVEN, NUM_SOURCES, NUM_CLIENTS = 3, 6, 8, 4
LOAD_S = 10.0
NUM_TOKENS = 8
PROMPT = [5, 6, 7, 8]
OPERATOR = "key-of-the-operator"
REFUSALS = (429, 502, 503, 504)
# A change that was refused may be there for a moment, until its servers have undone it.
GRACE_S = 60.0
SETTLE_S = 240.0
FOLLOW_S = 5.0
LIES: tuple[dict[str, Any], ...] = (
    {"step_s": 0.0, "token_s": 0.0, "tier_s": [0.0] * 6, "open": 0, "waiting_tokens": 0},
    {"tier_s": [0.1, 0.1]},
    {"moves": {"0123456789abcdef": 9, "no key": -3}},
    {"state": "dancing"},
    {"slots": 0, "step_s": -1.0},
)
Version = str | None
"""A folder; None: the name is unknown."""


@dataclass
class Name:
    """What answers to a name may be, over time."""

    log: list[tuple[float, frozenset[Version]]] = field(default_factory=list)
    acknowledged: Version = None
    is_known: bool = True
    """Whether the last change was answered."""

    def allow(self, *versions: Version) -> None:
        self.log.append((time.monotonic(), frozenset(versions)))

    def allowed(self, since: float) -> set[Version]:
        """Return what was right at any time since."""
        before = [one for at, one in self.log if at <= since][-1:]
        return {v for one in [*before, *(o for at, o in self.log if at > since)] for v in one}


@dataclass
class Report:
    outcomes: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tries: Tries = field(default_factory=Tries)

    def line(self) -> str:
        return (
            f"answers {dict(self.outcomes)} faults {dict(self.events)} changes "
            f"{dict(self.changes)} wrong {len(self.wrong)}"
        )

    def __str__(self) -> str:
        return (
            f"answers {dict(self.outcomes)}\nfaults {dict(self.events)}\nchanges "
            f"{dict(self.changes)}\nmost tries {self.tries.most} (header {self.tries.highest})\n"
            f"wrong {len(self.wrong)}: {self.wrong[:10]}"
        )


class Scene:
    """The model, the adapters and what PEFT answers with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = save_model_with_tokenizer(folder / "model")
        self.expected: dict[str, list[int]] = {"base": greedy(model)}
        self.given = [f"a{i}" for i in range(NUM_GIVEN)]
        self.sources = [str(folder / "adapters" / f"s{i}") for i in range(NUM_SOURCES)]
        tuned: Any = None
        names = self.given + [Path(one).name for one in self.sources]
        for seed, name in enumerate(names):
            path = folder / "adapters" / name
            config = lora_config_dict(r=4, lora_alpha=64, base_model_name_or_path="model")
            write_adapter(path, config, lora_tensors(model.config, seed=seed))
            if tuned is None:
                tuned = PeftModel.from_pretrained(model, str(path), adapter_name=name)
            else:
                tuned.load_adapter(str(path), adapter_name=name)
            tuned.set_adapter(name)
            self.expected[str(path)] = greedy(tuned)
        assert len({tuple(one) for one in self.expected.values()}) == len(names) + 1

    def path(self, name: str) -> str:
        return str(self.folder / "adapters" / name)

    @property
    def flags(self) -> list[str]:
        flags = ["--model", str(self.folder / "model"), "--served-model-name", "base"]
        flags += ["--dtype", "float32", "--device-memory", "8MiB", "--prewarm", "0"]
        flags += ["--data", str(self.folder / "data"), "--allowed-roots", str(self.folder)]
        flags += ["--api-key", OPERATOR, "--allow-runtime-lora-updating", "--drain-s", "5"]
        return [*flags, "--lora-modules", *(f"{one}={self.path(one)}" for one in self.given)]


@torch.inference_mode()
def greedy(model: Any) -> list[int]:
    tokens = list(PROMPT)
    model.eval()
    for _ in range(NUM_TOKENS):
        logits = model(input_ids=torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@dataclass
class Fleet:
    replicas: list[RunningReplica]
    proxies: list[FaultProxy]
    routers: list[RunningRouter]
    registry: Registry
    up_since: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """When a router was last started, by URL; infinity while it is down."""

    def new_key(self, *, is_admin: bool) -> Any:
        scopes = {KeyScope.INFER, KeyScope.ADMIN} if is_admin else {KeyScope.INFER}
        return self.registry.access.create_key(KeyRights(tenant=None, scopes=frozenset(scopes)))


class Storm:
    def __init__(self, scene: Scene, fleet: Fleet, seed: int) -> None:
        self.scene, self.fleet = scene, fleet
        self.rng = random.Random(seed)
        self.report = Report()
        self.names: dict[str, Name] = defaultdict(Name)
        self.keys = {False: fleet.new_key(is_admin=False), True: fleet.new_key(is_admin=True)}
        self.revoked_at: dict[str, float] = {}
        self.is_on = True
        for name in ["base", *scene.given]:
            version = name if name == "base" else scene.path(name)
            self.names[name].allow(version)
            self.names[name].acknowledged = version

    async def run(self, seconds: float) -> Report:
        self.report.tries = self.fleet.proxies[0]._tries
        clients = [asyncio.create_task(self._ask_on(number)) for number in range(NUM_CLIENTS)]
        changing = asyncio.create_task(self._change_on())
        deadline = time.monotonic() + seconds
        faults: tuple[Callable[[], Awaitable[None]], ...] = (
            self._kill, self._stop, self._fail, self._lie, self._hang, self._kill_router,
            self._revoke,
        )  # fmt: skip
        order: list[Callable[[], Awaitable[None]]] = []
        while time.monotonic() < deadline:
            order = order or self.rng.sample(faults, len(faults))
            fault = order.pop()
            self.report.events[fault.__name__.strip("_")] += 1
            await fault()
            print(f"{deadline - time.monotonic():.0f} s left: {self.report.line()}", flush=True)
            await asyncio.sleep(self.rng.uniform(1, 3))
        self.is_on = False
        await changing
        await asyncio.gather(*clients)
        await self._check_end()
        return self.report

    # Faults

    def _pick(self) -> tuple[RunningReplica, FaultProxy]:
        number = self.rng.randrange(NUM_REPLICAS)
        return self.fleet.replicas[number], self.fleet.proxies[number]

    async def _kill(self) -> None:
        replica, _ = self._pick()
        replica.kill()
        await asyncio.to_thread(replica.start)

    async def _stop(self) -> None:
        replica, _ = self._pick()
        replica.signal(signal.SIGSTOP)
        # Shorter than the silence after which a server takes its engine for dead.
        await asyncio.sleep(self.rng.uniform(1, 12))
        replica.signal(signal.SIGCONT)

    async def _fail(self) -> None:
        _, proxy = self._pick()
        proxy.is_failing = True
        await asyncio.sleep(self.rng.uniform(5, 10))
        proxy.is_failing = False

    async def _lie(self) -> None:
        _, proxy = self._pick()
        proxy.lie = self.rng.choice(LIES)
        await asyncio.sleep(self.rng.uniform(5, 10))
        proxy.lie = {}

    async def _hang(self) -> None:
        _, proxy = self._pick()
        proxy.hangs_in_loads.clear()
        await asyncio.sleep(self.rng.uniform(5, 15))
        proxy.hangs_in_loads.set()

    async def _kill_router(self) -> None:
        router = self.rng.choice(self.fleet.routers)
        self.fleet.up_since[router.url] = math.inf
        router.kill()
        await asyncio.to_thread(router.start)
        self.fleet.up_since[router.url] = time.monotonic()

    async def _revoke(self) -> None:
        is_admin = self.rng.random() < 0.5
        old, new = self.keys[is_admin], self.fleet.new_key(is_admin=is_admin)
        # Servers follow the registry within a second or two.
        await asyncio.sleep(FOLLOW_S)
        self.keys[is_admin] = new
        self.fleet.registry.access.revoke_key(old.record.key_id)
        self.revoked_at[old.text] = time.monotonic()

    # Requests

    async def _ask_on(self, number: int) -> None:
        rng = random.Random(number)
        async with httpx2.AsyncClient(timeout=120, trust_env=False) as client:
            while self.is_on:
                await self._ask(client, rng)
                await asyncio.sleep(rng.uniform(0, 0.5))

    async def _ask(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        name = rng.choice(list(self.names))
        url = rng.choice(self.fleet.routers).url
        began, key = time.monotonic(), self.keys[False].text
        body = {
            "model": name, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "stream": rng.random() < 0.5,
        }  # fmt: skip
        headers = {"authorization": f"Bearer {key}"}
        try:
            async with client.stream(
                "POST", f"{url}/v1/completions", json=body, headers=headers
            ) as answer:
                content = await answer.aread()
        except httpx2.HTTPError as error:
            if began > self.fleet.up_since[url]:
                self._wrong(f"{name}: cut by a router that was up: {error!r}")
            self.report.outcomes["cut by a killed router"] += 1
            return
        if answer.status_code == 401 and key in self.revoked_at:
            self.report.outcomes["revoked meanwhile"] += 1
            return
        self._judge(name, answer, content, is_stream=bool(body["stream"]), began=began)

    def _judge(
        self, name: str, answer: httpx2.Response, content: bytes, *, is_stream: bool, began: float
    ) -> None:
        status, allowed = answer.status_code, self.names[name].allowed(began)
        if status in REFUSALS and (status == 502 or "retry-after" in answer.headers):
            self.report.outcomes[f"refused {status}"] += 1
        elif status == 500 and b"made to fail" in content:
            self.report.outcomes["made to fail"] += 1
        elif status == 404 and None in allowed:
            self.report.outcomes["unknown, rightly"] += 1
        elif status != 200:
            self._wrong(f"{name}: {status} {content[:300]!r}, allowed {allowed}")
        else:
            self._judge_tokens(name, content, allowed, is_stream=is_stream)

    def _judge_tokens(
        self, name: str, content: bytes, allowed: set[Version], *, is_stream: bool
    ) -> None:
        tokens, is_whole = tokens_of(content, is_stream=is_stream)
        right = [self.scene.expected[one] for one in allowed if one is not None]
        if is_whole is None:
            self._wrong(f"{name}: a stream was cut silently: {content[-200:]!r}")
        elif not any(tokens == (one if is_whole else one[: len(tokens)]) for one in right):
            meant = [one for one, known in self.scene.expected.items() if known == tokens]
            self._wrong(f"{name}: answered by {meant}, allowed {allowed}")
        self.report.outcomes["complete" if is_whole else "ended with an error event"] += 1

    def _wrong(self, text: str) -> None:
        self.report.wrong.append(text)
        print("WRONG", text, flush=True)

    # Changes of adapters

    async def _change_on(self) -> None:
        async with httpx2.AsyncClient(timeout=120, trust_env=False) as client:
            while self.is_on:
                await self._change(client)
                await asyncio.sleep(self.rng.uniform(1, 4))

    async def _change(self, client: httpx2.AsyncClient) -> None:
        name = f"n{self.rng.randrange(6)}"
        one, source = self.names[name], self.rng.choice(self.scene.sources)
        old = one.acknowledged
        if not one.log:
            one.allow(None)
        is_unload = old is not None and self.rng.random() < 0.3
        new = None if is_unload else source
        before = one.log[-1][1]
        one.allow(*before, new)
        body: dict[str, Any] = {"lora_name": name}
        if not is_unload:
            body |= {"lora_path": source, "load_inplace": True}
        kind = "unload" if is_unload else "load"
        url = self.rng.choice(self.fleet.routers).url
        headers = {"authorization": f"Bearer {self.keys[True].text}"}
        try:
            answer = await client.post(f"{url}/v1/{kind}_lora_adapter", json=body, headers=headers)
        except httpx2.HTTPError:
            # It may have happened or not; a later change that is acknowledged decides.
            one.is_known = False
            self.report.changes[f"{kind} lost"] += 1
            return
        self.report.changes[f"{kind} {answer.status_code}"] += 1
        is_gone = is_unload and answer.status_code == 404
        if answer.status_code == 200 or is_gone:
            one.acknowledged, one.is_known = new, True
            one.allow(new)
        elif is_unload and answer.status_code in REFUSALS:
            # Recorded, and done later where it was not.
            one.is_known = False
        elif one.is_known:
            asyncio.get_running_loop().call_later(GRACE_S, self._end_grace, one, len(one.log))

    def _end_grace(self, one: Name, length: int) -> None:
        """Check that the change is undone by now, if there was no other since."""
        if one.is_known and len(one.log) == length:
            one.allow(one.acknowledged)

    # The end

    async def _check_end(self) -> None:
        """Every server by itself has what was acknowledged, and nothing else."""
        for router in self.fleet.routers:
            await self._settle(router)
        # A look of every loop.
        await asyncio.sleep(5)
        for replica in self.fleet.replicas:
            for name, one in self.names.items():
                if one.is_known:
                    await self._check_server(replica, name, one.acknowledged)
        await self._check_revoked()
        if self.report.tries.most > MAX_TRIES or self.report.tries.highest > MAX_TRIES:
            self._wrong(f"a request was tried {self.report.tries.most} times")

    async def _settle(self, router: RunningRouter) -> None:
        deadline = time.monotonic() + SETTLE_S
        while True:
            told = await asyncio.to_thread(replicas_of, router.url)
            if all(
                one["state"] == "ready" and not one["lacking"] and one["is_prepared"]
                for one in told
            ):
                return
            if time.monotonic() > deadline:
                self._wrong(f"not settled: {told}")
                return
            await asyncio.sleep(0.5)

    async def _check_revoked(self) -> None:
        headers = {"authorization": ""}
        async with httpx2.AsyncClient(timeout=60, trust_env=False) as client:
            for text in self.revoked_at:
                headers["authorization"] = f"Bearer {text}"
                for router in self.fleet.routers:
                    told = await client.get(f"{router.url}/v1/models", headers=headers)
                    if told.status_code != 401:
                        self._wrong(f"a revoked key is answered with {told.status_code}")

    async def _check_server(self, replica: RunningReplica, name: str, version: Version) -> None:
        body = {
            "model": name, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        headers = {"authorization": f"Bearer {OPERATOR}"}
        async with httpx2.AsyncClient(timeout=120, trust_env=False) as client:
            answer = await client.post(f"{replica.url}/v1/completions", json=body, headers=headers)
        if version is None:
            if answer.status_code != 404:
                self._wrong(f"{replica.name} still has {name}: {answer.status_code}")
        elif answer.status_code != 200:
            self._wrong(f"{replica.name} has lost {name}: {answer.status_code} {answer.text[:200]}")
        elif answer.json()["choices"][0]["token_ids"] != self.scene.expected[version]:
            self._wrong(f"{replica.name} answers otherwise for {name}")


def tokens_of(content: bytes, *, is_stream: bool) -> tuple[list[int], bool | None]:
    """Return the tokens and whether they are all; None: the stream was cut."""
    if not is_stream:
        return json.loads(content)["choices"][0]["token_ids"], True
    events = [one.removeprefix("data: ") for one in content.decode().strip().split("\n\n")]
    is_done = events[-1] == "[DONE]"
    if not is_done and '"error"' not in events[-1]:
        return [], None
    chunks = [json.loads(one) for one in events[:-1]]
    return [t for one in chunks for c in one["choices"] for t in c.get("token_ids") or ()], is_done


@asynccontextmanager
async def running_storm(folder: Path, seed: int) -> AsyncIterator[Storm]:
    # Starts that compile nothing.
    os.environ.setdefault("LORAMUX_KERNELS", "cpu")
    scene = Scene(folder)
    ports = free_ports(2 * NUM_REPLICAS + 2)
    own, others = ports[:NUM_REPLICAS], ports[NUM_REPLICAS : 2 * NUM_REPLICAS]
    tries = Tries()
    replicas = [RunningReplica(f"r{i}", p, folder, scene.flags) for i, p in enumerate(own)]
    proxies = [FaultProxy(p, r.url, tries) for p, r in zip(others, replicas, strict=True)]
    path = str(folder / "data" / "registry.db")
    flags = ["--registry", path, "--load-s", str(LOAD_S)]
    options = RouterOptions(flags, {"LORAMUX_API_KEY": OPERATOR})
    urls = [proxy.url for proxy in proxies]
    routers = [RunningRouter(folder, port, urls, options) for port in ports[2 * NUM_REPLICAS :]]
    try:
        for proxy in proxies:
            await proxy.start()
        with Registry(path) as registry:
            await asyncio.gather(*(asyncio.to_thread(one.start) for one in replicas))
            await asyncio.gather(*(asyncio.to_thread(one.start) for one in routers))
            fleet = Fleet(replicas, proxies, routers, registry)
            storm = Storm(scene, fleet, seed)
            deadline = time.monotonic() + SETTLE_S
            while not await asyncio.to_thread(_is_ready, routers):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
            # Servers follow the keys of the registry.
            await asyncio.sleep(FOLLOW_S)
            yield storm
    finally:
        for running in (*routers, *replicas):
            if hasattr(running, "process") or hasattr(running, "server"):
                await asyncio.to_thread(running.close)
        for proxy in proxies:
            await proxy.close()


def _is_ready(routers: list[RunningRouter]) -> bool:
    return all(one["state"] == "ready" for r in routers for one in replicas_of(r.url))


async def run_storm(folder: Path, *, seed: int, seconds: float) -> Report:
    async with running_storm(folder, seed) as storm:
        return await storm.run(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="keeps the logs there")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="fleet-storm-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = asyncio.run(run_storm(folder, seed=given.seed, seconds=given.seconds))
    print(f"seed {given.seed}, {given.seconds:g} s, logs in {folder}\n{report}")
    raise SystemExit(bool(report.wrong))


if __name__ == "__main__":
    main()
