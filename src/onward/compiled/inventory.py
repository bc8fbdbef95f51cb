"""Everything that the forward pass of a model depends on, collected in one walk over its modules.

It collects modules, their attributes and hooks, the config, tensors, the code of methods, autocast and the default
dtype. The state of an object that is neither a module, a dataclass, a tensor nor a container is not included.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache, partial
from operator import itemgetter
from types import BuiltinFunctionType, CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from onward.model.adapters import Adapter, Selection
from onward.model.attachments import ATTACHMENTS, LAYERS
from onward.model.decoder import Decoder

INTERNAL = set(vars(nn.Module())) - {"training"} | {ATTACHMENTS, LAYERS}  # without effect on the forward pass
SIMPLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
TENSORS = (Tensor, nn.Parameter)  # other tensor classes override functions of PyTorch
GLOBAL_HOOKS: list[dict[int, Any]] = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]


class Inventory:
    """All objects on which the forward pass of a model depends, for comparisons by identity, and `form`, a text that
    describes them without the values of tensors. Models of equal structure have equal forms, in other processes too.

    While an inventory exists, it keeps its tensors alive, so that no other tensor can get their memory.
    """

    def __init__(self, model: Decoder) -> None:
        self.dicts: list[dict[str, Any]] = []  # attributes of modules and dataclasses
        self.getters: list[itemgetter[Any]] = []  # getters of the non-tensor attributes in each dict
        self.tensor_attributes: list[tuple[dict[str, Any], str, Tensor]] = []  # attributes that are tensors
        self.containers: list[Iterable[object]] = []  # lists, and views of the values of other dicts
        self.hooks = list(GLOBAL_HOOKS)
        self.has_own_methods = False  # whether an object overrides a method of its class
        self.all_tensors: list[Tensor] = []  # with repetitions
        self.numbers: dict[int, int] = {}  # index of each object in the walk, by id
        self.types: dict[type, None] = {}
        modules = [(name, self.describe_module(one)) for name, one in model.named_modules()]
        self.form = repr((modules, ambient(model)))
        self.tensors = list({id(tensor): tensor for tensor in self.all_tensors}.values())
        self.storages = [tensor.untyped_storage() for tensor in self.tensors if type(tensor) in TENSORS]
        classes = {cls: None for one in self.types for cls in one.__mro__ if cls is not object}
        self.methods = [vars(cls).values() for cls in classes]
        self.functions = [
            (cls, name, f) for cls in classes for name, value in vars(cls).items() for f in functions_of(value)
        ]

    @property
    def is_replaced(self) -> bool:
        """Whether a method of the model was patched from outside (so that the model may not be compiled), or a tensor
        has a class other than Tensor or Parameter."""
        foreign = [(name, function) for cls, name, function in self.functions if is_foreign(cls, function)]
        own = {function for _, _, function in self.functions} - {function for _, function in foreign}
        called = set[str]().union(*(names_in(function.__code__) for function in own))
        is_patched = any(name in called or name.startswith("__") for name, _ in foreign)  # others are not called
        return self.has_own_methods or is_patched or any(type(tensor) not in TENSORS for tensor in self.tensors)

    def describe_module(self, module: nn.Module) -> object:
        attributes = vars(module)
        self.hooks += [module._forward_hooks, module._forward_pre_hooks]
        contents = module._parameters, module._buffers, module._modules
        self.containers += [content.values() for content in contents if content]
        tensors = {name: self.describe(t) for content in contents[:2] for name, t in content.items()}
        own = {name: attributes[name] for name in sorted(set(attributes) - INTERNAL)}
        if isinstance(module, Adapter):
            del own["norms"]  # a cache that its forward computes
        return self.describe_attributes(module, own), tensors

    def describe_attributes(self, value: object, own: Mapping[str, object]) -> object:
        self.types[type(value)] = None
        attributes, plain = vars(value), [name for name in own if not isinstance(own[name], Tensor)]
        self.tensor_attributes += [(attributes, name, one) for name, one in own.items() if isinstance(one, Tensor)]
        methods = set(plain) - set(getattr(value, "__dataclass_fields__", ()))
        self.has_own_methods |= any(isinstance(getattr(type(value), name, None), FunctionType) for name in methods)
        if plain:
            self.dicts.append(attributes)
            self.getters.append(itemgetter(*plain))
        return qualified_name(type(value)), {name: self.describe(one) for name, one in own.items()}

    def describe(self, value: Any) -> object:
        """Return a description of an attribute value of a model, and add its objects to the inventory. Equal values
        have equal descriptions, in other processes too."""
        if value is None or isinstance(value, SIMPLE):
            return value
        if isinstance(value, Tensor):
            self.all_tensors.append(value)
            return value.dtype, tuple(value.shape)
        if isinstance(value, nn.Module | Selection | type):  # submodules are described in __init__
            return qualified_name(value if isinstance(value, type) else type(value))
        if isinstance(value, FunctionType):
            return describe_function(value)
        if isinstance(value, BuiltinFunctionType):
            return qualified_name(value)
        if id(value) in self.numbers:
            return "again", self.numbers[id(value)]
        self.numbers[id(value)] = len(self.numbers)
        if isinstance(value, partial):
            return [self.describe(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, Mapping):
            self.containers.append(value.values())
            return {repr(key): self.describe(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            self.containers.append(value)
            return [self.describe(one) for one in value]
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        if is_dataclass(value) and hasattr(value, "__dict__"):
            return self.describe_attributes(value, vars(value))
        return qualified_name(type(value))


def ambient(model: Decoder) -> tuple[object, ...]:
    """Return the global settings of PyTorch on which the dtypes of a forward pass depend: (autocast dtype or None,
    default dtype)."""
    device = model.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return autocast, torch.get_default_dtype()


def qualified_name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def functions_of(value: object) -> list[FunctionType]:
    """Return the Python functions behind a class attribute: a method, or the getter and setter of a property."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    entries = [value.fget, value.fset] if isinstance(value, property) else [value]
    return [entry for entry in entries if isinstance(entry, FunctionType)]


def is_foreign(cls: type, function: FunctionType) -> bool:
    """Return whether a function in a class of Onward or PyTorch was patched in, that is, defined outside Onward,
    PyTorch and the standard library."""
    ours, package = {"onward", "torch"}, (function.__module__ or "").partition(".")[0]
    return cls.__module__.partition(".")[0] in ours and package not in ours | sys.stdlib_module_names


@cache
def names_in(code: CodeType) -> frozenset[str]:
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*inner)


def describe_function(function: FunctionType) -> object:
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    values = [(name, cell.cell_contents) for name, cell in zip(names, cells) if cell != CellType()]
    simple = [(name, one if isinstance(one, SIMPLE) else type(one).__name__) for name, one in values]
    return qualified_name(function), describe_code(function.__code__), repr(function.__defaults__), simple


def describe_code(value: Any) -> object:
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, [describe_code(constant) for constant in value.co_consts]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value
