"""What SGLang's clients, and balancers and trainers of vLLM, ask about the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from loramux import __version__
from loramux.server.context import Context
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.routes import Handler


def info_handlers(context: Context) -> Mapping[str, Handler]:
    """Return the handlers of GET routes by path."""

    async def model_info(request: Call) -> Response:
        context.require_known()
        return json_response(_model_info(context, request))

    async def server_info(request: Call) -> Response:
        context.require_known()
        return json_response(_server_info(context, request))

    async def load_of(request: Call) -> Response:
        """Return the number of open requests, by which vLLM's balancers choose a server."""
        stats = context.backend.stats
        return json_response({"server_load": stats.num_running + stats.num_waiting})

    return {
        "/get_model_info": model_info,
        "/model_info": model_info,
        "/get_server_info": server_info,
        "/server_info": server_info,
        "/load": load_of,
    }


def _model_info(context: Context, request: Call) -> dict[str, Any]:
    card = context.backend.card
    return {
        "model_path": shown_path(context, request, card.path),
        "served_model_name": context.base_names[0],
        "tokenizer_path": shown_path(context, request, card.tokenizer_folder or card.path),
        "is_generation": card.pooling.generates,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": None,
        "architectures": [card.shapes.architecture] if card.shapes else None,
    }


def shown_path(context: Context, request: Call, path: str) -> str:
    """Return a path of this machine, for a tenant's key the name of the base in its place."""
    is_confined = context.view_of(request.caller).is_confined
    return context.base_names[0] if is_confined else path


def _server_info(context: Context, request: Call) -> dict[str, Any]:
    card, stats = context.backend.card, context.backend.stats
    return {
        **_model_info(context, request),
        "version": __version__,
        "context_length": card.max_model_len,
        "dtype": card.dtype,
        "device": card.device,
        "enable_lora": True,
        "max_running_requests": card.max_sequences,
        "max_total_num_tokens": card.num_pages * card.block_tokens,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
    }
