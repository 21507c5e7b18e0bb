from __future__ import annotations

from loramux.errors import AdapterRefused, InvalidRequest, LoramuxError


def test_refusal_shows_reason_and_fix_and_keeps_them_apart_for_programs() -> None:
    error = AdapterRefused("wrong_shape", "q_proj is 8x4, not 8x16.", fix="Use the right base.")
    assert str(error) == "q_proj is 8x4, not 8x16. Use the right base."
    assert (error.code, error.reason, error.fix) == (
        "wrong_shape",
        "q_proj is 8x4, not 8x16.",
        "Use the right base.",
    )


def test_refusal_without_a_fix_has_no_trailing_space() -> None:
    assert str(AdapterRefused("zero_effect", "Nothing changes.")) == "Nothing changes."


def test_one_except_clause_catches_all_and_the_parameter_survives() -> None:
    error: LoramuxError = InvalidRequest("n must be 1 or more.", param="n")
    assert isinstance(error, InvalidRequest)
    assert error.param == "n"
