"""A model whose blocks are gathered in bf16 computes in bf16 in every call, not only in a training step."""

import torch

from onward import Decoder
from onward.config.mesh import Mesh
from onward.parallel.parallelize import parallelize

from support.decoders import config
from support.simulated import fake_processes


@torch.no_grad()
def test_a_model_gathered_in_bf16_can_be_called_without_autocast() -> None:
    mesh, model = Mesh(shard=2), Decoder(config())
    with fake_processes(mesh) as processes:
        parallelize(model, mesh, processes.devices, precision="bf16")
        assert model(torch.zeros(1, 12, dtype=torch.int64)).dtype == torch.bfloat16
