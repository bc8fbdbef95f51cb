"""Models with adapters that change their outputs."""

import torch

from onward import Decoder, LoRA, add_lora

LORA = LoRA(rank=2, targets=("blocks", "embed", "head"))


@torch.no_grad()
def stirred(model: Decoder, *names: str, lora: LoRA = LORA) -> Decoder:
    """Add adapters with these names that change the outputs of a model."""
    for seed, name in enumerate(names):
        add_lora(model, lora, name)
        torch.manual_seed(seed)
        for parameter_name, parameter in model.named_parameters():
            if f"_lora.{name}." in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model
