"""Draws an image on a server."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

from loramux.cli.console import working
from loramux.cli.drawing import FORMATS, Asked, Drawn, split_weight
from loramux.errors import LoramuxError

OK = 200


def draw_there(asked: Asked, url: str, api_key: str | None, out: Path) -> Drawn:
    """Draws on a server, and writes the file that it answers with."""
    # Imported here: HTTP clients slow down `--help`.
    import httpx2

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    began = time.monotonic()
    try:
        with working("Drawing"):
            answer = httpx2.post(
                f"{url.rstrip('/')}/v1/images/generations",
                json=_body(asked, out),
                headers=headers,
                timeout=None,
            )
        found = answer.json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise LoramuxError(f"{url} does not answer as a server of images: {error}") from error
    if answer.status_code != OK:
        message = found.get("error", {}).get("message", "no reason is given")
        raise LoramuxError(f"The server refused the image ({answer.status_code}): {message}")
    out.write_bytes(base64.b64decode(found["data"][0]["b64_json"]))
    (image,) = found.get("serving", {}).get("images") or [{}]
    return Drawn(
        size=found["size"],
        seed=str(image.get("seed", "not told: the server gives no receipts")),
        digests=[(" ".join(asked.adapters or ()), image.get("pixel_digest", "–"))],
        seconds=f"{time.monotonic() - began:.1f}",
        warnings=found.get("warnings", ()),
    )


def _body(asked: Asked, out: Path) -> dict[str, Any]:
    given = {
        "prompt": asked.prompt,
        "output_format": FORMATS[out.suffix.lower()],
        "negative_prompt": asked.negative_prompt or None,
        "size": asked.size,
        "steps": asked.steps,
        "guidance_scale": asked.guidance_scale,
        "seed": asked.seed,
    }
    body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if asked.adapters:
        terms = [split_weight(text) for text in asked.adapters]
        body["adapters"] = [name for name, _ in terms]
        if any(weight is not None for _, weight in terms):
            body["adapter_weights"] = [1.0 if weight is None else weight for _, weight in terms]
    return body
