from __future__ import annotations

import base64
import copy
from dataclasses import asdict, dataclass

import pytest

from loramux.errors import InvalidRequest, SourceFailed, SourceRefused
from loramux.sources.config import Secret, scrub, scrub_error

VALUE = "hf_top/secret+key="


@dataclass(frozen=True)
class Holder:
    token: Secret


def test_a_secret_shows_in_no_text_of_it_or_of_what_holds_it() -> None:
    secret = Secret(VALUE)
    holder = Holder(secret)
    texts = [repr(secret), str(secret), f"{secret}", f"{secret!r:>40}", repr(holder)]
    texts += [repr(asdict(holder)), repr(copy.deepcopy(holder)), repr(vars(holder))]
    assert not any(VALUE in text for text in texts)
    assert secret.reveal() == VALUE


def test_secrets_compare_by_value() -> None:
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a")}) == 1


def test_an_empty_credential_is_a_mistake() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        Secret("")


@pytest.mark.parametrize(
    "written",
    [VALUE, "hf_top%2Fsecret%2Bkey%3D", base64.b64encode(VALUE.encode()).decode()],
    ids=["plain", "in a URL", "in a header"],
)
def test_scrub_finds_every_way_of_writing(written: str) -> None:
    assert scrub(f"GET /?key={written} failed", [Secret(VALUE)]) == "GET /?key=*** failed"


def test_scrub_takes_the_longer_of_two_secrets_first() -> None:
    assert scrub("abcdef", [Secret("abc"), Secret("abcdef")]) == "***"


def test_scrubbed_errors_keep_their_facts() -> None:
    failed = SourceFailed(f"bad {VALUE}", is_temporary=False)
    refused = SourceRefused("no_access", f"bad {VALUE}", fix=f"not {VALUE}")
    for error in (failed, refused):
        scrub_error(error, [Secret(VALUE)])
    assert (str(failed), failed.is_temporary) == ("bad ***", False)
    assert str(refused) == "bad *** not ***"
    assert (refused.reason, refused.fix) == ("bad ***", "not ***")
