"""Stream answers from two adapters at the same time with loramux's asyncio client.

Start the server with `make serve`, then run: python examples/stream_client.py [URL]
"""

from __future__ import annotations

import asyncio
import sys

from loramux import AsyncClient

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


async def stream(client: AsyncClient, adapter: str) -> None:
    """Print each chunk as it arrives; an answer that breaks off raises an exception."""
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
            group.create_task(stream(client, adapter))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
