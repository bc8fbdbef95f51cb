"""The models and the state of the server: /v1/models, /health and /ready."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from onward.serving.errors import error_body
from onward.serving.models import Served
from onward.serving.service import service_of

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models")
async def models(http: Request) -> dict[str, Any]:
    """Return as JSON the list of the models that the server offers, base models and LoRA adapters."""
    service = service_of(http)
    service.check_ready()
    return {"object": "list", "data": [record(one) for one in service.served.values()]}


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> dict[str, Any]:
    """Return as JSON the record of one model. Raises an ApiError for an unknown name."""
    return record(service_of(http).model(name))


def record(served: Served) -> dict[str, Any]:
    """A model in the format of OpenAI's API."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "onward",
        "root": served.root,
        "parent": served.base or None,
        "max_model_len": served.engine.length,
    }


@router.get("/health", tags=["server"])
@router.get("/v1/health", tags=["server"], include_in_schema=False)
async def health(http: Request) -> JSONResponse:
    """Return status 200 while the engines' thread is alive, even if models are being loaded or the server is shutting
    down; 503 if the server must be restarted."""
    service = service_of(http)
    if service.worker.is_alive():
        return JSONResponse({"status": "ok" if service.state == "ready" else service.state})
    return JSONResponse(error_body("the thread of the engines has ended: start the server again", 503), 503)


@router.get("/ready", tags=["server"])
async def ready(http: Request) -> JSONResponse:
    """Return status 200 if the server answers requests; 503 while it loads its models, and while it is about to end."""
    state = service_of(http).state
    if state == "ready":
        return JSONResponse({"status": "ok"})
    return JSONResponse(error_body(f"the server is {state}", 503, code=state), 503, headers={"Retry-After": "5"})
