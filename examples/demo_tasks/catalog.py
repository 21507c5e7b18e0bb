"""Catalog of the four demo adapters."""

from __future__ import annotations

from demo_tasks.json_answers import json_task
from demo_tasks.pirate import pirate_task
from demo_tasks.sentiment import sentiment_task
from demo_tasks.shout import shout_task
from demo_tasks.task import Task


def demo_tasks() -> dict[str, Task]:
    tasks = (json_task(), shout_task(), pirate_task(), sentiment_task())
    return {task.name: task for task in tasks}
