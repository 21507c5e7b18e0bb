from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from loramux.engine.messages import Command, Reply
from loramux.worker.channel import EngineChannel, ServerChannel
from loramux.worker.messages import Abort, Progress, Shutdown


def test_messages_of_any_size_cross_in_both_directions() -> None:
    async def talk() -> None:
        ours, theirs = socket.socketpair()
        server, engine = await ServerChannel.open(ours, Reply), EngineChannel(theirs, Command)
        large = "x" * 3_000_000
        sender = threading.Thread(target=lambda: engine.send(Progress(what=large, share=0.5)))
        sender.start()
        assert await server.receive() == Progress(what=large, share=0.5)
        sender.join()
        server.send(Abort(request_id="a"))
        server.send(Shutdown())
        received = [await asyncio.to_thread(engine.receive) for _ in range(2)]
        assert received == [Abort(request_id="a"), Shutdown()]
        server.close()
        theirs.close()

    asyncio.run(talk())


@pytest.mark.parametrize("cut", [b"", b"\x00\x00", b"\x00\x00\x00\x09half"])
def test_a_peer_that_dies_inside_a_message_ends_the_channel(cut: bytes) -> None:
    ours, theirs = socket.socketpair()
    engine = EngineChannel(theirs, Command)
    ours.sendall(cut)
    ours.close()
    assert engine.receive() is None
    theirs.close()

    async def server_side() -> None:
        ours, theirs = socket.socketpair()
        server = await ServerChannel.open(ours, Reply)
        theirs.sendall(cut)
        theirs.close()
        assert await server.receive() is None
        server.send(Shutdown())
        server.close()

    asyncio.run(server_side())


def test_a_peer_that_dies_with_unread_messages_ends_the_channel() -> None:
    ours, theirs = socket.socketpair()
    engine = EngineChannel(theirs, Command)
    engine.send(Progress(what="", share=0))
    ours.close()
    assert engine.receive() is None
    theirs.close()


def test_threads_may_send_concurrently() -> None:
    ours, theirs = socket.socketpair()
    engine = EngineChannel(theirs, Command)
    count = 200

    async def receive_all() -> int:
        server = await ServerChannel.open(ours, Reply)
        seen = [await server.receive() for _ in range(4 * count)]
        server.close()
        return sum(isinstance(reply, Progress) for reply in seen)

    def send() -> None:
        for _ in range(count):
            engine.send(Progress(what="", share=0))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert asyncio.run(receive_all()) == 4 * count
    for thread in threads:
        thread.join()
    theirs.close()
