"""Models and adapters that an administrator adds and removes while the server runs: /v1/load_lora_adapter and
/v1/unload_lora_adapter as in vLLM, /models/load and /models/unload as in llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field

from onward.base.errors import UserError
from onward.serving.errors import ApiError
from onward.serving.fields import Body, check_others
from onward.serving.guard import check_admin
from onward.serving.jobs import Job
from onward.serving.models import Served, add_adapter, check_adapter_of, drop_adapter, engines_of
from onward.serving.service import Service, service_of
from onward.serving.shapes import Filled
from onward.serving.weight_files import WeightFiles

T = TypeVar("T")
router = APIRouter(tags=["server"])


class AdapterToLoad(Body):
    """The body of a request of /v1/load_lora_adapter; `model` is the adapter's base, by default the first model."""

    lora_name: Filled = Field(description="Name under which requests choose the adapter.")
    lora_path: Filled = Field(description="Folder of the adapter, on the server's machine.")


class AdapterToUnload(Body):
    """The body of a request of /v1/unload_lora_adapter."""

    lora_name: Filled


class ModelName(Body):
    """The body of a request of /models/load (`model` is a folder, or a name on the hub) or /models/unload (a served
    name)."""


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: AdapterToLoad, http: Request) -> PlainTextResponse:
    """Add a LoRA adapter to a model under a name that requests can choose. Needs the key of an administrator."""
    service = administered(http, body)
    base = service.model(body.model)
    if base.base or base.adapter:
        raise ApiError(f"Cannot add an adapter to {base.name}, which is an adapter: name its base model", param="model")
    check_new(service, body.lora_name)
    await service.compute(check_adapter_of, base, Path(body.lora_path))  # reads all weights
    served = await service.in_engine(lambda: add_adapter(base, Path(body.lora_path), body.lora_name))
    service.served[served.name] = served
    return PlainTextResponse(f"Success: LoRA adapter '{served.name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: AdapterToUnload, http: Request) -> PlainTextResponse:
    """Remove a LoRA adapter; its running answers finish first. Needs the key of an administrator."""
    service = administered(http, body)
    served = named(service, body.lora_name, "lora_name")
    if not served.base:
        raise ApiError(
            f"Cannot remove {served.name} as an adapter, because it is a model: use /models/unload", param="lora_name"
        )
    del service.served[served.name]
    own = lambda job: job.engine is served.engine and any(one.adapter == served.adapter for one in job.answers)
    await finished(service, own)
    await service.in_engine(lambda: drop_adapter(served))
    return PlainTextResponse(f"Success: LoRA adapter '{served.name}' removed successfully.")


@router.post("/models/load")
async def load_model(body: ModelName, http: Request) -> dict[str, Any]:
    """Load an additional model to serve, with the options of the server. Needs the key of an
    administrator."""
    service = administered(http, body)
    if not body.model:
        raise ApiError("model is missing: name a folder, or a model on the hub", param="model")
    if service.load_more is None:
        raise ApiError("Cannot load models here, because this server's program does not support it", 400)
    load, name = service.load_more, body.model
    more = await asyncio.wrap_future(in_thread(lambda: load(name)))
    for one in more:
        check_new(service, one.name)

    def begin() -> None:
        service.worker.engines = [*service.worker.engines, *engines_of(more)]
        service.worker.files = WeightFiles()

    await service.in_engine(begin)
    service.served |= {one.name: one for one in more}
    service.worker.compile_when_idle()
    return {"success": True}


@router.post("/models/unload")
async def unload_model(body: ModelName, http: Request) -> dict[str, Any]:
    """Remove a model and its adapters; their running answers finish first. Needs the key of an administrator."""
    service = administered(http, body)
    served = named(service, body.model or "", "model")
    if served.base:
        raise ApiError(
            f"Cannot remove {served.name} as a model, because it is an adapter: use /v1/unload_lora_adapter",
            param="model",
        )
    engine = served.engine
    if len(engines_of([*service.served.values()])) == 1:
        raise ApiError("Cannot remove the only model: load another one first", param="model")
    service.served = {name: one for name, one in service.served.items() if one.engine is not engine}
    await finished(service, lambda job: job.engine is engine)

    def end() -> None:
        service.worker.engines = [one for one in service.worker.engines if one is not engine]

    await service.in_engine(end)
    return {"success": True}


def administered(http: Request, body: Body) -> Service:
    """The service of a request; raises an ApiError unless it has the key of an administrator."""
    check_admin(http.scope["key"])
    check_others(body)
    service = service_of(http)
    service.check_ready()
    return service


def named(service: Service, name: str, field: str) -> Served:
    if name not in service.served:
        raise ApiError(f"there is no model {name[:200]!r} here: choose {', '.join(service.served)}", 404, field)
    return service.served[name]


def check_new(service: Service, name: str) -> None:
    if name in service.served:
        raise UserError(f"Cannot add {name[:200]!r}, because this name is served already: remove it first")


async def finished(service: Service, uses: Callable[[Job], bool]) -> None:
    """Wait until no job uses the removed model or adapter."""
    while any(uses(job) for job in service.jobs):
        await asyncio.sleep(0.05)


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Call a function in a new thread that then ends, since OpenMP keeps threads for each thread that has computed."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
