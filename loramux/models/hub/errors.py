"""Turns the errors of huggingface_hub into one sentence of reason and one of what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants, errors, get_token

from loramux.errors import LoramuxError, ModelNotFetched
from loramux.types.hub_id import HubId

SET_TOKEN = "set HF_TOKEN to a token that may read it, from {endpoint}/settings/tokens"


class HubUnreachable(ModelNotFetched):
    """The hub did not answer, or something else answered in its place; it may do so later."""


@contextmanager
def hub_errors(hub_id: HubId) -> Iterator[None]:
    """Raise errors of the hub's client as ModelNotFetched, without their URLs and tracebacks."""
    try:
        yield
    except LoramuxError:
        raise
    except (httpx2.HTTPError, OSError, RuntimeError) as error:
        raise explain(error, hub_id) from None


def explain(error: Exception, hub_id: HubId) -> ModelNotFetched:
    """Return the error that a user reads."""
    # The client wraps failures of a HEAD request once it has found nothing in its cache.
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return explain(error.__cause__, hub_id)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ModelNotFetched(f"{hub_id} cannot be fetched: HF_HUB_OFFLINE is set. Unset it.")
    if isinstance(error, errors.HfHubHTTPError):
        return explain_status(error, hub_id)
    if isinstance(error, httpx2.TimeoutException):
        return unreachable(hub_id, "did not answer in time")
    if isinstance(error, httpx2.HTTPError):
        return unreachable(hub_id, f"cannot be reached ({type(error).__name__}: {error})")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ModelNotFetched(
            f"The disk of {constants.HF_HUB_CACHE} is full. Free some space or set HF_HOME to a "
            f"folder on another disk; the download of {hub_id} resumes at the next start."
        )
    if isinstance(error, OSError) and error.errno is not None:
        return ModelNotFetched(
            f"{hub_id} cannot be stored in {constants.HF_HUB_CACHE}: {error.strerror}. Set HF_HOME "
            "to a folder that can be written."
        )
    if isinstance(error, RuntimeError):
        # Of hf_xet, which fetches the largest files.
        return unreachable(hub_id, f"failed ({error})")
    return not_a_hub(hub_id)


def explain_status(error: errors.HfHubHTTPError, hub_id: HubId) -> ModelNotFetched:
    status = error.response.status_code
    endpoint = constants.ENDPOINT
    set_token = SET_TOKEN.format(endpoint=endpoint)
    if isinstance(error, errors.GatedRepoError):
        had = "the token's account has no access to it" if get_token() else "no token is set"
        return ModelNotFetched(
            f"{hub_id} is gated, and {had} ({status}). Accept its terms at "
            f"{endpoint}/{hub_id.repository}, then {set_token}."
        )
    if isinstance(error, errors.DisabledRepoError):
        return ModelNotFetched(f"{hub_id} is disabled on the hub. Choose another repository.")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFetched(
            f"{hub_id.repository} has no revision {hub_id.revision!r}. Check the branch, tag or "
            f"commit after the @: {endpoint}/{hub_id.repository}/commits lists them."
        )
    if isinstance(error, errors.EntryNotFoundError):
        return ModelNotFetched(f"{hub_id}: a file is no longer in the repository. Start again.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFetched(
            f"There is no folder {hub_id.repository} here and no such repository on {endpoint}, or "
            f"it is private ({status}). Check owner and name; for a private one {set_token}."
        )
    if status == 401:
        return ModelNotFetched(
            f"{endpoint} refused the token (401): it is wrong or has expired. Unset HF_TOKEN and "
            f"run `hf auth logout` to go without one, or {set_token}."
        )
    if status == 403:
        return ModelNotFetched(f"The token may not read {hub_id} (403): {set_token}.")
    if status == 429 or status >= 500:
        return unreachable(hub_id, f"answered with status {status}")
    return ModelNotFetched(f"{endpoint} answered for {hub_id} with status {status}.")


def not_a_hub(hub_id: HubId) -> HubUnreachable:
    return HubUnreachable(
        f"{constants.ENDPOINT} answered for {hub_id} with something else than the hub does, such "
        "as the page of a proxy. Check HF_ENDPOINT and the proxy settings (HTTPS_PROXY)."
    )


def unreachable(hub_id: HubId, what: str) -> HubUnreachable:
    return HubUnreachable(
        f"{hub_id} cannot be fetched: {constants.ENDPOINT} {what}. Check the connection, "
        "HF_ENDPOINT and HTTPS_PROXY, and start again: a broken download resumes."
    )
