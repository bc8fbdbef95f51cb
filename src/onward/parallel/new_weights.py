"""New weights for a decoder that processes divide, equal to the weights that `Decoder(config)` draws in one process.

Every process draws all matrices, one at a time, and keeps its part of each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from onward.config.decoder import DecoderConfig
from onward.model.build import draw
from onward.model.decoder import Decoder
from onward.parallel.parts import local, part_of, whole_parameters

ALLOCATIONS = [getattr(torch.ops.aten, name) for name in ("empty", "zeros", "ones", "full")]


class MatricesOnMeta(TorchDispatchMode):
    """A context manager under which new tensors of two or more dimensions are on the meta device, to save memory. Their
    random values are drawn and discarded, so that the random generator advances as without this context."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in ALLOCATIONS and len(args[0]) >= 2:
            kwargs = kwargs | {"device": torch.device("meta")}
        elif torch.Tag.nondeterministic_seeded in func.tags and isinstance(args[0], Tensor) and args[0].is_meta:
            func(torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu"), *args[1:], **kwargs)
            return args[0]
        return func(*args, **kwargs)


class FullDraws(TorchFunctionMode):
    """A context manager under which a normal initialization of a divided parameter draws the values of the full
    parameter on the CPU, and keeps this process's part. For a parameter on the meta device, the values are
    discarded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not nn.init.normal_:
            return func(*args, **kwargs)
        parameter = kwargs.pop("tensor")
        full = nn.init.normal_(torch.empty(parameter.shape, dtype=parameter.dtype), **kwargs)
        if not parameter.is_meta:
            local(parameter).copy_(part_of(full, parameter))
        return parameter


def new_decoder(config: DecoderConfig, seed: int) -> tuple[Decoder, Callable[[Decoder], None]]:
    """Return a decoder with its matrices on the meta device, and a function that sets its weights after memory has been
    allocated. The weights equal those of `torch.manual_seed(seed); Decoder(config)`, even if processes divide the
    decoder."""
    torch.manual_seed(seed)
    with MatricesOnMeta():
        model = Decoder(config)
    generator = torch.get_rng_state()

    def fill(model: Decoder) -> None:
        torch.set_rng_state(generator)
        with torch.no_grad(), FullDraws():
            draw(whole_parameters(model).items(), config)

    return model, fill
