"""The keys in the two tables of rotary positions of a config.json, rope_parameters and rope_scaling. Does not import
torch."""

import re
from collections.abc import Mapping
from typing import Any

OF_ROPE = re.compile(
    r"rope_(type|theta)|type|partial_rotary_factor|original_max_position_embeddings|factor|attention_factor"
    r"|(low|high)_freq_factor|(short|long)_factor|beta_(fast|slow)|truncate|\w*mscale(_all_dim)?|\w+_attention"
    r"|alpha|llama_4_scaling_beta|max_position_embeddings|finetuned|mrope_\w+"  # read by some families, or harmless
)


def unknown_keys(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the keys that belong to no kind of rotary positions, with the name of their table."""
    return [f"{name}.{key}" for name, table in tables.items() for key in table if not OF_ROPE.fullmatch(key)]


def conflicts(hf: Mapping[str, Any]) -> list[str]:
    """The keys of rope_scaling and rope_parameters with different values, if a config.json has both tables; theta and
    the rotated fraction do not count."""
    new, old = hf.get("rope_parameters"), hf.get("rope_scaling")
    if not new or not old:
        return []
    defaults = {"rope_type": "default", "original_max_position_embeddings": hf.get("max_position_embeddings")}
    first, second = (
        {"rope_type": table["type"]} | table if "type" in table else table
        for table in (new.get("full_attention") or new, old)
    )
    keys = [key for key in {**second, **first} if key not in ("type", "rope_theta", "partial_rotary_factor")]
    return [key for key in keys if first.get(key, defaults.get(key)) != second.get(key, defaults.get(key))]
