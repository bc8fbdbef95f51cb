"""CodeGen: GPT-J for code, with queries, values and keys fused in four shards (Nijkamp et al. 2022)."""

from collections.abc import Iterator

from onward.config.decoder import DecoderConfig, Rotary
from onward.families import HF, Fix, Row, gptj, require

ARCHITECTURES = {"codegen": "CodeGenForCausalLM"}
SOURCE = "arXiv:2203.13474"
BASE = gptj.BASE
IGNORED = gptj.IGNORED
PRESETS: dict[str, HF] = {
    f"codegen-{name}": {"vocab_size": 51_200, "n_embd": width, "n_layer": layers, "n_head": heads, "rotary_dim": turned}
    for name, width, layers, heads, turned in (
        ("350m", 1024, 20, 16, 32),
        ("2b", 2560, 32, 32, 64),
        ("6b", 4096, 33, 16, 64),
        ("16b", 6144, 34, 24, 64),
    )
}
ANCESTORS = {"codegen": "gpt-j-6b"}
SHARDS, SHARD = 4, {"q": 0, "v": 1, "k": 2}  # parts of a shard, in this order
config, to_hf = gptj.config, gptj.to_hf


def interleaved_shards(c: DecoderConfig) -> Fix:
    """Return functions that reorder a fused projection from the file's order (shards of queries, values and keys, whose
    rotary positions pair elements 2 i and 2 i + 1 of a head) to Onward's (all queries, all keys, all values), and
    back."""
    turned, width = require(c.position, Rotary).rope_dim(c.d_head), c.n_heads * c.d_head // SHARDS
    neighbors = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, c.d_head)]  # as for GPT-J
    order = [
        3 * width * (row // width) + width * SHARD[part] + row % width
        for part in "qkv"
        for head in range(0, SHARDS * width, c.d_head)
        for row in [head + (element if part == "v" else neighbors[element]) for element in range(c.d_head)]
    ]
    back = sorted(range(len(order)), key=order.__getitem__)
    return lambda t: t[order], lambda t: t[back]


def names(c: DecoderConfig) -> Iterator[Row]:
    fix = interleaved_shards(c)
    for their, our, *_ in gptj.names(c):
        if not str(their).endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            yield their, our
    for i in range(c.n_layers):
        yield f"transformer.h.{i}.attn.qkv_proj.weight", [f"blocks.{i}.attn.{part}.weight" for part in "qkv"], fix
