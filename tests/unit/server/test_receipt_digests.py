"""Receipts sign the token ids of prompts and answers, and three programs verify it."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from loramux.backend.text import Delta
from loramux.base.signing import make_key_files, read_private_key
from loramux.engine.tokenizer import Tokenizer
from loramux.errors import EngineStopped
from loramux.receipts.claims import ANSWERS, PROMPTS, is_signed
from loramux.receipts.issuer import ReceiptIssuer
from loramux.types.request import Request
from tests.cli_factory import Shell
from tests.tokenizer_factory import save_byte_level
from tests.unit.server.asgi_client import CHAT, COMPLETIONS, make_app, post
from tests.unit.server.scripted_backend import ScriptedBackend, delta

EXAMPLE = Path(__file__).parents[3] / "examples" / "verify_receipt.py"
SAID = list(b"Hello you")
IDS: dict[str, Any] = {"return_token_ids": True, "max_tokens": 20}
CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}], **IDS}


def digest(ids: Sequence[int]) -> str:
    packed = b"".join(struct.pack("<I", one) for one in ids)
    return "sha256:" + hashlib.sha256(packed).hexdigest()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key_files(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def ask(key: Path, path: str, body: dict[str, Any], **issuer: Any) -> Any:
    issued = ReceiptIssuer(in_streams=True, key=read_private_key(key), **issuer)
    return post(make_app(receipts=issued), path, body)


def events(text: str) -> list[dict[str, Any]]:
    lines = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")
    ]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "prompts", "num_answers"),
    [
        (COMPLETIONS, {"prompt": "hi"}, [b"hi"], 1),
        (COMPLETIONS, {"prompt": ["hi", "you"], "n": 2}, [b"hi", b"you"], 4),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "n": 2}, [b"u:hi\na:"], 2),
    ],
)
def test_receipts_have_a_digest_of_each_prompt_and_answer(
    key: Path, path: str, body: dict[str, Any], prompts: list[bytes], num_answers: int, stream: bool
) -> None:
    answer = ask(key, path, body | {"max_tokens": 20, "stream": stream})
    serving = (events(answer.text)[-1] if stream else answer.json())["serving"]
    assert serving["prompt_digests"] == [digest(one) for one in prompts]
    assert serving["answer_digests"] == [digest(SAID)] * num_answers


def test_metadata_alone_is_a_setting(key: Path) -> None:
    serving = ask(key, COMPLETIONS, {"prompt": "hi"}, has_digests=False).json()["serving"]
    assert not {"prompt_digests", "answer_digests"} & serving.keys()


def test_an_answer_that_broke_off_is_signed_as_far_as_it_came(key: Path) -> None:
    async def break_off(request: Request) -> AsyncIterator[Delta]:
        yield delta(request, 0, b"He")
        raise EngineStopped("The engine was restarted.")

    issued = ReceiptIssuer(in_streams=True, key=read_private_key(key), writer=(kept := Kept()))
    assert post(
        make_app(ScriptedBackend(break_off), receipts=issued), COMPLETIONS, {"prompt": "hi"}
    ).is_error
    assert kept.receipts[0].answer_digests == (digest(b"He"),)


class Kept:
    num_dropped = 0

    def __init__(self) -> None:
        self.receipts: list[Any] = []

    def add(self, receipt: Any) -> None:
        self.receipts.append(receipt)

    def find(self, receipt_id: str) -> None:
        return None


def changed(reply: dict[str, Any], where: str) -> dict[str, Any]:
    other = json.loads(json.dumps(reply))
    if where == "answer":
        other["choices"][0]["token_ids"][2] += 1
    elif where == "prompt":
        holder = other if other.get("prompt_token_ids") else other["choices"][0]
        holder["prompt_token_ids"].append(7)
    elif where == "receipt":
        other["serving"]["answer_digests"][0] = digest([1])
    return other


@pytest.mark.parametrize("where", ["", "answer", "prompt", "receipt"])
@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "hi", "n": 2, **IDS}), (CHAT, CHAT_BODY)]
)
def test_a_changed_reply_is_found_by_the_command_and_by_the_example(
    shell: Shell, key: Path, tmp_path: Path, path: str, body: dict[str, Any], where: str
) -> None:
    file = tmp_path / "reply.json"
    file.write_text(json.dumps(changed(ask(key, path, body).json(), where)))
    verified = shell.run("receipts", "verify", "--file", file, "--key", f"{key}.pub")
    assert verified.exit_code == (1 if where else 0), verified.stdout
    if where in ("answer", "prompt"):
        assert "signs other tokens" in verified.stdout
    command = [sys.executable, "-I", str(EXAMPLE), f"{key}.pub", str(file)]
    assert (subprocess.run(command, capture_output=True).returncode != 0) == bool(where)


def test_a_recorded_stream_is_compared_with_its_receipt(
    shell: Shell, key: Path, tmp_path: Path
) -> None:
    text = ask(key, COMPLETIONS, {"prompt": "hi", "n": 2, "stream": True, **IDS}).text
    file = tmp_path / "stream.txt"
    for recorded, code in ((text, 0), (text.replace("[72,", "[73,").replace("[72]", "[73]"), 1)):
        file.write_text(recorded)
        verified = shell.run("receipts", "verify", "--file", file, "--key", f"{key}.pub")
        assert verified.exit_code == code, verified.stdout
    assert recorded != text


def test_tokens_that_are_given_are_compared_with_the_receipt(
    shell: Shell, key: Path, tmp_path: Path
) -> None:
    reply = ask(key, COMPLETIONS, {"prompt": "hi", "max_tokens": 20}).json()
    (tmp_path / "reply.json").write_text(json.dumps(reply))
    given = ["receipts", "verify", "--file", tmp_path / "reply.json", "--key", f"{key}.pub"]
    for name, ids, code in (
        ("--answer", SAID, 0),
        ("--answer", SAID[:-1], 1),
        ("--prompt", list(b"hi"), 0),
        ("--prompt", list(b"ho"), 1),
    ):
        (tmp_path / "ids.json").write_text(json.dumps(ids))
        assert shell.run(*given, name, tmp_path / "ids.json").exit_code == code, (name, ids)
    (tmp_path / "ids.json").write_text("Hello you")
    refused = shell.run(*given, "--answer", tmp_path / "ids.json")
    assert refused.exit_code == 2 and "--tokenizer" in refused.stderr


def test_the_example_is_short_and_needs_cryptography_alone() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 40
    imported = {
        line.split()[1].partition(".")[0]
        for line in text.splitlines()
        if "import " in line and line.startswith(("import", "from"))
    }
    assert imported - set(sys.stdlib_module_names) == {"cryptography"}


def test_a_text_is_compared_by_its_usual_tokenization(tmp_path: Path) -> None:
    codec = Tokenizer(save_byte_level(tmp_path))
    end = min(codec.special_ids)
    ids = codec.encode("Rome is it.", add_special_tokens=False)
    body = {
        "prompt_digests": [digest(codec.encode("Where?"))],
        "answer_digests": [digest([*ids, end]), digest(ids)],
    }
    assert is_signed(body, ANSWERS, "Rome is it.", codec)
    assert is_signed({**body, ANSWERS: body[ANSWERS][:1]}, ANSWERS, "Rome is it.", codec)
    assert is_signed(body, PROMPTS, "Where?", codec)
    assert not is_signed(body, ANSWERS, "Rome is it", codec)
    assert not is_signed(body, PROMPTS, "Rome is it.", codec)
