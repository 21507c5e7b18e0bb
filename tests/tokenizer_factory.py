"""Small tokenizers of the two kinds that decoders use, saved in the folder of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. Stop here, or go on?",
    "Grüße aus Köln, naïve café, 你好世界 and 🙂🙃👩‍👩‍👧 too.",
    "def add(a, b):\n    return a + b\n",
]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('The system message must come first.') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "[{{ call.function.name }}: {{ call.function.arguments.city }}]{% endfor %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined %}<think>{% endif %}"
)


def save_byte_level(folder: Path, **config: Any) -> Path:
    """As of GPT-2, Llama 3 or Qwen; with an added token outside the byte alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens(
        [AddedToken("<tool call>", special=False), AddedToken("né", special=False)]
    )
    return _save(tokenizer, folder, config)


def save_byte_fallback(folder: Path, **config: Any) -> Path:
    """As of Llama 2 or Mistral: words begin with a mark, unknown characters are single bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    trainer.initial_alphabet = ["▁"]
    tokenizer.train_from_iterator([TEXT[0], TEXT[2]] * 3, trainer)
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for token in byte_tokens:
        vocabulary[token] = len(vocabulary)
    return _save(Tokenizer.from_str(json.dumps(state)), folder, {"eos_token": "</s>", **config})


def _save(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        **config,
    }
    kept = {key: value for key, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    return folder
