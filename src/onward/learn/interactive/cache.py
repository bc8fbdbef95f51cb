"""The memory of a KV cache, computed from its sizes."""

import math
from collections.abc import Sequence

import torch

from onward.base.errors import UserError
from onward.families import preset
from onward.learn.interactive.figure import InteractiveFigure
from onward.planning.memory import cache_bytes, weight_bytes

DTYPES = torch.bfloat16, torch.float32


def cache_memory(names: Sequence[str]) -> InteractiveFigure:
    """Sliders for the sizes of a KV cache, which start from those of published models, such as llama-3.1-8b. The models
    must keep the keys and values of all tokens in every layer."""
    if not names:
        raise UserError("names is empty: give at least one preset, such as llama-3.1-8b")
    models = []
    for name in names:
        c = preset(name).config
        sizes = {"layers": c.n_layers, "kv_heads": c.n_kv_heads, "width": c.d_head, "length": c.context_length}
        if cache_bytes(c, 1, c.context_length, torch.bfloat16) != 4 * math.prod(sizes.values()):
            raise UserError(
                f"Cannot show the cache of {name}, because it does not keep a key and a value of every token for each "
                "kv head and layer: choose another model"
            )
        models.append({"name": name, "heads": c.n_heads, **sizes, "weights": weight_bytes(c, torch.bfloat16)})
    formats = {str(dtype).removeprefix("torch."): [dtype.itemsize, 0] for dtype in DTYPES}
    return InteractiveFigure(
        "cache",
        "The memory of a KV cache",
        "Start from a published model, and change its sizes.",
        {"models": models, "formats": {**formats, "int8": [1, DTYPES[0].itemsize]}},  # bytes per number, per scale
    )
