"""The client against a server that misbehaves in every way a network allows."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from loramux.client.client import Client
from loramux.client.errors import (
    BadReply,
    BadRequest,
    ClientError,
    ConnectFailed,
    ConnectionLost,
    IncompleteStream,
    NotAllowed,
    NotFound,
    RateLimited,
    ServerError,
    StreamError,
    TimedOut,
    Unavailable,
)
from loramux.errors import InvalidRequest
from tests.scripted_server import (
    DONE,
    Scripted,
    ScriptedServer,
    chat_chunk,
    chat_reply,
    completion_chunk,
    completion_reply,
    event,
    model_list,
    reply_error,
    reply_events,
    reply_json,
    scripted_server,
    usage_chunk,
)

HELLO = [{"role": "user", "content": "hello"}]
ANSWER = reply_events(event(chat_chunk("Hi")), event(chat_chunk(None, "stop")), DONE)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def sleeps() -> list[float]:
    return []


@pytest.fixture
def client(server: ScriptedServer, sleeps: list[float]) -> Iterator[Client]:
    with Client(server.url, api_key="secret", max_retries=2, sleep=sleeps.append) as client:
        yield client


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_chat_sends_adapters_and_sampling_and_reads_the_answer(
    server: ScriptedServer, client: Client
) -> None:
    server.replies.append(chat_reply("Hi", usage={"prompt_tokens": 3, "completion_tokens": 1}))
    reply = client.chat(HELLO, adapters=["a"], adapter_weights=[0.5], temperature=0, seed=7)
    assert (reply.text, reply.choices[0].finish_reason) == ("Hi", "stop")
    assert reply.usage is not None and reply.usage.prompt_tokens == 3
    [request] = server.received
    assert request.path == "/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer secret"
    assert request.fields == {
        "messages": HELLO,
        "adapters": ["a"],
        "adapter_weights": [0.5],
        "temperature": 0,
        "seed": 7,
    }


def test_an_empty_adapter_list_is_sent_because_it_means_the_base(
    server: ScriptedServer, client: Client
) -> None:
    server.replies.append(completion_reply("Hi"))
    assert client.complete("Say", model="a", adapters=[]).text == "Hi"
    assert server.received[0].fields == {"prompt": "Say", "model": "a", "adapters": []}


def test_models_tokenize_detokenize_and_health(server: ScriptedServer, client: Client) -> None:
    server.replies += [
        model_list("smol", ["pirate"]),
        reply_json({"tokens": [1, 2], "count": 2, "max_model_len": 64}),
        reply_json({"prompt": "hello"}),
        reply_json({"status": "ready"}),
        reply_json({"status": "restarting"}, 503),
        Scripted(),
    ]
    base, adapter = client.models()
    assert (base.id, base.is_adapter) == ("smol", False)
    assert (adapter.id, adapter.parent, adapter.is_adapter) == ("pirate", "smol", True)
    assert client.tokenize("hello", add_special_tokens=False).tokens == (1, 2)
    assert client.detokenize([1, 2]) == "hello"
    assert client.health().is_healthy
    unhealthy = client.health(deep=True)
    assert (unhealthy.is_healthy, unhealthy.status) == (False, 503)
    assert unhealthy.detail == {"status": "restarting"}
    assert client.health().detail == {}
    assert [request.path for request in server.received] == [
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/health?deep=1",
        "/health",
    ]


def test_adapters_are_listed_all_or_the_busiest(server: ScriptedServer, client: Client) -> None:
    entry = {"id": "pirate", "cid": "c", "rank": 8, "bytes": 4, "tier": "host", "new": 1}
    server.replies += [reply_json({"data": [entry]}), reply_json({"data": []})]
    [pirate] = client.adapters()
    assert (pirate.id, pirate.tier, pirate.last_use) == ("pirate", "host", None)
    assert client.adapters(busiest=3) == []
    paths = [request.path for request in server.received]
    assert paths == ["/v1/adapters", "/v1/adapters?order=busiest&limit=3"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest),
        (401, NotAllowed),
        (403, NotAllowed),
        (404, NotFound),
        (413, BadRequest),
        (422, BadRequest),
        (500, ServerError),
        (502, ServerError),
        (307, BadReply),
    ],
)
def test_each_status_has_its_exception_and_is_not_retried(
    status: int, kind: type[ClientError], server: ScriptedServer, client: Client
) -> None:
    server.replies.append(reply_error(status, "Not like this.", "top_p"))
    with pytest.raises(kind, match="Not like this") as caught:
        client.chat(HELLO)
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.param) == (status, "top_p")
    assert "invalid_request_error" in caught.value.body
    assert len(server.received) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_retried_after_its_delay(
    status: int, server: ScriptedServer, client: Client, sleeps: list[float]
) -> None:
    server.replies += [reply_error(status, Retry_After="2"), reply_error(status), ANSWER]
    assert "".join(chunk.text for chunk in client.stream_chat(HELLO)) == "Hi"
    assert len(server.received) == 3
    assert 2 <= sleeps[0] < 3
    assert 0 < sleeps[1] <= 1


@pytest.mark.parametrize(("status", "kind"), [(429, RateLimited), (503, Unavailable)])
def test_retries_end(
    status: int,
    kind: type[ClientError],
    server: ScriptedServer,
    client: Client,
    sleeps: list[float],
) -> None:
    server.replies += [reply_error(status, "busy", Retry_After="0")] * 3
    with pytest.raises(kind, match="busy"):
        client.chat(HELLO)
    assert (len(server.received), len(sleeps)) == (3, 2)


def test_a_wait_of_an_hour_is_not_waited_for(
    server: ScriptedServer, client: Client, sleeps: list[float]
) -> None:
    server.replies.append(reply_error(429, Retry_After="3600"))
    with pytest.raises(RateLimited) as caught:
        client.chat(HELLO)
    assert caught.value.retry_after_s == 3600
    assert sleeps == []


def test_a_server_that_comes_up_between_the_tries_is_found() -> None:
    port = free_port()
    stack: list[Any] = []

    def start_server(delay_s: float) -> None:
        stack.append(scripted_server(chat_reply("back"), port=port))
        stack[0].__enter__()

    with Client(f"http://127.0.0.1:{port}/v1/", sleep=start_server) as client:
        try:
            assert client.chat(HELLO).text == "back"
        finally:
            for server in stack:
                server.__exit__(None, None, None)


def test_a_refused_connection_is_reported_with_the_address(sleeps: list[float]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with Client(url, max_retries=1, sleep=sleeps.append) as client:
        with pytest.raises(ConnectFailed, match=url) as caught:
            client.models()
        assert caught.value.status is None
        assert len(sleeps) == 1
        with pytest.raises(ConnectFailed):
            client.health()
        assert len(sleeps) == 1


def test_a_stream_gives_its_chunks_and_its_usage(server: ScriptedServer, client: Client) -> None:
    server.replies.append(
        reply_events(
            event(chat_chunk("Hi", model="pirate")),
            event(chat_chunk(" there", model="pirate")),
            event(chat_chunk(None, "length", model="pirate")),
            event(usage_chunk(5, 2)),
            DONE,
        )
    )
    chunks = list(client.stream_chat(HELLO, model="pirate", max_tokens=2))
    assert [chunk.text for chunk in chunks] == ["Hi", " there", "", ""]
    assert chunks[0].model == "pirate"
    assert chunks[2].choices[0].finish_reason == "length"
    assert chunks[3].usage is not None and chunks[3].usage.total_tokens == 7
    assert server.received[0].fields["stream"] is True
    assert server.received[0].fields["stream_options"] == {"include_usage": True}


def test_bytes_may_be_split_anywhere(server: ScriptedServer, client: Client) -> None:
    text = "né 🦜 漢字\u2028 end"
    raw = (
        b": keep-alive\r\n\r\n"
        + event(chat_chunk(text)).replace(b"\n", b"\r\n")
        + b":\n\nid: 7\nretry: 10\nevent: message\n"
        + event(chat_chunk("", "stop"))
        + b": bye\n\n"
        + DONE
    )
    server.replies.append(reply_events(*(raw[i : i + 1] for i in range(len(raw)))))
    assert "".join(chunk.text for chunk in client.stream_chat(HELLO)) == text


BROKEN: dict[str, tuple[Scripted, type[ClientError]]] = {
    "cut in the middle": (reply_events(event(chat_chunk("Hi")), cut=True), IncompleteStream),
    "cut inside an event": (
        reply_events(event(chat_chunk("Hi")), event(chat_chunk("x"))[:20], cut=True),
        IncompleteStream,
    ),
    "a clean end without the end mark": (
        reply_events(event(chat_chunk("Hi")), event(chat_chunk(None, "stop"))),
        IncompleteStream,
    ),
    "an end mark without a finish reason": (
        reply_events(event(chat_chunk("Hi")), DONE),
        IncompleteStream,
    ),
    "an end mark that is itself cut": (
        reply_events(event(chat_chunk("Hi", "stop")), DONE[:-1]),
        IncompleteStream,
    ),
    "nothing at all": (reply_events(), IncompleteStream),
    "an error event": (
        reply_events(
            event(chat_chunk("Hi")), event({"error": {"message": "The engine died."}}), DONE
        ),
        StreamError,
    ),
    "an event named error": (
        reply_events(event(chat_chunk("Hi")), b"event: error\n" + event({"message": "died"})),
        StreamError,
    ),
    "an abort": (
        reply_events(event(chat_chunk("Hi")), event(chat_chunk(None, "abort")), DONE),
        StreamError,
    ),
    "not JSON": (reply_events(event(chat_chunk("Hi")), event("oops"), DONE), BadReply),
    "an unknown shape": (reply_events(event({"hello": 1}), DONE), BadReply),
    "no stream": (chat_reply("Hi"), BadReply),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_stream_never_looks_complete_and_is_not_retried(
    name: str, server: ScriptedServer, client: Client, sleeps: list[float]
) -> None:
    reply, kind = BROKEN[name]
    server.replies += [reply, ANSWER]
    with pytest.raises(ClientError) as caught:
        list(client.stream_chat(HELLO))
    assert type(caught.value) is kind
    assert (len(server.received), sleeps) == (1, [])


def test_what_came_before_the_error_is_still_given(server: ScriptedServer, client: Client) -> None:
    server.replies.append(BROKEN["an error event"][0])
    texts: list[str] = []
    with pytest.raises(StreamError, match="The engine died"):
        texts += (chunk.text for chunk in client.stream_chat(HELLO))
    assert texts == ["Hi"]


def test_the_word_error_in_an_answer_is_no_error(server: ScriptedServer, client: Client) -> None:
    answer = 'say {"error": 1}'
    chunk = chat_chunk(answer, "stop") | {"error": None}
    server.replies.append(reply_events(event(chunk), DONE))
    assert [chunk.text for chunk in client.stream_chat(HELLO)] == [answer]


def test_every_choice_of_every_prompt_must_finish(server: ScriptedServer, client: Client) -> None:
    ends = [event(completion_chunk("x", "stop", index=index)) for index in range(4)]
    server.replies += [reply_events(*ends[:3], DONE), reply_events(*ends, DONE)]
    with pytest.raises(IncompleteStream, match="choice 3"):
        list(client.stream_complete(["a", "b"], n=2))
    chunks = list(client.stream_complete([[1, 2], [3]], n=2))
    assert [chunk.text for chunk in chunks] == ["x", "", "", ""]


def test_closing_a_stream_early_hangs_up(server: ScriptedServer, client: Client) -> None:
    server.replies.append(reply_events(event(chat_chunk("x" * 4096)), endless=True))
    stream = client.stream_chat(HELLO)
    assert len(list(islice(stream, 3))) == 3
    stream.close()
    assert server.client_left.wait(10)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Scripted(body=b'{"id": "x"', cut=True), ConnectionLost),
        (Scripted(body=b"<html>"), BadReply),
        (Scripted(body=b"\xff\xfe"), BadReply),
        (reply_json({"id": "x", "model": "base", "choices": []}), BadReply),
        (chat_reply("Hi", "abort"), ServerError),
    ],
)
def test_a_broken_plain_reply_is_no_answer(
    reply: Scripted, kind: type[ClientError], server: ScriptedServer, client: Client
) -> None:
    server.replies.append(reply)
    with pytest.raises(kind):
        client.chat(HELLO)


def test_silence_times_out(server: ScriptedServer) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, timeout_s=0.05) as client, pytest.raises(TimedOut):
            client.chat(HELLO)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda client: client.chat(HELLO, stream=True), "stream"),
        (lambda client: client.tokenize(), "prompt"),
        (lambda client: client.tokenize("a", messages=HELLO), "prompt"),
        (lambda client: Client("localhost:8000"), "base_url"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_sent(
    call: Callable[[Client], object], param: str, server: ScriptedServer, client: Client
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call(client)
    assert caught.value.param == param
    assert server.received == []
