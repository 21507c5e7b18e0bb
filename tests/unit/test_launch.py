from __future__ import annotations

import socket

import pytest

from loramux.errors import InvalidRequest
from loramux.launch import _listen, serve
from loramux.serve_config import ServeConfig


def test_a_port_in_use_is_said_before_the_model_is_loaded() -> None:
    steps: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServeConfig(port=taken.getsockname()[1])
        with pytest.raises(InvalidRequest, match="Cannot listen on .* --port") as caught:
            serve(config, progress=lambda what, share: steps.append(what), on_ready=print)
    assert caught.value.param == "port" and not steps


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """asyncio sets TCP_NODELAY only where the listener says that its protocol is TCP."""
    with _listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
