"""Models of transformers with random weights, and the comparison of their logits with ours."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

LENGTH = 16  # number of compared tokens; windows and original contexts are shorter


@torch.inference_mode()
def assert_same_logits(ours: torch.nn.Module, theirs: Any) -> None:
    """Assert that logits are equal within 2e-5 of the largest logit, or 1e-4 with Gated DeltaNet, whose fp32 results
    differ from its fp64 results by up to 3e-5 in these models."""
    vocabulary = theirs.config.vocab_size
    tokens = torch.randint(vocabulary, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    wanted = theirs(tokens).logits
    delta = any(name.endswith(".head_norm.weight") for name, _ in ours.named_parameters())
    tolerance = (1e-4 if delta else 2e-5) * wanted.abs().max().item()
    torch.testing.assert_close(ours(tokens), wanted, rtol=0, atol=tolerance)


@torch.no_grad()
def stir(model: Any) -> Any:
    """Add random numbers to all weights, including biases, norms and routing biases."""
    torch.manual_seed(0)
    for tensor in {t.data_ptr(): t for t in model.state_dict().values() if t.is_floating_point()}.values():
        tensor.add_(torch.randn_like(tensor) * 0.15)
    return model.eval()


def publish(hf: PreTrainedConfig, folder: Path) -> Any:
    """A model of transformers with random weights, saved in a folder."""
    torch.manual_seed(0)
    theirs = stir(AutoModelForCausalLM.from_config(hf))
    theirs.save_pretrained(folder)
    return theirs


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
