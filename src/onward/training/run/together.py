"""The processes that train a run together: those that torchrun started, in the mesh of the run."""

import os
from typing import TYPE_CHECKING, Any

from onward.base.alone import Alone
from onward.config.decoder import DecoderConfig
from onward.config.mesh import Mesh
from onward.training.config import RunConfig

if TYPE_CHECKING:
    from onward.parallel.processes import Processes


def joined() -> "Processes | None":
    """Return the processes that torchrun started, or None if this process works alone; it then imports nothing of
    `parallel/`."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    from onward.parallel.processes import Processes

    return Processes.join()


def several(processes: Alone | None) -> "Processes | None":
    """Return the processes that train a run: those given, or by default all that torchrun started; None for one."""
    many: Any = processes if processes and processes.count > 1 else None
    return joined() if processes is None else many


def planned(
    config: RunConfig, decoder: DecoderConfig, processes: "Processes | None", mesh: str = ""
) -> "Processes | None":
    """Return the processes of a run with the mesh in which they replicate or divide the model `decoder`: `mesh` if
    it is given, else the configured one, else replicas if a device can hold the whole training, else shards. Raises a
    UserError for a mesh that the run cannot use."""
    text = mesh or config.mesh
    if processes is None:
        if text:
            Mesh.parse(text).check_count(1)
        return None
    from onward.training.run.arrangement import arranged  # which plans memory

    return arranged(config, decoder, processes, text)
