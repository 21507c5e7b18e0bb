"""A TextBackend whose deltas, failures and adapters a test determines."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loramux.adapters.identity import CID_PREFIX
from loramux.backend.host import AdapterUse, EngineStats, Health
from loramux.backend.text import Delta, ModelCard
from loramux.errors import AdapterNotFound, InvalidRequest, LoramuxError
from loramux.server.naming.names import AdapterNames
from loramux.server.naming.registry_adapters import RegistryAdapters
from loramux.types.adapter import AdapterCard, InspectedCard
from loramux.types.model import BaseModelInfo
from loramux.types.request import FinishReason, Request, Selection, TokenLogprob
from loramux.types.residency import ResidencyView
from tests.linear_specs import specs_of

_NAMES = ("q", "k", "v", "o", "gate", "up", "down")
SHAPES = BaseModelInfo(
    name="base",
    architecture="LlamaForCausalLM",
    num_layers=2,
    linears=specs_of({f"{name}_proj": (32, 32) for name in _NAMES}),
    num_kv_heads=2,
    head_dim=16,
    vocab_size=512,
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
NAMES = ("legal", "team/polite")
CREATED_S = 1_700_000_000
REPLY = (b"Hel", b"lo", b" you")

Script = Callable[[Request], AsyncIterator[Delta]]


class ByteCodec:
    """A tokenizer whose tokens are bytes."""

    vocab_size = 256

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_pair(self, first: str, second: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(f"{first}\n{second}".encode())

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
            raise InvalidRequest(
                "chat_template_kwargs may not set tokenize.", param="chat_template_kwargs"
            )
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


def delta(request: Request, index: int, piece: bytes, finish: FinishReason | None = None) -> Delta:
    top, prompt_top = request.params.logprobs, request.params.prompt_logprobs
    return Delta(
        index=index,
        text=piece.decode(),
        token_ids=tuple(piece),
        logprobs=None if top is None else logprobs_of(piece, top),
        finish_reason=finish,
        prompt_logprobs=(
            None if prompt_top is None else logprobs_of(request.prompt_token_ids[1:], prompt_top)
        ),
    )


async def say_hello(request: Request) -> AsyncIterator[Delta]:
    """Yield REPLY for all choices in turn, cut at max_tokens."""
    said = b"".join(REPLY)
    for number, piece in enumerate(REPLY):
        for index in range(request.params.n):
            is_last = number == len(REPLY) - 1
            if request.params.max_tokens < len(said):
                piece, is_last = said[: request.params.max_tokens], True
            finish = FinishReason.STOP if is_last else None
            if is_last and request.params.max_tokens < len(said):
                finish = FinishReason.LENGTH
            yield delta(request, index, piece, finish)
            await asyncio.sleep(0)
        if is_last:
            return


def says_it_reused(*num_tokens: int) -> Script:
    """Return a script whose first deltas report these numbers of reused tokens by choice."""

    async def script(request: Request) -> AsyncIterator[Delta]:
        begun: set[int] = set()
        async for item in say_hello(request):
            is_first = item.index not in begun
            begun.add(item.index)
            yield replace(item, num_reused=num_tokens[item.index]) if is_first else item

    return script


def cid_of(folder: Path) -> str:
    """Derive a CID from the bytes in a folder."""
    content = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    return CID_PREFIX + hashlib.sha256(content).hexdigest()


def named(name: str) -> AdapterCard:
    """Describe the adapter with a name of NAMES."""
    return AdapterCard(cid=CID_PREFIX + name, path=f"/adapters/{name}", rank=8, num_bytes=1024)


class ScriptedBackend:
    """Has the adapters of NAMES, and a table `names` with these names, which make_app serves."""

    def __init__(
        self, script: Script = say_hello, *, registry: RegistryAdapters | None = None
    ) -> None:
        self.script = script
        self.health = Health.READY
        self.card = CARD
        self.codec = ByteCodec()
        self.codecs: dict[str, ByteCodec] = {}
        """The tokenizers of adapters that have one of their own."""
        self.stats = EngineStats(num_pages=10, num_free_pages=10)
        self.pages = b"." * 10
        """The kinds of its pages."""
        self.adapters: dict[str, AdapterCard] = {}
        self.names = AdapterNames(self, registry)
        for name in NAMES:
            self.give_name(name, named(name))
        self.num_restarts = 0
        self.kills: dict[str, int] = {}
        self.residency = ResidencyView()
        self.pinned: set[str] = set()
        self.uses: list[AdapterUse] = [
            AdapterUse(cid=card.cid, tier="host", num_bytes=card.num_bytes, rank=card.rank)
            for card in self.adapters.values()
        ]
        self.probe_script: Callable[[float], dict[str, float]] = lambda _: {"generate_s": 0.1}
        self.requests: list[Request] = []
        self.added: list[str] = []
        """Paths of the adapters that were to be added."""
        self.inspected: list[str] = []
        self.removed: list[str] = []
        self.prewarmed: list[str] = []
        self.refusal: Exception | None = None
        """The error that add_adapter raises."""
        self.closed = asyncio.Event()
        """Set whenever the iterator of a request has ended or was closed."""
        self.num_closed = 0

    def give_name(self, name: str, card: AdapterCard) -> None:
        self.adapters[card.cid] = card
        self.names.bind(name, card, created_s=CREATED_S)

    @property
    def cids(self) -> list[str | None]:
        """The adapter of each request so far; None: the base."""
        return [next((cid for cid, _ in one.selection), None) for one in self.requests]

    async def start(self) -> None: ...

    async def codec_for(self, selection: Selection) -> ByteCodec:
        return next((self.codecs[cid] for cid, _ in selection if cid in self.codecs), self.codec)

    async def submit(self, request: Request) -> AsyncIterator[Delta]:
        self.requests.append(request)
        try:
            async for item in self.script(request):
                yield item
        finally:
            self.num_closed += 1
            self.closed.set()

    async def add_adapter(self, path: str) -> AdapterCard:
        self.added.append(path)
        if self.refusal is not None:
            raise self.refusal
        if not Path(path).is_dir():
            raise AdapterNotFound(f"No adapter folder at {path}.")
        await asyncio.sleep(0)
        card = AdapterCard(cid=self.read_cid(Path(path)), path=path, rank=4, num_bytes=64)
        self.adapters[card.cid] = card
        return card

    async def inspect_adapters(
        self, paths: Sequence[str]
    ) -> list[AdapterCard | InspectedCard | LoramuxError]:
        """Knows no CID from the header, as of folders that were never read before."""
        self.inspected += paths
        return [
            InspectedCard(path=path, rank=4, num_bytes=64)
            if Path(path).is_dir()
            else AdapterNotFound(f"No adapter folder at {path}.")
            for path in paths
        ]

    def read_cid(self, folder: Path) -> str:
        """Folders of the store are named by their CID's digest."""
        is_digest = re.fullmatch("[0-9a-f]{64}", folder.name)
        return CID_PREFIX + folder.name if is_digest else cid_of(folder)

    async def remove_adapter(self, cid: str) -> None:
        self.removed.append(cid)
        del self.adapters[cid]

    async def prewarm(self, cids: Sequence[str], *, num_busiest: int = 0) -> None:
        self.prewarmed += cids

    async def pin_adapter(self, cid: str, pinned: bool) -> None:
        if all(use.cid != cid for use in self.uses):
            card = self.adapters[cid]
            self.uses.append(
                AdapterUse(cid=cid, tier="host", num_bytes=card.num_bytes, rank=card.rank)
            )
        self.uses = [replace(u, is_pinned=pinned) if u.cid == cid else u for u in self.uses]

    async def adapter_uses(self) -> Sequence[AdapterUse]:
        return self.uses

    async def page_kinds(self) -> bytes:
        return self.pages

    async def examine_adapter(self, path: str) -> Mapping[str, Any]:
        return {"ok": True, "folder": path}

    async def probe(self, timeout_s: float) -> dict[str, float]:
        return self.probe_script(timeout_s)

    async def close(self, *, drain_s: float) -> None: ...
