"""A Backend that plays a script: when it speaks, fails or is closed is for the test to say."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loramux.adapters.identity import CID_PREFIX
from loramux.backend import (
    AdapterCard,
    AdapterUse,
    Delta,
    EngineStats,
    Health,
    Job,
    ModelCard,
)
from loramux.errors import AdapterNotFound, InvalidRequest
from loramux.types.model import BaseModelInfo, Projection
from loramux.types.request import FinishReason, TokenLogprob

SHAPES = BaseModelInfo(
    name="base",
    architecture="LlamaForCausalLM",
    num_layers=2,
    projections=tuple(
        Projection(f"{name}_proj", 32, 32) for name in ("q", "k", "v", "o", "gate", "up", "down")
    ),
    num_kv_heads=2,
    head_dim=16,
    num_parameters=20_000,
)
CARD = ModelCard(
    name="tiny-base",
    path="/models/tiny-base",
    digest="sha256:0123456789abcdef0123456789abcdef",
    max_model_len=64,
    vocab_size=256,
    dtype="float32",
    pool_bytes=1 << 20,
    shapes=SHAPES,
    host_memory_bytes=1 << 21,
    disk_space_bytes=1 << 22,
)
ADAPTERS = {
    name: AdapterCard(
        name=name, path=f"/adapters/{name}", cid=f"cidv1:sha256:{name}", rank=8, num_bytes=1024,
        created_s=1_700_000_000,
    )
    for name in ("legal", "team/polite")
}  # fmt: skip
REPLY = (b"Hel", b"lo", b" you")

Script = Callable[[Job], AsyncIterator[Delta]]


class ByteCodec:
    """A token is a byte."""

    vocab_size = 256

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        if (chat_template_kwargs or {}).get("tokenize"):
            raise InvalidRequest("Not yours to set.", param="chat_template_kwargs")
        texts = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list):
                content = "".join(part["text"] for part in content)
            if content is None:
                raise InvalidRequest("A message has no content.", param="messages")
            texts.append(f"{message['role'][0]}:{content}\n")
        return self.encode("".join(texts) + ("a:" if add_generation_prompt else ""))

    def token_to_str(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def logprobs_of(token_ids: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(i, -0.5, 1, tuple((j, -0.5 - j) for j in range(65, 65 + top)))
        for i in token_ids
    )


def delta(job: Job, index: int, piece: bytes, finish: FinishReason | None = None) -> Delta:
    top, prompt_top = job.params.logprobs, job.params.prompt_logprobs
    return Delta(
        index=index,
        text=piece.decode(),
        token_ids=tuple(piece),
        logprobs=None if top is None else logprobs_of(piece, top),
        finish_reason=finish,
        prompt_logprobs=(
            None if prompt_top is None else logprobs_of(job.prompt_token_ids[1:], prompt_top)
        ),
    )


async def say_hello(job: Job) -> AsyncIterator[Delta]:
    """Choices take turns; each says REPLY, cut at max_tokens."""
    said = b"".join(REPLY)
    for number, piece in enumerate(REPLY):
        for index in range(job.params.n):
            is_last = number == len(REPLY) - 1
            if job.params.max_tokens < len(said):
                piece, is_last = said[: job.params.max_tokens], True
            finish = FinishReason.STOP if is_last else None
            if is_last and job.params.max_tokens < len(said):
                finish = FinishReason.LENGTH
            yield delta(job, index, piece, finish)
            await asyncio.sleep(0)
        if is_last:
            return


def says_it_reused(*num_tokens: int) -> Script:
    """One number for each choice, with its first delta."""

    async def script(job: Job) -> AsyncIterator[Delta]:
        begun: set[int] = set()
        async for item in say_hello(job):
            is_first = item.index not in begun
            begun.add(item.index)
            yield replace(item, num_reused=num_tokens[item.index]) if is_first else item

    return script


def cid_of(folder: Path) -> str:
    """Other bytes in the folder, another CID."""
    content = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    return CID_PREFIX + hashlib.sha256(content).hexdigest()


class ScriptedBackend:
    def __init__(self, script: Script = say_hello) -> None:
        self.script = script
        self.health = Health.READY
        self.card = CARD
        self.codec = ByteCodec()
        self.stats = EngineStats(num_pages=10, num_free_pages=10)
        self.adapters: dict[str, AdapterCard] = dict(ADAPTERS)
        self.num_restarts = 0
        self.uses: list[AdapterUse] = [
            AdapterUse(cid=card.cid, tier="host", num_bytes=card.num_bytes, rank=card.rank)
            for card in ADAPTERS.values()
        ]
        self.probe_script: Callable[[float], dict[str, float]] = lambda _: {"generate_s": 0.1}
        self.jobs: list[Job] = []
        self.added: list[tuple[str, str]] = []
        self.prewarmed: list[str] = []
        """(name, path) of every adapter that was to be added."""
        self.refusal: Exception | None = None
        """What add_adapter raises."""
        self.closed = asyncio.Event()
        """Set whenever a job's iterator has ended or was closed."""
        self.num_closed = 0

    async def start(self) -> None: ...

    async def submit(self, job: Job) -> AsyncIterator[Delta]:
        self.jobs.append(job)
        try:
            async for item in self.script(job):
                yield item
        finally:
            self.num_closed += 1
            self.closed.set()

    async def add_adapter(self, name: str, path: str) -> AdapterCard:
        self.added.append((name, path))
        if self.refusal is not None:
            raise self.refusal
        if not Path(path).is_dir():
            raise AdapterNotFound(f"No adapter folder at {path}.")
        await asyncio.sleep(0)
        cid = name if name.startswith(CID_PREFIX) else cid_of(Path(path))
        card = AdapterCard(name=name, path=path, cid=cid, rank=4, num_bytes=64)
        self.adapters[name] = card
        return card

    async def remove_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise AdapterNotFound(f"The lora adapter '{name}' cannot be found.")

    async def prewarm(self, names: Sequence[str], *, num_busiest: int = 0) -> None:
        self.prewarmed += names

    async def pin_adapter(self, name: str, pinned: bool) -> None:
        cid = self.adapters[name].cid
        self.uses = [replace(u, is_pinned=pinned) if u.cid == cid else u for u in self.uses]

    async def adapter_uses(self) -> Sequence[AdapterUse]:
        return self.uses

    async def probe(self, timeout_s: float) -> dict[str, float]:
        return self.probe_script(timeout_s)

    async def close(self, *, drain_s: float) -> None: ...
