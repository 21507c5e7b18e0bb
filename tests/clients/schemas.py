"""Types of answers that the clients ask for; any value that follows them is short."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")

    country: Literal["Italy", "France"]
    is_capital: bool


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Paris"]
    days: Literal[1, 2, 3]


WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Paris"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": WEATHER_SCHEMA,
        "strict": True,
    },
}
FORCED_WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
