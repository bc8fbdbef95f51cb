"""The state of a model at one moment, and its fingerprint, a hash that names the model with all of its weights."""

from __future__ import annotations

import hashlib
from itertools import chain
from operator import call, is_
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from onward.compiled.inventory import TENSORS, Inventory, ambient, describe_function, qualified_name
from onward.model.adapters import Adapter, Selection, WeightAdapters, each_adapter, selection
from onward.model.attachments import version
from onward.model.decoder import Decoder
from onward.model.divided import tensor_axis
from onward.tracing.listening import is_traced

COMPILABLE_HOOKS = {WeightAdapters.hook, Selection.check_rows}
ADAPTER_HOOKS = {*COMPILABLE_HOOKS, each_adapter}  # allowed in a fingerprint, because each request names its adapter
FOLD = 64  # number of 64-bit words per sum of a checksum


def has_dora(layer: nn.Module) -> bool:
    """Return whether a layer has an adapter with DoRA."""
    adapters = [one for child in layer.children() if isinstance(child, WeightAdapters) for one in child.values()]
    return any(isinstance(one, Adapter) and one.magnitude is not None for one in adapters)


def marks(model: Decoder) -> tuple[object, ...]:
    """Return numbers and settings that differ after a hook was registered (on anything in this process), behavior was
    attached to the model or detached from it, or a setting of PyTorch has changed; the number of hooks registered so
    far comes first."""
    return RemovableHandle.next_id, version(model), *ambient(model)


class Snapshot:
    """The state of a model at one moment: structure, tensors, hooks and settings. `holds` tells whether the model is
    unchanged, by comparing all of its objects. A decoding step of the model is `compilable` if nothing observes or
    changes the model's forward pass except LoRA adapters of linear layers and embeddings: no other hook, no edit and no
    replaced method, nor a layer with DoRA whose tensors PyTorch does not count the changes of."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.inventory = model, Inventory(model)
        self.versioned = [tensor for tensor in self.inventory.tensors if not tensor.is_inference()]
        self.marks = marks(model)
        self.hooks = self.hooks_now()
        self.replaced = is_traced(model) or self.inventory.is_replaced
        self.selection = selection(model)
        scaled = [layer for layer in model.modules() if has_dora(layer)]
        self.factors = [t for layer in scaled for t in (*layer.parameters(), *layer.buffers())]
        self.values = self.values_now()
        kinds = {getattr(hook, "__func__", hook) for hooks in self.hooks for hook in hooks}
        unversioned = any(tensor.is_inference() for tensor in self.factors)
        self.compilable = not (self.replaced or unversioned) and kinds <= COMPILABLE_HOOKS

    def hooks_now(self) -> list[tuple[object, ...]]:
        hooks = self.inventory.hooks
        return [tuple(hooks.values()) for hooks in hooks if hooks] if any(hooks) else []

    def values_now(self) -> tuple[list[Any], ...]:
        """Return the current values of all objects on which the model's forward pass depends, as lists; two such
        results are compared list by list, the last list by identity, the others by `==`."""
        inventory, tensors = self.inventory, self.inventory.tensors
        return (
            list(map(call, inventory.getters, inventory.dicts)),
            list(map(len, inventory.dicts)),
            list(map(Tensor.data_ptr, tensors)),
            list(map(Tensor.numel, tensors)),
            list(map(Tensor.stride, tensors)),
            list(chain.from_iterable(inventory.methods)),
            list(chain.from_iterable(inventory.containers)),
        )

    def holds(self) -> bool:
        if any(attributes.get(name) is not tensor for attributes, name, tensor in self.inventory.tensor_attributes):
            return False
        try:
            *now, parts_now = self.values_now()
        except (KeyError, RuntimeError):  # an attribute was deleted
            return False
        *before, parts = self.values
        try:
            same = now == before
        except (RuntimeError, ValueError, TypeError):  # tensors and arrays have no truth value
            return False
        return same and len(parts) == len(parts_now) and all(map(is_, parts, parts_now)) and self.has_same_hooks()

    def has_same_hooks(self) -> bool:
        """Return whether the model still has the hooks and attachments of this snapshot, under the same settings of
        PyTorch. Costs about a microsecond if it has no hooks and no hook was registered anywhere since."""
        now = marks(self.model)
        if now != self.marks or self.hooks:
            if now[1:] != self.marks[1:] or self.hooks != self.hooks_now():
                return False
            self.marks = now
        return True

    def versions(self) -> list[int]:
        """Return PyTorch's version counter of each tensor of the model, except inference tensors, to detect changed
        weights. Each in-place operation increases it; changes through `data` or NumPy do not."""
        return [tensor._version for tensor in self.versioned]

    @property
    def key(self) -> tuple[object, ...]:
        """The structure of the model and the addresses of its tensors: compiled steps are used only while this key is
        equal. The result keeps functions alive, but no module and no tensor. The tensors of layers with DoRA are
        included by their version, since steps keep the norms that are computed from them."""
        tensors = [tensor for tensor in self.inventory.tensors if type(tensor) in TENSORS]
        memory = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]
        functions = [function for _, _, function in self.inventory.functions]
        return self.inventory.form, memory, functions, [t._version for t in self.factors if not t.is_inference()]

    def fingerprint(self) -> str | None:
        """Return a hash of the model's structure and of all numbers in its tensors. The hash identifies the model that
        computed a cached prompt prefix. Computing it reads all weights.

        Returns None if the model has edits, replaced methods, or hooks other than those of adapters, because keys and
        values then depend on more than the hash covers.
        """
        hooks = [getattr(hook, "__func__", hook) for hooks in self.hooks for hook in hooks]
        if self.replaced or any(hook not in ADAPTER_HOOKS for hook in hooks):
            return None
        digest = hashlib.sha256(self.inventory.form.encode())
        for cls, name, function in self.inventory.functions:
            if not cls.__module__.startswith("torch."):
                digest.update(repr((qualified_name(cls), name, describe_function(function))).encode())
        for tensor in self.inventory.tensors:
            digest.update(checksum(tensor))
        return digest.hexdigest()


def fingerprint(model: Decoder) -> str | None:
    """Return a hash of the structure and the weights of a model, or None as `Snapshot.fingerprint` does. The processes
    of a tensor axis that divides the model call this together, and must not have added hooks or edits."""
    return fingerprint_of_parts(model) if tensor_axis(model) > 1 else Snapshot(model).fingerprint()


def fingerprint_of_parts(model: Decoder) -> str:
    """Hash the weights of a model that the processes of a tensor axis divide: each process hashes the weights that it
    holds in full, and the hashes that all processes computed for their parts."""
    from onward.parallel.parts import local, splits  # imports DTensors, which takes half a second

    whole, own = hashlib.sha256(), hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest = own if splits(parameter) else whole
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + checksum(local(parameter)))
    stream: Any = model.stream
    parts: list[Any] = [None] * stream.mesh.size()
    distributed.all_gather_object(parts, own.hexdigest(), group=stream.group)
    return hashlib.sha256(f"{whole.hexdigest()} {parts}".encode()).hexdigest()


def checksum(tensor: Tensor) -> bytes:
    """Return a hash of a tensor's bytes, at about the speed of memory: the SHA-256 of sums of its 64-bit words, modulo
    2 ** 64, along two directions, so that the order of the words matters, and of the bytes left over."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return b""
    data = flat.view(torch.uint8)
    full_end = data.numel() // (8 * FOLD * FOLD) * 8 * FOLD * FOLD
    digest = hashlib.sha256(data[full_end:].cpu().numpy().data)
    if full_end:
        words = data[:full_end] if data.data_ptr() % 8 == 0 else data[:full_end].clone()
        words = words.view(torch.int64)
        for sums in words.view(-1, FOLD).sum(1), words.view(8, -1).sum(0).view(FOLD // 8, -1).sum(0):
            digest.update(sums.cpu().numpy().data)
    return digest.digest()
