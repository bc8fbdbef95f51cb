"""The processes that train a run together, as started by torchrun, with the mesh of the run."""

import os
from typing import TYPE_CHECKING, Any

from onward.base.alone import Alone
from onward.config.decoder import DecoderConfig
from onward.config.mesh import Mesh
from onward.training.config import RunConfig

if TYPE_CHECKING:
    from onward.parallel.processes import Processes


def joined() -> "Processes | None":
    """Return the processes that torchrun started, or None if there is only this process, without importing
    `parallel/`."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    from onward.parallel.processes import Processes

    return Processes.join()


def several(processes: Alone | None) -> "Processes | None":
    """Return the processes that train a run: `processes` if given, else all that torchrun started; None for a single
    process."""
    many: Any = processes if processes and processes.count > 1 else None
    return joined() if processes is None else many


def planned(
    config: RunConfig, decoder: DecoderConfig, processes: "Processes | None", mesh: str = ""
) -> "Processes | None":
    """Return the processes of a run with the mesh that replicates or shards the model `decoder`: `mesh` if given, else
    the configured mesh, else replicas if the training fits on one device, else shards. Raises a UserError for a mesh
    that the run cannot use."""
    text = mesh or config.mesh
    if processes is None:
        if text:
            Mesh.parse(text).check_count(1)
        return None
    from onward.training.run.arrangement import arranged  # imported late, because it imports the memory planner

    return arranged(config, decoder, processes, text)
