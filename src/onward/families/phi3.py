"""Phi 3 and 4: Llama with fused projections, and LongRoPE where the context is long (Abdin et al. 2024)."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, RMSNorm, Rotary, SelfAttention
from onward.config.scaling import LongRoPEScaling
from onward.families import ACTIVATIONS, HF, Inexpressible, Row, activation, llama, only, require, sizes, with_defaults
from onward.families._rope import rope, rope_table, rotary
from onward.families.llama import shape

ARCHITECTURES = {"phi3": "Phi3ForCausalLM"}
SOURCE = "arXiv:2404.14219, arXiv:2412.08905, arXiv:2503.01743"
BASE = "model."
IGNORED = ""
# fmt: off
MINI_128K = {
    "type": "longrope",
    "short_factor": [
        1.1, 1.1, 1.1, 1.3000000000000003, 1.3500000000000003, 1.3500000000000003, 1.4000000000000004,
        1.5500000000000005, *[2.000000000000001] * 17, *[2.0500000000000007] * 6, 2.1000000000000005,
        2.1000000000000005, 2.1500000000000004, *[2.25] * 5, 2.3999999999999995, 2.4499999999999993, 2.499999999999999,
        2.6999999999999984, 2.6999999999999984, 2.7499999999999982, 2.799999999999998, 2.8999999999999977,
        3.049999999999997,
    ],
    "long_factor": [
        1.0700000524520874, 1.1200000047683716, 1.149999976158142, 1.4199999570846558, 1.5699999332427979,
        1.7999999523162842, 2.129999876022339, 2.129999876022339, 3.009999990463257, 5.910000324249268,
        6.950000286102295, 9.070000648498535, 9.930000305175781, 10.710000038146973, 11.130000114440918,
        14.609999656677246, 15.409998893737793, 19.809999465942383, 37.279998779296875, 38.279998779296875,
        38.599998474121094, 40.12000274658203, 46.20000457763672, 50.940006256103516, 53.66000747680664,
        54.9373893737793, 56.89738845825195, 57.28738784790039, 59.98738479614258, 60.86738586425781,
        60.887386322021484, 61.71739196777344, 62.91739273071289, 62.957393646240234, 63.41739273071289,
        63.8173942565918, 63.83739471435547, 63.897396087646484, 63.93739700317383, 64.06739807128906,
        64.11434936523438, 64.12435150146484, 64.15435028076172, 64.19435119628906, 64.24435424804688,
        64.57435607910156, 64.69000244140625, 64.76000213623047,
    ],
}
PHI4_MINI = {
    "type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [
        1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
        2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
        6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
        16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
        32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
    ],
}
# fmt: on
LONG = {"max_position_embeddings": 131_072, "sliding_window": 262_144}
MEDIUM = shape(5120, 17_920, 40, 40, 10)
PRESETS: dict[str, HF] = {
    "phi-3-mini": {"sliding_window": 2047},
    "phi-3-mini-128k": LONG | {"rope_scaling": MINI_128K},
    "phi-3-medium": MEDIUM | {"sliding_window": 2047},
    "phi-4": MEDIUM
    | {
        "vocab_size": 100_352,
        "max_position_embeddings": 16_384,
        "original_max_position_embeddings": 16_384,
        "rope_theta": 250_000.0,
        "pad_token_id": 100_349,
    },
    "phi-4-mini": LONG
    | {
        "vocab_size": 200_064,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.75,
        "rope_scaling": PHI4_MINI,
        "tie_word_embeddings": True,
    },
}
ANCESTORS = {
    "phi-3": "llama-2-7b",
    "phi-3-mini-128k": "phi-3-mini",
    "phi-3-medium": "phi-3-mini",
    "phi-4": "phi-3-medium",
    "phi-4-mini": "phi-3-mini-128k",
}
SIZES = llama.SIZES | {"dropout": ("resid_pdrop", 0.0)}
DEFAULTS = {
    "vocab_size": 32_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
LAYER = {
    "input_layernorm": ["attn_norm"],
    "self_attn.qkv_proj": ["attn.q", "attn.k", "attn.v"],
    "self_attn.o_proj": ["attn.out"],
    "post_attention_layernorm": ["mlp_norm"],
    "mlp.gate_up_proj": ["mlp.gate", "mlp.up"],
    "mlp.down_proj": ["mlp.down"],
}


def config(hf: HF) -> DecoderConfig:
    only(hf, full_attn_mod=1, interpolate_factor=1)  # keys of Phi 4 mini
    table = rope_table(hf)
    if table.get("rope_type", table.get("type")) in ("su", "yarn"):  # names of LongRoPE in the first release
        table["rope_type"] = "longrope"
    keys = with_defaults({"rope_parameters": table, "rope_scaling": None}, with_defaults(hf, DEFAULTS))
    context, original = keys["max_position_embeddings"], keys["original_max_position_embeddings"]
    act: Any = hf.get("hidden_act", "silu")
    return DecoderConfig(
        **sizes(keys, SIZES),
        position=rotary(keys, context=context, original=original),
        attention=SelfAttention(window=hf.get("sliding_window") or 0),
        mlp=Gated(act=ACTIVATIONS.get(act, act)),
        norm=RMSNorm(eps=hf.get("rms_norm_eps", 1e-5)),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    match require(c.position, Rotary).scaling:
        case None:
            original = c.context_length
        case LongRoPEScaling(original=original):
            pass
        case _:
            raise Inexpressible("Phi 3 supports no rotary scaling except LongRoPE")
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        **rope(c.position),
        "original_max_position_embeddings": original,
        "sliding_window": require(c.attention, SelfAttention).window or None,
        "embd_pdrop": c.dropout,
        "attention_dropout": c.dropout,
        "hidden_act": activation(c.mlp),
        "rms_norm_eps": require(c.norm, RMSNorm).eps,
        **({"pad_token_id": None} if c.vocab_size <= 32_000 else {}),  # the default id would be outside the vocabulary
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "model.embed_tokens.weight", "embed.weight"
    yield "model.norm.weight", "norm.weight"
    yield "lm_head.weight", "head.weight"
    for i in range(c.n_layers):
        for their, our in LAYER.items():
            yield f"model.layers.{i}.{their}.weight", [f"blocks.{i}.{name}.weight" for name in our]
