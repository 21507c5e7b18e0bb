"""python verify_receipt.py KEY.pub REPLY.json: checks the receipt of a reply and its tokens.

Needs `pip install cryptography` only. Ask for the reply with "return_token_ids": true.
"""

import base64
import hashlib
import json
import struct
import sys
from decimal import Decimal
from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_pem_public_key


def canonical(value):
    if isinstance(value, dict):
        pairs = (f"{canonical(name)}:{canonical(value[name])}" for name in sorted(value))
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, float):
        text = f"{Decimal(repr(value or 0.0)):f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return json.dumps(value, ensure_ascii=False)


def digest(ids):
    return "sha256:" + hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


key = load_pem_public_key(Path(sys.argv[1]).read_bytes())
reply = json.loads(Path(sys.argv[2]).read_text("utf-8"))
receipt = dict(reply["serving"])
key.verify(base64.b64decode(receipt.pop("signature")), canonical(receipt).encode())
prompt = reply.get("prompt_token_ids") or reply["choices"][0]["prompt_token_ids"]
shown = [prompt, *(choice["token_ids"] for choice in reply["choices"])]
is_signed = [*map(digest, shown)] == receipt["prompt_digests"] + receipt["answer_digests"]
sys.exit(None if is_signed else "The receipt signs other tokens.")
