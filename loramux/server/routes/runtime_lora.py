"""vLLM's routes that load and unload adapters at run time, with vLLM's exact responses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import PlainTextResponse, Response

from loramux.adapters.identity import CID_PREFIX
from loramux.adapters.images.files import is_image_adapter
from loramux.base.threads import FOLDER_READS
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    DoesNotFit,
    EngineBusy,
    InvalidRequest,
    RequestTimeout,
    SourceNotFound,
)
from loramux.http_server.error_body import ErrorInfo
from loramux.registry.audit import Action, Event
from loramux.server.auth.audit import audited
from loramux.server.context import HostContext
from loramux.server.errors import NotJson
from loramux.server.http.body import json_response, read_body
from loramux.server.http.call import Call
from loramux.server.http.routes import Route, Routes
from loramux.server.live.in_use import forget_unloaded
from loramux.server.live.warming import warm_up
from loramux.server.naming.sources import check_size, local_folder
from loramux.sources.parse import is_remote
from loramux.sources.source_id import SourceKind
from loramux.types.adapter import AdapterCard
from loramux.types.hub_id import parse_hub_id

_log = logging.getLogger(__name__)
INVALID_INPUT = "InvalidUserInput"
MAX_NAME_CHARACTERS = 256
NOT_FOUND_CODES = ("config_missing", "file_missing")
# The refusal for which clients search for vLLM's phrase.
RANK_CODE, RANK_PHRASE = "rank_over_cap", "LoRA rank is greater than max_lora_rank"


class LoadRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadRequest(msgspec.Struct, kw_only=True):
    """The body of POST or DELETE /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


class VllmErrorBody(ErrorInfo, kw_only=True):
    """Repeats the error at the top level, where Kubernetes operators for vLLM look for it."""

    error: ErrorInfo


class VllmError(Exception):
    """An error with the response that vLLM gives."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.info = ErrorInfo(message=message, type=kind, param=param, code=status)

    def response(self) -> Response:
        return json_response(
            VllmErrorBody(**msgspec.structs.asdict(self.info), error=self.info),
            status=self.info.code,
        )


def runtime_lora_routes(context: HostContext) -> list[Route]:
    routes = Routes("vLLM")
    if not context.options.allow_runtime_lora_updating:
        return routes.found
    locks = context.name_locks

    @routes.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Call) -> Response:
        try:
            asked = await _read(context, request, LoadRequest)
            async with locks.held(asked.lora_name):
                await load_named(context, request, asked)
        except VllmError as error:
            return error.response()
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload_lora_adapter(request: Call) -> Response:
        try:
            asked = await _read(context, request, UnloadRequest)
            async with locks.held(asked.lora_name):
                await unload_named(context, request, asked.lora_name)
        except VllmError as error:
            return error.response()
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    routes.add("/v1/unload_lora_adapter", unload_lora_adapter, "POST", "DELETE")
    return routes.found


async def load_named(context: HostContext, http: Call, asked: LoadRequest) -> None:
    """Load an adapter under its name; raise VllmError."""
    details = {"source": asked.lora_path}
    event = Event(Action.LOAD, context.tenant_of(http.caller), asked.lora_name, details)
    async with audited(context.database, http, event):
        event.details["cid"] = await _load(context, asked)


async def _load(context: HostContext, asked: LoadRequest) -> str:
    """Return the CID of the loaded adapter."""
    name = asked.lora_name
    if not name or not asked.lora_path:
        raise _invalid("Both 'lora_name' and 'lora_path' must be provided.")
    if asked.is_3d_lora_weight:
        raise _invalid("is_3d_lora_weight is not supported by this server: leave it out.")
    await check_name(context, name)
    given = context.host_with(name).names.find(name)
    if given is not None and given.state != "failed" and not asked.load_inplace:
        raise _invalid(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter "
            "in place, set 'load_inplace' to True."
        )
    try:
        source = await _source(context, asked.lora_path)
        folder = await _folder(context, source)
        is_real = bool(context.options.allowed_roots) and not is_remote(source)
        card = await load_folder(context, name, folder, is_real=is_real)
    except (AdapterNotFound, SourceNotFound) as error:
        raise _not_found(name) from error
    except AdapterRefused as error:
        raise _refused(asked, error) from error
    return card.cid


async def load_folder(
    context: HostContext, name: str, folder: str, *, is_real: bool
) -> AdapterCard:
    """Give a checked name to the adapter of a folder, once its weights have been read.

    Raises AdapterRefused, and VllmError where another model has the name.
    """
    holder = context.host_with(name)
    host = await _host_for(context, folder)
    if holder.names.find(name) is not None and host is not holder:
        raise _invalid(f"The name '{name}' is given to an adapter of another model.")
    host.require_ready()
    return await host.names.load(
        name, folder, is_real=is_real, check=lambda card: _read_weights(host, card.cid)
    )


async def check_name(context: HostContext, name: str) -> None:
    """Raise VllmError for a name that no loaded adapter may have."""
    is_plain = name.isprintable() and name == name.strip() and not {",", "@"} & {*name}
    if len(name) > MAX_NAME_CHARACTERS or not is_plain:
        raise _invalid(
            f"The name {name[:50]!r} is no adapter name here: use at most {MAX_NAME_CHARACTERS} "
            "printable characters without a comma, without a space at an end, and without @, which "
            "names a version."
        )
    if await _is_in_registry(context, name):
        raise _invalid(f"The registry has an adapter '{name}'. Choose another name.")
    bases = [base for host in context.hosts for base in host.base_names]
    if name in bases or name.startswith(CID_PREFIX):
        raise _invalid(
            f"The name '{name}' is the base model's or a content id. Choose another one."
        )


async def _host_for(context: HostContext, place: str) -> HostContext:
    """Return the context of the model that the files are for, on a server with two models."""
    if not context.others:
        return context
    is_image = await FOLDER_READS.run(is_image_adapter, Path(place))
    return context.host_of("image" if is_image else "text")


async def _is_in_registry(context: HostContext, name: str) -> bool:
    """Whether requests mean an adapter of the registry by the name, which it would take over."""
    if context.registry is None:
        return False
    try:
        await context.registry.resolve(name)
    except (AdapterNotFound, InvalidRequest):
        return False
    return True


async def _read_weights(context: HostContext, cid: str) -> None:
    """Load the adapter, so that the caller may overwrite its files once the call has returned."""
    try:
        await warm_up(context, ((cid, 1.0),))
    except (DoesNotFit, EngineBusy, RequestTimeout) as error:
        _log.warning("%s is registered, but its weights are not loaded yet: %s", cid, error)


async def _source(context: HostContext, path: str) -> str:
    """Return `hf:owner/name` for a repository of the hub that vLLM's clients name as owner/name.

    A folder of that name goes first.
    """
    may_be_hub = context.sources is not None and parse_hub_id(path) is not None
    if not may_be_hub or SourceKind.HUB not in context.options.sources.enabled:
        return path
    is_here = await FOLDER_READS.run(_is_folder, path, context.options.allowed_roots)
    return path if is_here or is_remote(path) else f"hf:{path}"


def _is_folder(path: str, roots: Sequence[str]) -> bool:
    return any((Path(root) / path).is_dir() for root in roots or ("",))


async def _folder(context: HostContext, path: str) -> str:
    """Return the folder to load; without --allowed-roots any path is accepted, as in vLLM."""
    if is_remote(path) and context.sources is not None:
        return await context.sources.folder(path)
    options = context.options
    if options.allowed_roots:
        path = str(await FOLDER_READS.run(local_folder, path, options.allowed_roots))
    await FOLDER_READS.run(check_size, Path(path), options.sources.limits.max_file_bytes)
    return path


async def unload_named(context: HostContext, http: Call, name: str) -> None:
    """Unloads the adapter of a name; raises VllmError."""
    event = Event(Action.UNLOAD, context.tenant_of(http.caller), name)
    async with audited(context.database, http, event):
        await _unload(context, name)


async def _unload(context: HostContext, name: str) -> None:
    if not name:
        raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
    names = context.host_with(name).names
    if names.find(name) is None:
        raise VllmError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
    await names.unload(name)
    forget_unloaded(context)


def _invalid(message: str) -> VllmError:
    return VllmError(400, INVALID_INPUT, message)


def _not_found(name: str) -> VllmError:
    # vLLM masks the path too, which may disclose details of the machine.
    message = f"Loading lora {name} failed: No adapter found for <path>"
    return VllmError(404, "NotFoundError", message)


def _refused(asked: LoadRequest, error: AdapterRefused) -> VllmError:
    if error.code in NOT_FOUND_CODES:
        return _not_found(asked.lora_name)
    message = str(error).replace(asked.lora_path, "<path>")
    if error.code == RANK_CODE:
        message = f"{RANK_PHRASE}: {message}"
    # vLLM says 500, which monitors take for a fault of the server.
    return VllmError(400, "BadRequestError", message)


async def _read(context: HostContext, request: Call, kind: type[Any]) -> Any:
    """Decode the body; raise all field errors at once, in the format of vLLM's validation."""
    try:
        body = await read_body(request, context.options.max_body_bytes)
    except NotJson as error:
        raise _bad_request({"body": str(error)}) from error
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_request({"body": f"JSON decode error: {error}"}) from error
    errors = dict(
        filter(None, (_field_error(fields, field) for field in msgspec.structs.fields(kind)))
    )
    if errors:
        raise _bad_request(errors)
    return msgspec.convert(fields, kind)


def _field_error(
    fields: dict[str, Any], field: msgspec.structs.FieldInfo
) -> tuple[str, str] | None:
    path = f"body.{field.name}"
    if field.name not in fields:
        return (path, "Field required") if field.required else None
    try:
        msgspec.convert(fields[field.name], field.type)
    except msgspec.ValidationError as error:
        return path, str(error)
    return None


def _bad_request(errors: dict[str, str]) -> VllmError:
    count = "1 validation error" if len(errors) == 1 else f"{len(errors)} validation errors"
    details = "; ".join(f"{path}: {problem}" for path, problem in errors.items())
    return VllmError(400, "Bad Request", f"{count}: {details}", next(iter(errors)))
