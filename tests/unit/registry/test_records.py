from __future__ import annotations

import dataclasses

import pytest

from loramux.registry.records import AliasAction, Resolved, Target


def test_a_resolved_reference_is_immutable() -> None:
    resolved = Resolved(cid="cidv1:sha256:00")
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.cid = "cidv1:sha256:11"  # type: ignore[misc]


def test_a_cid_has_no_name() -> None:
    resolved = Resolved(cid="cidv1:sha256:00")
    assert (resolved.tenant, resolved.name, resolved.version, resolved.alias) == (None,) * 4


def test_a_target_alone_takes_all_requests_and_actions_are_stored_as_words() -> None:
    assert Target("1.0.0").weight == 1
    assert [str(action) for action in AliasAction] == ["promote", "split", "rollback", "remove"]
