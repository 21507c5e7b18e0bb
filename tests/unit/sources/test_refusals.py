from __future__ import annotations

from loramux.sources.refusals import archive_refused, bad_form, pickle_refused, too_large


def test_every_refusal_says_what_why_and_the_fix() -> None:
    errors = [
        bad_form("It is odd.", fix="Write it well."),
        pickle_refused("x.bin"),
        archive_refused("x.zip"),
        too_large("x", 2, 1),
    ]
    assert [error.code for error in errors] == ["bad_form", "pickle", "archive", "too_large"]
    assert all(error.reason and error.fix and error.fix in str(error) for error in errors)
