"""Two adapters answer at the same time, streamed by loramux's own asyncio client.

python examples/stream_client.py [URL]        (the server: make serve)
"""

from __future__ import annotations

import asyncio
import sys

from loramux import AsyncClient

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


async def watch(client: AsyncClient, adapter: str) -> None:
    """Prints each piece as it comes; raises if the answer breaks off, so what ends is whole."""
    async for chunk in client.stream_chat(
        QUESTION, adapters=[adapter], temperature=0, max_tokens=24
    ):
        if chunk.text:
            print(f"{adapter:>6}: {chunk.text!r}")
        if chunk.usage is not None:
            print(f"{adapter:>6}: {chunk.usage.completion_tokens} tokens")


async def main(url: str = "http://127.0.0.1:8000") -> None:
    async with AsyncClient(url) as client, asyncio.TaskGroup() as group:
        for adapter in ("shout", "pirate"):
            group.create_task(watch(client, adapter))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
