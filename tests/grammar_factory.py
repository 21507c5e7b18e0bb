"""Random schemas that can be enforced in full, and other grammars."""

from __future__ import annotations

import random
from typing import Any

KINDS = ("string", "integer", "number", "boolean", "null", "enum", "array", "object")


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = draw.choice(KINDS if depth < 2 else KINDS[:6])
    match kind:
        case "string":
            options: list[dict[str, Any]] = [
                {"maxLength": draw.randint(1, 6)},
                {"pattern": "^[a-f]{2,5}$"},
                {"format": draw.choice(["date", "uuid", "ipv4"])},
            ]
            return {"type": "string", **draw.choice(options)}
        case "integer":
            low = draw.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 400)}
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": draw.randint(1, 9)}
        case "enum":
            return {"enum": draw.sample(["a", 'b"c', 5, None, True, {"x": 1}], 3)}
        case "array":
            least = draw.randint(0, 2)
            items = random_schema(draw, depth + 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
        case "object":
            names = draw.sample(["name", "é", "a b", "n", "deep"], draw.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(draw, depth + 1) for name in names},
                "required": names[: draw.randint(0, len(names))],
                "additionalProperties": False,
            }
    return {"type": kind}
