"""The fingerprint of a model: what its forward depends on, for compiled steps and for cached prefixes alike.

- form: the modules with their classes, the values of their attributes and of the config, dtypes and shapes of tensors,
  the code of methods, autocast and the default dtype;
- memory: where the tensors are;
- contents: the numbers in the tensors;
- whether the model is plain: no hook, edit or trace, no method replaced from outside.

A compiled step belongs to a form and a memory, since it reads weights in place; cached keys and values belong to a form
and contents. The state of an object that is neither a module, a dataclass, a tensor nor a container is not looked at.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache, partial
from itertools import chain
from operator import call, is_, itemgetter
from types import BuiltinFunctionType, CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from onward.model.adapters import Adapter, Selection, WeightAdapters, each_adapter
from onward.model.decoder import Decoder
from onward.tracing.names import is_traced

INTERNAL = set(vars(nn.Module())) - {"training"}  # attributes that all modules have
SIMPLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
TENSORS = (Tensor, nn.Parameter)  # others compute by functions of their own
GLOBAL_HOOKS: list[dict[int, Any]] = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
ADAPTER_HOOKS = WeightAdapters.hook, each_adapter  # a request names its adapter
FOLD = 64  # numbers of 8 bytes in one sum of a checksum


class Look:
    """A model as it is now. `holds` says whether it still is so, in some 0.2 us for each module: the values, dicts and
    lists that were met are compared by identity, and nothing is described again.

    While a look is there, its tensors are, so that no other tensor can have their memory.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.tensors: list[Tensor] = []
        self.is_replaced = False  # whether an object has a method of its own in place of its class's
        self.dicts: list[dict[str, Any]] = []  # attributes of modules and dataclasses, of which `getters` read some
        self.getters: list[itemgetter[Any]] = []
        self.tensor_attributes: list[tuple[dict[str, Any], str, Tensor]] = []  # attributes that are tensors
        self.views: list[Iterable[object]] = []  # further containers
        self.hooks = list(GLOBAL_HOOKS)
        self.numbers: dict[int, int] = {}  # of objects, by id
        self.types: dict[type, None] = {}
        self.ambient = ambient(model)
        modules = [(name, self.module(one)) for name, one in model.named_modules()]
        self.form = repr((modules, self.ambient))
        self.tensors = list({id(tensor): tensor for tensor in self.tensors}.values())
        self.tracked = [tensor for tensor in self.tensors if not tensor.is_inference()]  # which have a version
        self.storages = [tensor.untyped_storage() for tensor in self.tensors if type(tensor) in TENSORS]
        classes = {cls: None for one in self.types for cls in one.__mro__ if cls is not object}
        self.methods = [vars(cls).values() for cls in classes]
        self.code = [(cls, name, f) for cls in classes for name, value in vars(cls).items() for f in functions(value)]
        foreign = [(name, function) for cls, name, function in self.code if is_foreign(cls, function)]
        own = {function for _, _, function in self.code} - {function for _, function in foreign}
        called = set[str]().union(*(names_in(function.__code__) for function in own))
        is_patched = any(name in called or name.startswith("__") for name, _ in foreign)  # others are never called
        odd = any(type(tensor) not in TENSORS for tensor in self.tensors)
        self.hooked = self.hooks_now()
        self.traced = is_traced(model)
        self.replaced = self.is_replaced or is_patched or odd or self.traced
        self.now = self.values()

    def module(self, module: nn.Module) -> object:
        """What describes a module without its children."""
        attributes = vars(module)
        self.hooks += [module._forward_hooks, module._forward_pre_hooks]
        contents = module._parameters, module._buffers, module._modules
        self.views += [content.values() for content in contents if content]
        tensors = {name: self.describe(t) for content in contents[:2] for name, t in content.items()}
        own = {name: attributes[name] for name in sorted(set(attributes) - INTERNAL)}
        if isinstance(module, Adapter):
            del own["norms"]  # which its forward computes
        return self.attributes(module, own), tensors

    def attributes(self, value: object, own: Mapping[str, object]) -> object:
        """What describes an object by its attributes `own`, which are looked at from now on."""
        self.types[type(value)] = None
        attributes, plain = vars(value), [name for name in own if not isinstance(own[name], Tensor)]
        self.tensor_attributes += [(attributes, name, one) for name, one in own.items() if isinstance(one, Tensor)]
        methods = set(plain) - set(getattr(value, "__dataclass_fields__", ()))
        self.is_replaced |= any(isinstance(getattr(type(value), name, None), FunctionType) for name in methods)
        if plain:
            self.dicts.append(attributes)
            self.getters.append(itemgetter(*plain))
        return qualified(type(value)), {name: self.describe(one) for name, one in own.items()}

    def describe(self, value: Any) -> object:
        """What describes a value: equal for equal values, in other processes too."""
        if value is None or isinstance(value, SIMPLE):
            return value
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return value.dtype, tuple(value.shape)
        if isinstance(value, nn.Module | Selection | type):  # modules are described where they are a child
            return qualified(value if isinstance(value, type) else type(value))
        if isinstance(value, FunctionType):
            return code_of(value)
        if isinstance(value, BuiltinFunctionType):
            return qualified(value)
        if id(value) in self.numbers:
            return "again", self.numbers[id(value)]
        self.numbers[id(value)] = len(self.numbers)
        if isinstance(value, partial):
            return [self.describe(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, Mapping):
            self.views.append(value.values())
            return {repr(key): self.describe(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            self.views.append(value)
            return [self.describe(one) for one in value]
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        if is_dataclass(value) and hasattr(value, "__dict__"):
            return self.attributes(value, vars(value))
        return qualified(type(value))

    def hooks_now(self) -> list[tuple[object, ...]]:
        """The hooks of all modules."""
        return [tuple(hooks.values()) for hooks in self.hooks if hooks] if any(self.hooks) else []

    def values(self) -> tuple[list[Any], ...]:
        """What is compared from step to step by `==`, of which modules and tensors are compared by identity before."""
        tensors = self.tensors
        return (
            list(map(call, self.getters, self.dicts)),
            list(map(len, self.dicts)),
            list(map(Tensor.data_ptr, tensors)),
            list(map(Tensor.numel, tensors)),
            list(map(Tensor.stride, tensors)),
            list(chain.from_iterable(self.methods)),
            list(chain.from_iterable(self.views)),
        )

    def holds(self) -> bool:
        """Whether the model has the form and the memory that it had, and the same hooks."""
        if any(attributes.get(name) is not tensor for attributes, name, tensor in self.tensor_attributes):
            return False
        try:
            now = self.values()
        except (KeyError, RuntimeError):  # an attribute is gone
            return False
        *before, parts = self.now
        try:
            same = list(now[:-1]) == before
        except (RuntimeError, ValueError, TypeError):  # tensors and arrays have no truth value
            return False
        return (
            same
            and len(parts) == len(now[-1])
            and all(map(is_, parts, now[-1]))
            and self.ambient == ambient(self.model)
            and self.hooked == self.hooks_now()
            and self.traced == is_traced(self.model)
        )

    def versions(self) -> list[int]:
        """Counts of the changes in place that PyTorch knows of; those through `data` and NumPy it does not."""
        return [tensor._version for tensor in self.tracked]

    @property
    def key(self) -> tuple[object, ...]:
        """The form and the memory, for compiled steps. It keeps functions, but no module and no tensor."""
        memory = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in self.tensors if type(t) in TENSORS]
        return self.form, memory, [function for _, _, function in self.code]

    @property
    def compilable(self) -> bool:
        """Whether nothing sees or changes what modules compute, so that a step may be compiled."""
        return not self.hooked and not self.replaced

    @property
    def shareable(self) -> bool:
        """Whether keys and values are those of the form and the contents alone."""
        own = all(getattr(hook, "__func__", hook) in ADAPTER_HOOKS for hooks in self.hooked for hook in hooks)
        return own and not self.replaced

    def name(self) -> str:
        """A hash of the form and the contents, for prefixes. It reads all weights once."""
        digest = hashlib.sha256(self.form.encode())
        for cls, name, function in self.code:
            if not cls.__module__.startswith("torch."):
                digest.update(repr((qualified(cls), name, code_of(function))).encode())
        for tensor in self.tensors:
            digest.update(checksum(tensor))
        return digest.hexdigest()


class ModelState:
    """Follows a model from step to step, for what belongs to its fingerprint."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.look: Look | None = None
        self.key: tuple[object, ...] = ()  # of the last look, the same object while it is equal
        self.versions: list[int] = []
        self.changes = 0  # a count; what was computed before one is not what would be computed now

    def follow(self) -> Look:
        """Look at the model; called once before each step."""
        look = self.look
        if look is None or not look.holds():
            self.look, before = Look(self.model), look
            look, key, versions = self.look, self.look.key, self.look.versions()
            if not before or (key, versions, look.hooked) != (self.key, self.versions, before.hooked):
                self.changes += 1
            self.key, self.versions = self.key if key == self.key else key, versions
        elif (versions := look.versions()) != self.versions:
            self.versions, self.changes = versions, self.changes + 1
        return look

    def rest(self) -> None:
        """Release the weights: no step follows soon."""
        self.look = None


def fingerprint(model: Decoder) -> str | None:
    """A hash of the form and the contents of a model; None while it has hooks or edits."""
    look = Look(model)
    return look.name() if look.shareable else None


def ambient(model: Decoder) -> tuple[object, ...]:
    """What decides on dtypes beside the model."""
    device = model.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return autocast, torch.get_default_dtype()


def qualified(value: Any) -> str:
    """The name of a class or function, with that of its module."""
    return f"{value.__module__}.{value.__qualname__}"


def functions(value: object) -> list[FunctionType]:
    """The functions that an entry of a class stands for."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    entries = [value.fget, value.fset] if isinstance(value, property) else [value]
    return [entry for entry in entries if isinstance(entry, FunctionType)]


def is_foreign(cls: type, function: FunctionType) -> bool:
    """Whether a class of Onward or PyTorch has a method that neither of them defined."""
    ours, package = {"onward", "torch"}, (function.__module__ or "").partition(".")[0]
    return cls.__module__.partition(".")[0] in ours and package not in ours | sys.stdlib_module_names


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """The attributes and global names that a function and those inside it use."""
    inside = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*inside)


def code_of(function: FunctionType) -> object:
    """What describes a function: its name, code, defaults, and the simple values that it closes over."""
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    values = [(name, cell.cell_contents) for name, cell in zip(names, cells) if cell != CellType()]
    simple = [(name, one if isinstance(one, SIMPLE) else type(one).__name__) for name, one in values]
    return qualified(function), described_code(function.__code__), repr(function.__defaults__), simple


def described_code(value: Any) -> object:
    """The instructions of a function and of those inside it, or a constant of one."""
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, [described_code(constant) for constant in value.co_consts]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def checksum(tensor: Tensor) -> bytes:
    """A hash of a tensor's numbers, at the speed of the memory: sums, modulo 2 ** 64, of its words in two directions,
    so that moved numbers change it too."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return b""
    data = flat.view(torch.uint8)
    whole = data.numel() // (8 * FOLD * FOLD) * 8 * FOLD * FOLD
    digest = hashlib.sha256(data[whole:].cpu().numpy().data)
    if whole:
        words = data[:whole] if data.data_ptr() % 8 == 0 else data[:whole].clone()
        words = words.view(torch.int64)
        for sums in words.view(-1, FOLD).sum(1), words.view(8, -1).sum(0).view(FOLD // 8, -1).sum(0):
            digest.update(sums.cpu().numpy().data)
    return digest.digest()
