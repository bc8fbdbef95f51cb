"""The metadata keys of a GGUF file's architecture, and a check for keys that Onward did not read."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.checkpoint.gguf.header import Header
from onward.families._keys import UnreadKeys

HARMLESS = re.compile(
    r"vocab_size|n_deepstack_layers|tensor_data_layout|use_parallel_residual|pooling_type|features_length"
    r"|attention\.layer_norm(_rms)?_epsilon|attention\.((key|value)_length(_mla)?|head_count_kv)|rope\.dimension_(count|sections)"
    r"|expert_(count|used_count|shared_count|feed_forward_length|shared_feed_forward_length)|interleave_moe_layer_step"
    r"|rope\.scaling\.(factor|original_context_length|type)"
)
NOTHING: tuple[Any, ...] = (None, False, 0, [], "", "none")
NEUTRAL = {
    "rope.scaling.finetuned": True,
    "expert_weights_scale": 1,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
} | {
    "rope.scaling.finetuned": True,
    "rope.scaling.yarn_beta_fast": 32,
    "rope.scaling.yarn_beta_slow": 1,
    "rope.scaling.yarn_ext_factor": 1,
}  # key -> the value, in addition to those in NOTHING, with which the key has no effect
REPEATED = {  # keys of layers with a window -> the key of all layers
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "rope.dimension_count_swa": "rope.dimension_count",
}
HONORED = {"attention.causal", "expert_group_count", *REPEATED}  # keys that llama.cpp applies in every architecture


class Keys(Mapping[str, Any]):
    """The keys that belong to the file's architecture, such as block_count for llama.block_count. Records which keys
    were read."""

    def __init__(self, header: Header) -> None:
        self.header, self.prefix, self.seen = header, f"{header.architecture}.", set[str]()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return self.header.keys[self.prefix + key]

    def __iter__(self) -> Any:
        return (key.removeprefix(self.prefix) for key in self.header.keys if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def number(self, key: str, default: Any = None) -> Any:
        """The number under a key; a list of one value per layer counts as a number if all values other than 0 are
        equal."""
        value = self.get(key, default)
        if isinstance(value, list) and len(found := {*value} - {0} or {*value}) == 1:
            value = found.pop()
        if type(value) not in (int, float) or not math.isfinite(value):
            near = f" ({nearest(key, self)})" if value is None and len(self) else ""
            what = "no" if value is None else f"{value!r:.40} as"
            raise UserError(f"{self.header.path} has {what} {self.prefix}{key}: get the file again{near}")
        return value

    def by_layer(self, key: str, n_layers: int) -> list[Any]:
        """The values of a key that may have one for each layer."""
        value = self.get(key)
        values = value if isinstance(value, list) else [value] * n_layers
        if len(values) < n_layers:
            raise UserError(f"{key} has values for {len(values)} of the {n_layers} layers: get the file again")
        return values[:n_layers]

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self.header.tensors

    def unread(self) -> dict[str, Any]:
        """The keys and values that were not read, unless they change nothing or repeat other keys."""
        return {
            key: value
            for key in self
            if key not in self.seen and not HARMLESS.fullmatch(key)
            if not self.neutral(key, value := self.header.keys[self.prefix + key])
        }

    def neutral(self, key: str, value: Any) -> bool:
        """Whether a key with this value changes nothing."""
        if key == "attention.causal":
            return value is True
        same = self.header.keys.get(self.prefix + REPEATED[key]) if key in REPEATED else NEUTRAL.get(key)
        return value in (*NOTHING, same) or (key == "expert_group_count" and value == 1)

    def check(self) -> None:
        """Raise a UserError for a key that llama.cpp applies in every architecture, if it was not read."""
        for key, value in self.unread().items():
            if key in HONORED:
                raise UserError(
                    f"{self.prefix}{key} is {value!r:.40}, which Onward does not support in {self.header.architecture}"
                )

    def warn(self) -> None:
        """Warn of the keys that were not read."""
        if odd := ", ".join(repr(self.prefix + key) for key in self.unread()):
            message = f"{self.header.path.name} has keys that Onward does not know and ignores: {odd}"
            warnings.warn(message, UnreadKeys, stacklevel=1)  # one location, so Python shows equal warnings once
