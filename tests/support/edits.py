"""Ways to change a model's computation; hooks, patches and contexts are undone when the stack closes."""

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import onward
from onward import Decoder, LoRA, Rotary, add_lora, merge_lora
from onward.model import RMSNormModule, SelfAttentionModule
from onward.model.attention import Attend
from onward.model.context import rotary
from onward.transforms import quantize_model
from onward.transforms.lora import adapters_of

Edit = Callable[[Decoder, ExitStack], object]


def weight(model: Decoder) -> nn.Parameter:
    found: Any = model.blocks[0].mlp.down.weight
    return found


def patched(stack: ExitStack, target: object, name: str, value: object) -> None:
    """Set an attribute until the stack closes."""
    before = vars(target).get(name, stack)
    setattr(target, name, value)
    stack.callback(lambda: delattr(target, name) if before is stack else setattr(target, name, before))


def hooked(register: Callable[..., Any], *hook: Any, **options: Any) -> Edit:
    return lambda model, stack: stack.callback(register(model)(*hook, **options).remove)


def inside(model: Decoder, stack: ExitStack, change: Callable[[], object]) -> None:
    with torch.no_grad():
        change()


def trained(model: Decoder, stack: ExitStack) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(torch.tensor([[1, 2, 3]])).logsumexp(-1).sum().backward()
        optimizer.step()


def loaded(assign: bool) -> Edit:
    def edit(model: Decoder, stack: ExitStack) -> None:
        model.load_state_dict({name: -0.9 * t for name, t in model.state_dict().items()}, assign=assign)

    return edit


def adapted(merge: bool) -> Edit:
    def edit(model: Decoder, stack: ExitStack) -> None:
        add_lora(model, LoRA(rank=2, targets=("blocks.0",)))
        for _, _, adapter in adapters_of(model, "default"):
            nn.init.constant_(adapter.a, 0.1)
            nn.init.ones_(adapter.b)
        if merge:
            merge_lora(model, "default")

    return edit


def replaced_block(model: Decoder, stack: ExitStack) -> None:
    block = deepcopy(model.blocks[0])
    with torch.no_grad():
        block.mlp.down.weight.mul_(-9)  # type: ignore[union-attr,operator]
    model.blocks[0] = block


def given(**changes: Any) -> Edit:
    def edit(model: Decoder, stack: ExitStack) -> None:
        model.config = replace(model.config, **changes)

    return edit


class Negated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


class Function(torch.overrides.TorchFunctionMode):
    """Doubles the result of silu."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is nn.functional.silu else result


def own_forward(path: str) -> Edit:
    def edit(model: Decoder, stack: ExitStack) -> None:
        module = model.get_submodule(path)
        before = module.forward
        patched(stack, module, "forward", lambda *inputs: -before(*inputs))

    return edit


def own_project(model: Decoder, stack: ExitStack) -> None:
    attention: Any = model.blocks[0].attn
    patched(stack, attention, "project", MethodType(lambda self, x: SelfAttentionModule.project(self, -x), attention))


def of_class(cls: type, name: str, change: Callable[[Any], Any]) -> Edit:
    def edit(model: Decoder, stack: ExitStack) -> None:
        before = getattr(cls, name)
        patched(stack, cls, name, lambda self, *inputs: change(before(self, *inputs)))

    return edit


def attribute(path: str, name: str, value: object) -> Edit:
    return lambda model, stack: setattr(model.get_submodule(path), name, value)


def turned(model: Decoder, stack: ExitStack) -> None:
    def rotation(part: Rotary, *inputs: Any) -> Any:
        cos, sin = rotary(part, *inputs)
        return cos, -sin

    patched(stack, Rotary, "rotation", rotation)


def swapped(model: Decoder, stack: ExitStack) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def last(output: Any) -> Any:
    return -output


IN_PLACE: dict[str, Edit] = {  # edits of the same memory
    "mul_": lambda model, stack: inside(model, stack, lambda: weight(model).mul_(-9)),
    "one row": lambda model, stack: inside(model, stack, lambda: weight(model)[3].fill_(9)),
    "data.mul_": lambda model, stack: weight(model).data.mul_(-9),
    "a row of data": lambda model, stack: weight(model).data[3].fill_(9),
    "two columns of data": lambda model, stack: weight(model).data.copy_(weight(model).data.flip(1)),
    "NumPy": lambda model, stack: weight(model).detach().numpy().__imul__(-9),
    "load_state_dict": loaded(assign=False),
    "a training step": trained,
}
REPLACED: dict[str, Edit] = {  # edits that replace memory or modules
    "data =": lambda model, stack: setattr(weight(model), "data", weight(model).data * -9),
    "data = the same memory, transposed": lambda model, stack: setattr(
        model.blocks[0].attn.q.weight, "data", model.blocks[0].attn.q.weight.data.t()
    ),
    "another parameter": lambda model, stack: setattr(
        model.blocks[0].mlp.down, "weight", nn.Parameter(-9 * weight(model).detach())
    ),
    "load_state_dict with assign": loaded(assign=True),
    "an equal parameter, changed": lambda model, stack: (
        setattr(model.blocks[0].mlp.down, "weight", nn.Parameter(weight(model).detach().clone())),
        weight(model).data.mul_(-9),
    ),
    "another block": replaced_block,
    "blocks swapped": swapped,
    "a block less": lambda model, stack: model.blocks.__delitem__(1),
    "another norm": attribute("blocks.0", "attn_norm", nn.Identity()),
    "another final norm": attribute("", "norm", Negated()),
    "adapters merged": adapted(merge=True),
    "quantized": lambda model, stack: quantize_model(model, "int8"),
    "pruned": lambda model, stack: prune.l1_unstructured(model.blocks[0].mlp.down, "weight", 0.9),
    "pruned for good": lambda model, stack: (
        prune.l1_unstructured(model.blocks[0].mlp.down, "weight", 0.9),
        prune.remove(model.blocks[0].mlp.down, "weight"),
    ),
    "parametrized": lambda model, stack: parametrize.register_parametrization(
        model.get_submodule("blocks.0.mlp.down"), "weight", Negated()
    ),
    "eps": attribute("blocks.0.attn_norm", "eps", 1.0),
    "scale": attribute("blocks.0.attn.attend", "scale", 3.0),
    "softcap": attribute("blocks.0.attn.attend", "softcap", 0.01),
    "rotary base": given(position=Rotary(theta=2.0)),
    "window": given(attention=onward.SelfAttention(window=2)),
}
WATCHED: dict[str, Edit] = {  # edits of forward passes by adapters, hooks, methods and modes
    "adapters": adapted(merge=False),
    "hook": hooked(lambda model: model.blocks[0].register_forward_hook, lambda m, i, y: -y),
    "hook before": hooked(lambda model: model.blocks[1].register_forward_pre_hook, lambda m, i: (-i[0], *i[1:])),
    "hook with keywords": hooked(
        lambda model: model.blocks[0].mlp.register_forward_hook, lambda m, i, k, y: -y, with_kwargs=True
    ),
    "global hook": hooked(
        lambda model: nn.modules.module.register_module_forward_hook,
        lambda m, i, y: -y if isinstance(m, RMSNormModule) else None,
    ),
    "global hook before": hooked(
        lambda model: nn.modules.module.register_module_forward_pre_hook,
        lambda m, i: (-i[0], *i[1:]) if isinstance(m, Attend) else None,
    ),
    "forward of a module": own_forward("blocks.0.mlp"),
    "forward of a block": own_forward("blocks.1"),
    "method of a module": own_project,
    "forward of a class": of_class(RMSNormModule, "forward", last),
    "method of a class": of_class(SelfAttentionModule, "project", lambda qkv: (-qkv[0], *qkv[1:])),
    "function of a part": turned,
    "onward.edit": lambda model, stack: stack.enter_context(onward.edit(model, {"blocks.0": last})),
    "autocast": lambda model, stack: stack.enter_context(torch.autocast("cpu", torch.bfloat16)),
    "a function mode": lambda model, stack: stack.enter_context(Function()),
}
EDITS = IN_PLACE | REPLACED | WATCHED
ONCE = {"adapters merged", "quantized", "pruned", "pruned for good", "parametrized", "blocks swapped", "another norm"}
