"""Tokenizer files of adapters that no sane trainer writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

Edit = Callable[[Path], None]
"""Writes hostile files into the folder of an adapter, which has the tokenizer of the base."""


def template(text: str) -> Edit:
    return lambda folder: _write(folder / "chat_template.jinja", text)


def tokenizer(**parts: Any) -> Edit:
    """Replace parts of tokenizer.json."""

    def edit(folder: Path) -> None:
        path = folder / "tokenizer.json"
        _write(path, json.dumps({**json.loads(path.read_text()), **parts}))

    return edit


def settings(**fields: Any) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        _write(path, json.dumps({**json.loads(path.read_text()), **fields}))

    return edit


def add_tokens(tokens: list[str]) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "tokenizer.json"
        fields = json.loads(path.read_text())
        first = 1 + max(entry["id"] for entry in fields["added_tokens"])
        fields["added_tokens"] += [
            {
                "id": first + number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": False,
            }
            for number, token in enumerate(tokens)
        ]
        _write(path, json.dumps(fields))

    return edit


def vocabulary(size: int) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "tokenizer.json"
        fields = json.loads(path.read_text())
        known = fields["model"]["vocab"]
        known |= {f"bomb{number}": 1000 + number for number in range(size)}
        _write(path, json.dumps(fields))

    return edit


def raw(name: str, content: str) -> Edit:
    return lambda folder: _write(folder / name, content)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def growing(times: int) -> dict[str, Any]:
    """Each step makes sixteen of every character that the one before made."""
    steps = [
        {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 64} for _ in range(times)
    ]
    return {"type": "Sequence", "normalizers": steps}


def split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


HOSTILE: dict[str, Edit] = {
    "power": template("{{ 10**(10**8) }}"),
    "power of a variable": template("{% set n = 9 ** 9 ** 2 %}{{ (n ** n) | string | length }}"),
    "long text": template("{{ 'a'*10**10 }}"),
    "joined text": template(
        "{% set s = namespace(t='ab') %}{% for _ in range(60) %}"
        "{% set s.t = s.t ~ s.t %}{% endfor %}{{ s.t }}"
    ),
    "list": template("{{ ([0] * 10**9) | length }}"),
    "loops": template(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "recursion": template("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"),
    "nested": template("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}"),
    "many blocks": template("{% if a %}" * 20_000 + "{% endif %}" * 20_000),
    "format": template("{{ '%01000000000d' % 1 }}"),
    "center": template("{{ 'a'.center(10**10) }}"),
    "sort": template("{{ (range(99999) | list * 1000) | sort | length }}"),
    "lorem": template("{{ lipsum(n=10**9) }}"),
    "escape": template("{{ cycler.__init__.__globals__.os.system('kill 1') }}"),
    "huge template": template("a" * (2**18 + 1)),
    "replace": tokenizer(normalizer=growing(6)),
    "split": tokenizer(pre_tokenizer=split("(a|aa)+(a|aa)+(a|aa)+(a|aa)+$")),
    "backtracking": tokenizer(pre_tokenizer=split(r"((.*)*)*\1(x+x+)+y")),
    "bad pattern": tokenizer(pre_tokenizer=split("(?<=" + "(" * 5000)),
    "no model": tokenizer(model={"type": "BPE"}),
    "added tokens": add_tokens([f"<extra{number}>" for number in range(100_000)]),
    "long token": add_tokens(["x" * 100_000]),
    "vocabulary": vocabulary(50_000),
    "large file": vocabulary(400_000),
    "nested json": raw("tokenizer.json", "[" * 10**6),
    "list bomb": raw("tokenizer.json", "[" + "[]," * (10**6) + "[]]"),
    "many settings": settings(**{f"field{number}": {} for number in range(100_000)}),
    "special token": settings(eos_token="e" * 10**6),
    "ids": settings(added_tokens_decoder={"9" * 4000: {"content": "x"}}),
}
"""Files by what is hostile in them."""


def make_hostile(folder: Path, base: Path, edit: Edit) -> None:
    PreTrainedTokenizerFast.from_pretrained(base).save_pretrained(folder)
    edit(folder)
