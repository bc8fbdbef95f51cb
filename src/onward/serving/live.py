"""/api/engine: the current state of the engines, for the page's view of an engine."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from onward.generation.cache.blocks import BlockManager
from onward.generation.engine.engine import Engine
from onward.model.paged import NULL_BLOCK
from onward.serving.jobs import Job
from onward.serving.models import engines_of
from onward.serving.service import Service, service_of

router = APIRouter(prefix="/api", tags=["page"])


@router.get("/engine")
async def engine(http: Request) -> dict[str, Any]:
    """Return as JSON, for each engine, the requests in its batch, the queue of waiting requests and the use of its
    cache blocks."""
    service = service_of(http)
    service.check_ready()
    return await service.in_engine(lambda: snapshot(service))


def snapshot(service: Service) -> dict[str, Any]:
    # called in the engines' thread
    served = list(service.served.values())
    worker, names = service.worker, {one.engine: one.name for one in reversed(served)}
    return {
        "engines": [
            {"model": names[engine], "generated": worker.generated[engine], **state(engine, worker.jobs)}
            for engine in engines_of(served)
        ]
    }


def state(engine: Engine, jobs: dict[Any, Job]) -> dict[str, Any]:
    """The rows of an engine's batch, its queue and its cache blocks; `jobs` maps the engine's requests to jobs."""
    scheduler, manager = engine.scheduler, engine.scheduler.manager
    assert isinstance(manager, BlockManager), "the server's caches are paged"
    pool = next(iter(manager.pools.values()))  # pool of the layers with the first window size
    rows = []
    for row, request in enumerate(scheduler.active):
        job = jobs.get(request)
        rows.append(
            {
                "request": request.arrival,
                "label": job.label if job else "",
                "adapter": request.adapter or "",
                "doing": "decoding" if row < scheduler.num_decoding else "prompt",
                "prompt": len(request.prompt),
                "cached": request.num_cached,
                "shared": request.num_shared,
                "tokens": len(request.tokens),
                "limit": request.max_new_tokens,
                "blocks": [block for block in pool.row_blocks[row] if block != NULL_BLOCK],
            }
        )
    return {
        "capacity": scheduler.rows,
        "rows": rows,
        "waiting": [request.arrival for request in scheduler.waiting],
        "references": {block: count for block, count in enumerate(pool.ref_counts) if count},
        "kept": len(pool.hash_to_block),
        "blocks": len(pool.ref_counts) - 1,
        "block_size": manager.block_size,
    }
