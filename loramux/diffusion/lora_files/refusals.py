"""Stable codes of refusals that only adapters of image models have."""

from __future__ import annotations

from enum import StrEnum


class ImageRefusal(StrEnum):
    OTHER_FAMILY = "other_family"
    UNSERVED_METHOD = "unserved_method"
    AMBIGUOUS_NAME = "ambiguous_name"
    AMBIGUOUS_FILE = "ambiguous_file"
    CONFLICTING_ALPHA = "conflicting_alpha"
