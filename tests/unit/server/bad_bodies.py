"""Bodies that must be refused: (what is wrong, bytes, status, the field that the answer names)."""

from __future__ import annotations

import json
from typing import Any

MESSAGES = [{"role": "user", "content": "hi"}]
DEEP = 50_000


def chat_with(**fields: Any) -> bytes:
    return json.dumps({"messages": MESSAGES} | fields).encode()


def complete_with(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hi"} | fields).encode()


def message(**fields: Any) -> bytes:
    return chat_with(messages=[{"role": "user", "content": "hi"} | fields])


def refused(param: str, *values: Any) -> list[tuple[str, bytes, int, str | None]]:
    return [(f"{param} {str(v)[:30]}", complete_with(**{param: v}), 400, param) for v in values]


def refused_in_chat(param: str, *values: Any) -> list[tuple[str, bytes, int, str | None]]:
    return [(f"{param} {str(v)[:30]}", chat_with(**{param: v}), 400, param) for v in values]


NOT_JSON: list[tuple[str, bytes, int, str | None]] = [
    ("empty", b"", 400, None),
    ("null", b"null", 400, None),
    ("array", b"[]", 400, None),
    ("number", b"1", 400, None),
    ("no JSON", b"prompt=hi", 400, None),
    ("cut", b'{"prompt": "hi', 400, None),
    ("two values", b'{"prompt": "hi"} {}', 400, None),
    ("byte order mark", b'\xef\xbb\xbf{"prompt": "hi"}', 400, None),
    ("bad UTF-8", b'{"prompt": "\xff\xfe"}', 400, None),
    ("half a surrogate pair", b'{"prompt": "\\ud800 x"}', 400, None),
    ("nested arrays", b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}", 400, "prompt"),
    ("nested unknown field", b'{"x": ' + b"[" * DEEP + b"]" * DEEP + b"}", 400, None),
    ("nested objects", b'{"x": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}", 400, None),
    ("NaN", b'{"prompt": "hi", "temperature": NaN}', 400, None),
    ("too large a number", b'{"prompt": "hi", "temperature": 1e999}', 400, "temperature"),
    ("endless digits", b'{"prompt": "hi", "n": ' + b"9" * 9999 + b"}", 400, "n"),
]

COMPLETIONS: list[tuple[str, bytes, int, str | None]] = [
    ("no prompt", b"{}", 400, "prompt"),
    *refused("prompt", None, 1, {}, [], [1.5], ["a", 1], [[1], "a"], [[]], [True], [[["x"]]]),
    *refused("prompt", [-1], [256], [[1], [10**30]], "", "x" * 64, "x" * 100_000, [1] * 64),
    *refused("prompt", ["hi"] * 2000, "x" * 65 * 256, [[1]] * 1025),
    *refused("max_tokens", -1, "5", 1.5, True, 63, 10**30),
    *refused("max_completion_tokens", -1, 63, []),
    *refused("n", 0, -1, 129, "2", 10**30),
    *refused("temperature", -0.1, "hot", [], -1e300),
    *refused("top_p", 0, 1.01, -1, "x"),
    *refused("top_k", -2, 1.5, "x"),
    *refused("min_p", -0.1, 1.1),
    *refused("repetition_penalty", 0, -1, "x"),
    *refused("frequency_penalty", 2.1, -2.1, {}),
    *refused("presence_penalty", 2.1, -2.1),
    *refused("seed", "x", 1.5, 2**63, -(2**63) - 1),
    *refused("logit_bias", [], {"x": 1}, {"5": "a"}, {"5": 101}, {"256": 1}, {"-1": 1}),
    *refused("stop", 5, "", ["a", ""], [1], ["x"] * 65, "x" * 1025),
    *refused("stop_token_ids", 5, ["a"], [-1], [256], [10**30], [1] * 1025),
    *refused("allowed_token_ids", [1] * 257),
    *refused("bad_words", ["x" * 1024] * 17),
    *refused("user", "x" * 1025),
    *refused("logprobs", -1, 65, True, "x"),
    *refused("echo", 1, "yes"),
    *refused("ignore_eos", "yes"),
    *refused("stream", "yes", 1),
    *refused("stream_options", 5, {"include_usage": "x"}, {"include_usage": True}),
    *refused("user", 5),
    *refused("timeout", 0, -1, "5", True, 1e308 * -1),
    *refused("cache_salt", "", 5, ["x"], "x" * 1025),
    *refused("model", 5, ["x"], {}),
    *refused("adapters", "legal", [1], ["legal", "legal"], ["legal"] * 9),
    *refused("adapter_weights", [1.0], "x", [None]),
    *refused("suffix", "x"),
    *refused("best_of", 2, "x"),
    *refused("response_format", {"type": "xml"}, "text", []),
    *refused("lora_path", 5, ["legal", None], ["legal", "legal"]),
    *refused("adapter_id", "legal"),
    *refused("guided_json", {"not": {}}, "{", []),
    *refused("min_tokens", 17, -1),
    ("weights too many", complete_with(adapters=["legal"], adapter_weights=[1, 2]), 400,
     "adapter_weights"),
    ("weights for the base", complete_with(adapters=[], adapter_weights=[1]), 400,
     "adapter_weights"),
    ("too few weights", complete_with(adapters=["legal", "team/polite"], adapter_weights=[1]), 400,
     "adapter_weights"),
    ("the same adapter twice in a sum", complete_with(model="legal+0.5*legal"), 400, "model"),
    ("a sum of nine", complete_with(model="+".join(["legal"] * 9)), 400, "model"),
    ("weight too large in a sum", complete_with(model="legal+1e999*team/polite"), 400, "model"),
    ("unknown adapter in a sum", complete_with(model="legal+nope"), 404, "model"),
    ("base in a sum", complete_with(model="legal+tiny-base"), 404, "model"),
    ("no name in a sum", complete_with(model="legal+"), 404, "model"),
    ("weight behind the name", complete_with(model="legal*0.5"), 404, "model"),
    ("weight that is no number", complete_with(model="nan*legal"), 404, "model"),
    ("weight too large", complete_with(adapters=["legal"], adapter_weights=[1e9]), 400,
     "adapter_weights"),
    ("unknown model", complete_with(model="nope"), 404, "model"),
    ("long model", complete_with(model="x" * 100_000), 404, "model"),
    ("many biases", complete_with(logit_bias=dict.fromkeys(range(256), 1e9)), 400, "logit_bias"),
    ("unknown adapter", complete_with(adapters=["nope"]), 404, "adapters"),
    ("base as an adapter", complete_with(adapters=["tiny-base"]), 404, "adapters"),
]  # fmt: skip

CHAT: list[tuple[str, bytes, int, str | None]] = [
    ("no messages", b"{}", 400, "messages"),
    ("not JSON", b"hi", 400, None),
    ("bad UTF-8", b'{"messages": [{"role": "user", "content": "\xff"}]}', 400, None),
    ("nested part", b'{"messages": [{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}]}", 400, None),
    *refused_in_chat("messages", None, [], "hi", {}, [1], ["hi"], [{}], [{"role": 5}]),
    *refused_in_chat("messages", [{"role": "user"}], [{"role": "user", "content": 5}]),
    ("no role", chat_with(messages=[{"content": "hi"}]), 400, "messages"),
    ("part of no type", message(content=[5]), 400, "messages"),
    ("part without text", message(content=[{"type": "text"}]), 400, "messages"),
    ("image", message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), 400, "messages"),
    ("audio part", message(content=[{"type": "input_audio", "text": "x"}]), 400, "messages"),
    *((f"tool calls {c}", message(tool_calls=c), 400, "messages") for c in (5, True, "x", {})),
    ("long role", message(role="x" * 257), 400, "messages"),
    ("many messages", chat_with(messages=MESSAGES * 4097), 400, "messages"),
    ("long name", message(name="x" * 100_000), 400, "messages"),
    ("long call", message(x=["y" * 100_000]), 400, "messages"),
    *refused_in_chat("chat_template_kwargs", {"x": ["y" * 100_000]}, {"x" * 100_000: 1}),
    ("too long", message(content="x" * 60), 400, "messages"),
    ("far too long", message(content="x" * 100_000), 400, "messages"),
    *refused_in_chat("max_completion_tokens", -1, 60, "x"),
    *refused_in_chat("timeout", 0, "5"),
    *refused_in_chat("cache_salt", ""),
    *refused_in_chat("top_logprobs", 5, -1, 65, "x"),
    *refused_in_chat("logprobs", 5, "x"),
    *refused_in_chat("tools", [{"type": "web_search"}], [{}], [5], {}, "f"),
    *refused_in_chat("tool_choice", "required", {"type": "function"}),
    *refused_in_chat("functions", [{}]),
    *refused_in_chat("response_format", {"type": "json_schema"}, "text", {"type": 5}),
    *refused_in_chat("audio", {}),
    *refused_in_chat("modalities", ["text", "audio"]),
    *refused_in_chat("chat_template", "{{ x }}"),
    *refused_in_chat("chat_template_kwargs", 5, [], {"tokenize": True}),
    *refused_in_chat("add_generation_prompt", "x"),
    ("both ends", chat_with(add_generation_prompt=True, continue_final_message=True), 400,
     "continue_final_message"),
    ("unknown model", chat_with(model="nope"), 404, "model"),
]  # fmt: skip
