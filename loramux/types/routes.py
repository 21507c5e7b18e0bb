"""The routes of a server and the scopes that each needs: one table for servers and routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from loramux.types.access import ALL_SCOPES, KeyScope
from loramux.types.modality import Modality


@dataclass(frozen=True, slots=True)
class Access:
    """What a route needs of its caller."""

    scopes: frozenset[KeyScope]
    """One of these; empty: the route is open to requests without a key."""
    is_for_operators: bool = False
    """The route changes what all tenants share, or shows it: not for keys of one tenant."""
    modality: Modality | None = None
    """The model that the route needs; None: it answers for every model."""


OPEN = Access(frozenset())
ANY = Access(ALL_SCOPES)
INFER = Access(frozenset({KeyScope.INFER}))
PUSH = Access(frozenset({KeyScope.PUSH, KeyScope.ADMIN}))
ADMIN = Access(frozenset({KeyScope.ADMIN}))
METRICS = Access(frozenset({KeyScope.METRICS, KeyScope.ADMIN}))
RECEIPTS = Access(frozenset({KeyScope.RECEIPTS, KeyScope.ADMIN}))
OPERATOR = Access(frozenset({KeyScope.ADMIN}), is_for_operators=True)
ENGINE = Access(frozenset({KeyScope.METRICS, KeyScope.ADMIN}), is_for_operators=True)

_SHARED: Mapping[str, Access] = {
    # Documentation of the API
    "GET /docs": OPEN,
    "GET /openapi.json": OPEN,
    "GET /redoc": OPEN,
    # Status
    "GET /": OPEN,
    "GET /health": OPEN,
    "HEAD /health": OPEN,
    "POST /health": OPEN,
    "GET /ping": OPEN,
    "HEAD /ping": OPEN,
    "POST /ping": OPEN,
    "GET /live": OPEN,
    "HEAD /live": OPEN,
    "GET /version": OPEN,
    "GET /metrics": METRICS,
    "GET /v1/stats": ENGINE,
    "GET /v1/residency": ENGINE,
    "GET /v1/live": ENGINE,
    "GET /v1/caller": ANY,
    # The web page, whose files have no data
    "GET /ui": OPEN,
    "GET /ui/{path:path}": OPEN,
    # Models
    "GET /v1/models": ANY,
    "GET /v1/models/{model_id:path}": ANY,
    # Adapters and receipts
    "GET /v1/adapters": ANY,
    "GET /v1/adapters/{name:path}": ANY,
    "GET /v1/doctor/{name:path}": OPERATOR,
    "POST /v1/adapters": PUSH,
    "DELETE /v1/adapters/{name:path}": PUSH,
    "POST /v1/adapters/{name:path}/promote": PUSH,
    "POST /v1/adapters/{name:path}/rollback": PUSH,
    "POST /v1/adapters/{name:path}/split": PUSH,
    "POST /v1/adapters/{name:path}/pin": ADMIN,
    "DELETE /v1/adapters/{name:path}/pin": ADMIN,
    "POST /v1/adapters/{name:path}/warm": PUSH,
    "POST /v1/adapters/{name:path}:push": OPERATOR,
    "GET /v1/adapters/{name:path}/version": ANY,
    "POST /v1/load_lora_adapter": OPERATOR,
    "POST /v1/unload_lora_adapter": OPERATOR,
    "DELETE /v1/unload_lora_adapter": OPERATOR,
    "GET /v1/receipts": RECEIPTS,
    "GET /v1/receipts/key": ANY,
    "GET /v1/usage": METRICS,
    "GET /v1/audit": OPERATOR,
    "GET /v1/keys": ADMIN,
    "POST /v1/keys": ADMIN,
    "DELETE /v1/keys/{key_id}": ADMIN,
    "POST /v1/keys/{key_id}/rotate": ADMIN,
    "GET /v1/receipts/{receipt_id}": RECEIPTS,
}
_TEXT: Mapping[str, Access] = {
    "POST /v1/chat/completions": INFER,
    "POST /v1/completions": INFER,
    "POST /v1/fim/completions": INFER,
    "POST /v1/embeddings": INFER,
    "POST /pooling": INFER,
    "POST /score": INFER,
    "POST /v1/score": INFER,
    "POST /rerank": INFER,
    "POST /v1/rerank": INFER,
    "POST /v2/rerank": INFER,
    "POST /classify": INFER,
    "POST /v1/run": INFER,
    "POST /tokenize": INFER,
    "POST /detokenize": INFER,
    "GET /tokenizer_info": INFER,
    "POST /v1/adapters/plan": ENGINE,
    # Other servers' APIs
    "POST /v1/messages": INFER,
    "POST /v1/messages/count_tokens": INFER,
    "POST /v1/responses": INFER,
    "POST /": INFER,
    "POST /generate": INFER,
    "POST /generate_stream": INFER,
    "POST /embed": INFER,
    "GET /info": ANY,
    "GET /startup": INFER,
    "GET /get_model_info": ANY,
    "GET /model_info": ANY,
    "GET /health_generate": INFER,
    "GET /flush_cache": ADMIN,
    "POST /flush_cache": ADMIN,
    "POST /reset_prefix_cache": ADMIN,
    "GET /get_server_info": ENGINE,
    "GET /server_info": ENGINE,
    "GET /load": ENGINE,
    "POST /load_lora_adapter": OPERATOR,
    "POST /unload_lora_adapter": OPERATOR,
    "POST /invocations": INFER,
    "POST /adapters": OPERATOR,
    "DELETE /adapters/{name:path}": OPERATOR,
    "POST /completion": INFER,
    "POST /completions": INFER,
    "POST /infill": INFER,
    "POST /chat/completions": INFER,
    "GET /models": ANY,
    "GET /lora-adapters": ANY,
    "POST /lora-adapters": OPERATOR,
    "GET /props": ANY,
    "GET /v1/health": OPEN,
    "POST /api/chat": INFER,
    "POST /api/generate": INFER,
    "POST /api/embed": INFER,
    "POST /api/embeddings": INFER,
    "GET /api/tags": ANY,
    "GET /api/ps": ANY,
    "POST /api/show": ANY,
    "GET /api/version": OPEN,
}
_IMAGES: Mapping[str, Access] = {
    "POST /v1/images/generations": INFER,
    "POST /v1/images/edits": INFER,
    # A1111's
    "POST /sdapi/v1/txt2img": INFER,
    "POST /sdapi/v1/img2img": INFER,
    "GET /sdapi/v1/progress": INFER,
    "GET /sdapi/v1/loras": ANY,
    "GET /sdapi/v1/sd-models": ANY,
    "GET /sdapi/v1/samplers": ANY,
    "GET /sdapi/v1/schedulers": ANY,
    "GET /sdapi/v1/options": ANY,
    "POST /sdapi/v1/options": ANY,
    # sheaf's; these match every name, and stand last
    "GET /{name}/health": OPEN,
    "GET /{name}/ready": OPEN,
    "POST /{name}/predict": INFER,
    "POST /{name}/stream": INFER,
}
ROUTE_ACCESS: Mapping[str, Access] = {
    **_SHARED,
    **{route: replace(access, modality="text") for route, access in _TEXT.items()},
    **{route: replace(access, modality="image") for route, access in _IMAGES.items()},
}
"""By method and path. GET includes HEAD."""

UNSAFE_GETS = ("/flush_cache", "/health_generate")
"""Ends of paths that change or cost something, although GET."""
