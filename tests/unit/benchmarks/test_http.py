"""The parts of `loramux bench http`; test_goals.py runs the whole program."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from benchmarks.goals import http_figures
from benchmarks.http import Case, Plan, bodies, make_parser, set_defaults, start_rows
from benchmarks.lib.http_load import run_load
from benchmarks.lib.model_folder import SHARD_BYTES, Weight, split_weights, write_model
from benchmarks.lib.random_weights import SHAPES
from benchmarks.lib.serve_process import Line, StartedServer, banner, phase_seconds, started_server
from loramux.engine.tokenizer import Tokenizer
from loramux.models.loader import load_model

OUTPUT = [
    Line(1.0, "Base      /models/llama"),
    Line(1.0, "Adapter   sql from sql-lora"),
    Line(1.0, "Starting …"),
    Line(3.0, "Loading weights …"),
    Line(7.0, "Checking adapter sql …"),
    Line(8.0, "Checking adapter json …"),
    Line(8.5, "INFO:     Started server process [9]"),
    Line(10.0, "Listening on http://127.0.0.1:8000"),
]


def test_the_phases_of_a_start_are_timed_from_its_output() -> None:
    assert phase_seconds(OUTPUT, 10.0) == {
        "Python and command line": 1.0,
        "Starting": 2.0,
        "Loading weights": 4.0,
        "Checking adapters": 3.0,
    }
    assert banner(OUTPUT) == ("Base      /models/llama",)


def test_a_table_of_starts_has_every_phase_and_the_total() -> None:
    cold = StartedServer("", {"Compiling": 30.0, "first token": 1.0}, ())
    warm = StartedServer("", {"Loading weights": 3.0, "first token": 1.0}, ())
    rows = start_rows({"cold s": cold, "warm s": warm})
    assert rows[0] == {"phase": "Compiling", "cold s": 30.0, "warm s": None}
    assert rows[-1] == {"phase": "total", "cold s": 31.0, "warm s": 4.0}


def test_a_start_is_held_against_its_goals_without_reading_the_weights() -> None:
    rows = [
        {"phase": "Loading weights", "cold s": 5.0, "warm s": 6.0},
        {"phase": "total", "cold s": 50.0, "warm s": 17.5},
    ]
    cold, warm = http_figures([{"rows": rows}])
    assert (cold.value, cold.holds) == (50.0, False)
    assert (warm.value, warm.holds) == (11.5, True)


def test_a_server_that_does_not_start_is_reported_with_its_output(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="status 2(.|\n)*max-queue: must be 0"),
        started_server(["--max-queue=-1"], folder=tmp_path),
    ):
        pass


def test_a_written_model_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    shape = {**SHAPES["small"], "num_hidden_layers": 1}
    folder = write_model(tmp_path / "model", shape)
    weights = dict(load_model(folder, dtype=torch.float32).decoder.named_parameters())
    stds = [float(weight.std()) for weight in weights.values() if weight.dim() > 1]
    assert all(0.018 < std < 0.022 for std in stds)
    assert all(bool((w == 1).all()) for w in weights.values() if w.dim() == 1)
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == shape["vocab_size"]
    assert tokenizer.decode([256, 300]) == " w0 w2c"


def test_shards_keep_to_their_size() -> None:
    weights = [Weight(str(number), (SHARD_BYTES // 8,)) for number in range(5)]
    assert [len(shard) for shard in split_weights(weights)] == [4, 1]


@pytest.fixture
def url() -> Iterator[str]:
    """Yield a server whose answers are known: it streams the words of the prompt, or sends them
    whole.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            words = body["prompt"].split()
            if not words:
                self.send_error(429, "busy")
                return
            self.send_response(200)
            if not body.get("stream"):
                choices = [{"text": "".join(words)}]
                content = {"choices": choices, "usage": {"completion_tokens": len(words)}}
                text = json.dumps(content).encode()
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
                return
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number, word in enumerate(words, 1):
                reason = "length" if number == len(words) else None
                self.send_event({"choices": [{"text": word, "finish_reason": reason}]})
            self.send_event({"choices": [], "usage": {"completion_tokens": len(words)}})
            self.send_chunk(b"data: [DONE]\n\n")
            self.send_chunk(b"")

        def send_event(self, event: object) -> None:
            self.send_chunk(b"data: %s\n\n" % json.dumps(event, separators=(",", ":")).encode())

        def send_chunk(self, text: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("is_stream", [True, False])
def test_clients_send_every_request_once_and_get_its_answer(url: str, is_stream: bool) -> None:
    prompts = [" ".join("abcdefg"[: 1 + number % 7]) for number in range(10)]
    sent = [{"prompt": prompt, "stream": is_stream} for prompt in prompts]
    replies = run_load(url, sent, 3, 30)
    assert [reply.text for reply in replies] == [prompt.replace(" ", "") for prompt in prompts]
    for prompt, reply in zip(prompts, replies, strict=True):
        num_words = len(prompt.split())
        assert reply.num_tokens == num_words
        assert len(reply.token_s) == (num_words if is_stream else 0)
        assert reply.sent_s <= min(reply.token_s, default=reply.finished_s) <= reply.finished_s


def test_a_refused_request_stops_the_load_with_its_status(url: str) -> None:
    with pytest.raises(RuntimeError, match="answered 429"):
        run_load(url, [{"prompt": "a"}, {"prompt": ""}], 1, 30)


def plan(**changes: object) -> Plan:
    values: dict[str, object] = {
        **{"model": "m", "device": None, "dtype": None, "cases": (), "num_input": 3},
        **{"folders": (Path("a"), Path("b")), "num_output": 4, "rounds": 2, "repeats": 1},
        "last_token": 1000,
    }
    return Plan(**{**values, **changes})  # type: ignore[arg-type]


def test_adapters_take_turns_and_runs_have_their_own_prompts() -> None:
    case = Case(num_clients=2, num_adapters=2)
    sent = bodies(plan(), case, 0, num_output=4, is_stream=True)
    assert [body["model"] for body in sent] == ["a", "b", "a", "b"]
    assert all(body["stream"] for body in sent)
    base = bodies(plan(), Case(2, 0), 0, num_output=4, is_stream=False)
    assert {body["model"] for body in base} == {"base"} and "stream" not in base[0]
    assert plan().prompts(case, 0) == plan().prompts(case, 0) != plan().prompts(case, 1)


def test_a_gpu_gets_the_shapes_of_an_8b_model_and_up_to_256_clients() -> None:
    on_gpu, on_cpu = (make_parser().parse_args([]) for _ in range(2))
    set_defaults(on_gpu, is_gpu=True)
    set_defaults(on_cpu, is_gpu=False)
    assert (on_gpu.model, on_gpu.clients) == ("llama-3.1-8b", [1, 32, 128, 256])
    assert (on_cpu.model, on_cpu.clients) == (None, [1, 8, 32])
    given = make_parser().parse_args(["--quick", "--clients", "7"])
    set_defaults(given, is_gpu=True)
    assert given.clients == [7] and given.repeats == 1
