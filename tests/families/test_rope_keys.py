"""The two tables of rotary positions in a config.json, rope_parameters and rope_scaling, have the meaning that
transformers gives them, separately and together."""

import json
import random
import warnings
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from onward import DecoderConfig, UserError
from onward.config.decoder import LatentAttention, Rotary, at
from onward.families import read
from onward.model.frequencies import scaled_frequencies

from support.families import CASES

TYPES = {hf.model_type: hf for hf in reversed(CASES.values()) if getattr(hf, "rope_parameters", None)}
LAYERED = {kind for kind, hf in TYPES.items() if "full_attention" in hf.rope_parameters}
# families that refuse rope_scaling
WITHOUT_SCALING = {"mellum", "cohere_compass_text", "laguna", "mimo_v2_flash", "beam"}
WITHOUT_SCALING |= {"cohere2_moe", "gemma4_text", "gemma4_unified_text"}
WITH_QUERIES = {"mistral4", "ministral3"}  # families whose tables also have keys for the scale of queries
DRAWS = [(kind, seed) for kind in TYPES for seed in range(6)]
DRAWS = [(kind, seed) for kind, seed in DRAWS if kind not in WITHOUT_SCALING or seed % 3 == 0]
LENGTHS = 1, 40  # within and beyond every original context below


def table(some: random.Random, kind: str, pairs: int) -> dict[str, Any]:
    """A random table for one kind of scaling, with some of its optional keys."""
    draw = some.uniform
    required: dict[str, dict[str, Any]] = {
        "linear": {"factor": draw(1, 8)},
        "dynamic": {"factor": draw(1, 8)},
        "yarn": {"factor": draw(1, 8)},
        "llama3": {"factor": draw(1, 8), "low_freq_factor": draw(0.5, 1), "high_freq_factor": draw(2, 4)},
        "longrope": {name: [draw(1, 4) for _ in range(pairs)] for name in ("short_factor", "long_factor")},
    }
    extras = {"original_max_position_embeddings": some.randint(4, 16), "attention_factor": draw(0.5, 2)}
    extras |= {"beta_fast": draw(4, 64), "beta_slow": draw(0.1, 2)}
    allowed = {
        "yarn": [*extras],
        "llama3": ["original_max_position_embeddings"],
        "longrope": ["original_max_position_embeddings", "attention_factor"],
    }.get(kind, [])
    chosen = {key: extras[key] for key in allowed if some.random() < 0.5}
    return {"rope_type": kind, **required[kind], **chosen}


def drawn(model_type: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config.json with one or both of the tables, and an equivalent one for transformers: transformers ignores the
    theta of rope_parameters if rope_scaling exists, so there rope_scaling contains the theta."""
    some = random.Random(f"{model_type} {seed}")
    hf = json.loads(json.dumps(TYPES[model_type].to_dict()))
    hf |= {"position_embedding_type": "rope"} if model_type == "granitemoehybrid" else {}
    config = read(hf)[1]
    hf = {k: v for k, v in hf.items() if not k.startswith("rope") and not k.endswith("rope_theta")}
    hf |= {"head_dim": config.d_head} if hf.get("head_dim", 0) is None else {}
    part = at(config.attention, 0)
    rotated = part.d_rope if isinstance(part, LatentAttention) else rotary(config).rope_dim(config.d_head)
    kinds = {"phi3": ["longrope"], "phimoe": ["yarn", "longrope"]}.get(
        model_type, ["linear", "yarn", "llama3", "longrope"]
    )
    kinds += ["dynamic"] if rotated > 2 and model_type not in ("phi3", "phimoe") else []
    old, new = (table(some, some.choice(kinds), rotated // 2) for _ in range(2))
    if model_type in LAYERED | WITHOUT_SCALING:  # newer classes require this key
        new.setdefault("original_max_position_embeddings", 8)
    for one in old, new:
        if model_type in WITH_QUERIES:
            one |= {
                "original_max_position_embeddings": some.randint(4, 16),
                "llama_4_scaling_beta": some.uniform(0.1, 1),
            }
        if model_type == "mistral4" and isinstance(part, LatentAttention):
            one["partial_rotary_factor"] = part.d_rope / (part.d_nope + part.d_rope)
        if model_type == "phimoe":
            one |= dict.fromkeys(("short_mscale", "long_mscale"), some.uniform(0.5, 2))
    theta, where = some.uniform(100, 1000), seed % 3  # 0: the new key, 1: the old key, 2: both
    parameters = {"rope_theta": theta, **some.choice([new, {"rope_type": "default"}] if where == 2 else [new])}
    if (fraction := rotary(config).fraction) != 1.0:
        parameters["partial_rotary_factor"] = fraction
        if model_type not in ("laguna", "mimo_v2_flash"):  # these families have the key only in the tables
            hf["rotary_pct" if model_type == "gpt_neox" else "partial_rotary_factor"] = fraction
    theirs = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters} | old
    if model_type in LAYERED:
        parameters = {"full_attention": parameters, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
    first, second = {"rope_parameters": parameters}, {"rope_scaling": old}
    return (
        hf | [first, second, first | second][where],
        hf | [first, second, first | {"rope_scaling": theirs}][where],
    )


def rotary(config: DecoderConfig) -> Rotary:
    """The rotary positions of a layer, preferably one without a window."""
    layers = sorted(range(config.n_layers), key=lambda layer: getattr(at(config.attention, layer), "window", 0))
    return next(part for layer in layers if isinstance(part := at(config.position, layer), Rotary))


def frequencies(part: Rotary, pairs: int, length: int) -> torch.Tensor:
    plain = part.theta ** (-torch.arange(pairs) / pairs)
    if part.scaling is None:
        return plain
    return scaled_frequencies(part.scaling, plain, part.theta, torch.full((1, 1, 1), length)).flatten()


@pytest.mark.parametrize(("model_type", "seed"), DRAWS)
@pytest.mark.filterwarnings("ignore")
def test_tables_of_rotary_positions_mean_what_they_do_to_transformers(model_type: str, seed: int) -> None:
    hf, for_transformers = drawn(model_type, seed)
    theirs = CONFIG_MAPPING[model_type].from_dict(for_transformers)
    layer_type = "full_attention" if model_type in LAYERED else None
    parameters = theirs.rope_parameters[layer_type] if layer_type else theirs.rope_parameters
    ours = rotary(read(hf)[1])
    assert ours.theta == parameters["rope_theta"]
    if parameters["rope_type"] == "default":
        assert ours.scaling is None
        return
    for length in LENGTHS:
        compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        wanted, magnitude = compute(theirs, "cpu", seq_len=length, layer_type=layer_type)
        magnitude = parameters.get("short_mscale", magnitude)  # phimoe's model uses short_mscale instead
        torch.testing.assert_close(frequencies(ours, len(wanted), length), wanted, rtol=1e-5, atol=0)
        assert (ours.scaling.magnitude if ours.scaling else 1.0) == pytest.approx(magnitude)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
SIDE_BY_SIDE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (DEFAULT, YARN, "rope_type and factor"),
    (YARN | {"rope_theta": 1e6}, YARN, ""),
    (YARN, {**YARN, "type": "yarn"}, ""),
    (YARN | {"factor": 2.0}, YARN, "factor"),
    (YARN | {"beta_fast": 64.0}, YARN, "beta_fast"),
    ({}, YARN, ""),
    (DEFAULT, {"type": "default"}, ""),
    ({"full_attention": DEFAULT, "sliding_attention": DEFAULT}, YARN, "rope_type and factor"),
]


@pytest.mark.parametrize(("parameters", "scaling", "differing"), SIDE_BY_SIDE)
def test_tables_that_disagree_are_warned_of(
    parameters: dict[str, Any], scaling: dict[str, Any], differing: str
) -> None:
    model_type = "gemma3_text" if "full_attention" in parameters else "llama"
    hf = {"model_type": model_type, "rope_parameters": parameters, "rope_scaling": scaling}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read(hf)
    assert [f"differs from rope_parameters in {differing}" in str(w.message) for w in caught] == [True] * bool(
        differing
    )


@pytest.mark.parametrize("model_type", sorted(WITHOUT_SCALING))
def test_rope_scaling_is_refused_where_transformers_does_not_read_it(model_type: str) -> None:
    with pytest.raises(UserError, match="has rope_scaling "):
        read(TYPES[model_type].to_dict() | {"rope_scaling": YARN})


def test_table_for_each_type_of_layers_is_refused_by_a_family_with_one_for_all() -> None:
    tables = {"full_attention": DEFAULT, "sliding_attention": DEFAULT}
    with pytest.raises(UserError, match="has a table full_attention "):
        read({"model_type": "llama", "rope_parameters": tables, "rope_scaling": YARN})


def test_magnitude_of_phimoe_is_refused_without_a_kind_that_has_one() -> None:
    table = {"rope_type": "linear", "factor": 2.0, "short_mscale": 1.2, "long_mscale": 1.2}
    with pytest.raises(UserError, match=r"has short_mscale 1.2 and rope_type 'linear'"):
        read({"model_type": "phimoe", "rope_parameters": table})


def test_factor_without_its_kind_is_refused() -> None:
    with pytest.raises(UserError, match="factor for rotary positions without their rope_type"):
        read({"model_type": "llama", "rope_scaling": {"factor": 8.0}})


def test_unknown_keys_of_the_tables_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"ignores: 'rope_scaling\.attn_factor'$"):
        read({"model_type": "llama", "rope_scaling": YARN | {"attn_factor": 2.0, "finetuned": True}})
