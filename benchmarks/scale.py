"""Expected tokens per second of training Llama 3.1 on H100s: python -m benchmarks.scale prints the table of
docs/scale.md."""

from dataclasses import dataclass

from onward.config.mesh import Mesh
from onward.families import presets
from onward.measuring.machine import machine_for
from onward.planning.arrangements import SAFE
from onward.reports.plan import Planned

CONTEXT = 8192
COLUMNS = (
    "model",
    "devices",
    "mesh",
    "windows",
    "memory, GB",
    "sent, GB",
    "arithmetic",
    "overlapped",
    "waiting",
    "tokens/s",
)


@dataclass(frozen=True)
class Setup:
    """A training setup in bf16 with recomputation: a release, a mesh, and the number of windows per device in a
    batch."""

    model: str
    mesh: str
    windows: int


SETUPS = (
    Setup("llama-3.1-8b", "shard=8", 2),
    Setup("llama-3.1-8b", "replicate=8 shard=8", 2),
    Setup("llama-3.1-8b", "shard=64", 2),
    Setup("llama-3.1-8b", "shard=128", 2),
    Setup("llama-3.1-8b", "replicate=64 shard=8", 2),
    Setup("llama-3.1-70b", "shard=8", 1),
    Setup("llama-3.1-70b", "shard=64", 1),
    Setup("llama-3.1-70b", "shard=8 tensor=8", 8),
    Setup("llama-3.1-70b", "shard=32 tensor=8", 14),
    Setup("llama-3.1-70b", "replicate=8 shard=64", 1),
    Setup("llama-3.1-70b", "replicate=8 shard=8 tensor=8", 8),
)


def row(setup: Setup) -> list[str]:
    config, mesh = presets()[setup.model].config, Mesh.parse(setup.mesh)
    machine = machine_for(config, "h100", context=CONTEXT)
    plan = Planned(config, machine, CONTEXT, setup.windows, recompute=True)
    memory, time = plan.on_mesh(mesh).peak, plan.time(mesh)
    sent = sum(one.sent for one in plan.sent(mesh)) / 1e9
    seconds = (f"{1e3 * one:,.0f}" for one in (time.arithmetic, time.meanwhile, time.waiting))
    speed = f"{plan.speed(mesh) / mesh.count:,.0f}" if memory < SAFE * machine.memory else "does not fit"
    return [
        setup.model,
        f"{mesh.count}",
        setup.mesh,
        f"{setup.windows}",
        f"{memory / 1e9:.1f}",
        f"{sent:.1f}",
        *seconds,
        speed,
    ]


def table() -> str:
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *map(row, SETUPS)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    print(table())
