from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from loramux.engine.tokenizer import Tokenizer
from loramux.errors import InvalidRequest, UnsupportedModel
from tests.tokenizer_factory import TEXT, save_byte_fallback, save_byte_level

MESSAGES = [{"role": "user", "content": "Stop here"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_byte_fallback(tmp_path_factory.mktemp("byte_fallback")))


def test_encode_and_decode_equal_transformers(tokenizer: Tokenizer, folder: Path) -> None:
    """Catches a special token lost, or text cleaned up on the way back."""
    oracle = AutoTokenizer.from_pretrained(folder)
    for text in [*TEXT, "<|im_start|>a b<|im_end|>", "a , b .", ""]:
        token_ids = tokenizer.encode(text)
        assert token_ids == oracle(text)["input_ids"]
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
        assert tokenizer.decode(token_ids) == oracle.decode(token_ids, skip_special_tokens=True)


def test_long_texts_are_encoded_and_decoded_while_other_threads_run(tokenizer: Tokenizer) -> None:
    text = " ".join(TEXT) * 40
    begun, ended = threading.Event(), threading.Event()
    laps = 0

    def work() -> None:
        begun.set()
        assert tokenizer.decode(tokenizer.encode(text)) == text
        ended.set()

    assert tokenizer.encode(text) == tokenizer._inner.encode(text).ids
    text *= 100
    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    while not ended.is_set() and laps < 5:
        time.sleep(0.001)
        laps += 1
    thread.join()
    assert laps >= 5


def test_special_tokens_are_added_on_request(tmp_path: Path) -> None:
    """Catches a chat prompt that begins twice, or a completion that never begins."""
    save_byte_level(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "B", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"B": {"id": "B", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    state["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = Tokenizer(tmp_path)
    plain = tokenizer.encode(TEXT[0], add_special_tokens=False)
    assert len(plain) > 3
    assert tokenizer.encode(TEXT[0]) == [0, *plain]
    assert tokenizer.apply_chat_template(MESSAGES)[0] != 0


def test_chat_template_is_rendered_and_its_marks_are_tokens(tokenizer: Tokenizer) -> None:
    """Catches marks that are spelled out in letters, or a missing turn of the assistant."""
    token_ids = tokenizer.apply_chat_template(MESSAGES, chat_template_kwargs={"enable_thinking": 1})
    text = "<|im_start|>user\nStop here<|im_end|>\n<|im_start|>assistant\n<think>"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    assert token_ids[0] == 1
    open_ended = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)
    assert tokenizer.decode(open_ended).endswith("Stop here\n")


def test_tools_and_tool_calls_reach_the_template(tokenizer: Tokenizer) -> None:
    """Catches arguments that the template sees as a string."""
    call = {"function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    asked: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [*MESSAGES, asked]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    text = tokenizer.decode(tokenizer.apply_chat_template(messages, tools=tools))
    assert "[weather: Bonn]" in text
    assert "1 tools" in text


def test_the_last_message_can_be_continued(tokenizer: Tokenizer) -> None:
    """Catches a prefilled answer that is closed before the model can go on."""
    messages = [*MESSAGES, {"role": "assistant", "content": "The lazy"}]
    token_ids = tokenizer.apply_chat_template(
        messages, chat_template_kwargs={"continue_final_message": True}
    )
    assert tokenizer.decode(token_ids, skip_special_tokens=False).endswith("assistant\nThe lazy")


@pytest.mark.parametrize(
    ("messages", "arguments", "says", "param"),
    [
        ([], {}, "at least one", "messages"),
        ([*MESSAGES, {"role": "system", "content": ""}], {}, "must come first", "messages"),
        (MESSAGES, {"chat_template": "{{ 1 }}"}, "chat_template", "chat_template_kwargs"),
        (MESSAGES, {"tokenize": True}, "tokenize", "chat_template_kwargs"),
        ([{"role": "user", "content": "\ud800"}], {}, "surrogate", None),
    ],
)
def test_invalid_chats_are_invalid_requests(
    tokenizer: Tokenizer, messages: Any, arguments: dict[str, Any], says: str, param: str | None
) -> None:
    """Catches a 500 for a client error, and a request that replaces the chat template."""
    with pytest.raises(InvalidRequest, match=says) as refusal:
        tokenizer.apply_chat_template(messages, chat_template_kwargs=arguments)
    assert refusal.value.param == param


def test_a_model_without_a_chat_template_refuses_messages(tmp_path: Path) -> None:
    """Catches a made-up default template."""
    tokenizer = Tokenizer(save_byte_level(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, fallback: Tokenizer) -> None:
    """Catches logprobs whose bytes are not the answer's."""
    text = "Grüße, <tool call> 🙂"
    token_ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == text
    assert [tokenizer.token_to_str(i) for i in tokenizer.encode(" fox")] == [" fox"]
    assert tokenizer.token_bytes(10_000) == b""
    token_ids = fallback.encode("the fox 🙂")
    assert b"".join(map(fallback.token_bytes, token_ids)).decode() == " the fox 🙂"
    assert tokenizer.is_byte_level
    assert not fallback.is_byte_level


def test_vocab_size_counts_added_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Catches valid ids that are refused as outside the vocabulary."""
    assert tokenizer.vocab_size == len(AutoTokenizer.from_pretrained(folder))


def test_threads_can_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    """Catches a setting that is changed while another thread encodes."""
    texts = [text * size for text in TEXT for size in range(1, 12)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected
        decoded = list(pool.map(tokenizer.decode, expected))
    assert decoded == texts


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    """Catches a call to the hub, or an error that does not say what to do."""
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        Tokenizer(tmp_path / name)


def test_importing_it_does_not_import_transformers() -> None:
    """Catches a command line that needs seconds to print its help."""
    code = "import sys, loramux.engine.outputs; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_info_names_the_special_tokens_and_the_template(tmp_path: Path) -> None:
    info = Tokenizer(save_byte_level(tmp_path)).tokenizer_info()
    assert info["eos_token"] is not None and "im_start" in info["chat_template"]
