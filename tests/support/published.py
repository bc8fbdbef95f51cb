"""Folders of models as on the hub: the same config.json keys, tensor names, dtypes and files, with small random
weights. `RELEASES` is the table of releases; `release` writes the folder of one, `assert_read_as_in_transformers`
compares the model that Onward reads from this folder with that of transformers."""

import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from onward.base.files import write_json
from onward.checkpoint.load import load_model
from onward.checkpoint.names import LeftOut

from support.parity import assert_same_logits, stir, tensors

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.02,
    "hidden_act": "silu",
    "use_cache": True,
}
FILE = {"torch_dtype": "bfloat16", "transformers_version": "4.51.0"}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "patch_size": 14, "hidden_act": "silu"}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 14}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
DEEPSEEK = SIZES | {
    **EXPERTS,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "seq_aux": True,
    "aux_loss_alpha": 0.001,
    "pretraining_tp": 1,
    "ep_size": 1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
}
YARN = {
    "type": "yarn",
    "factor": 4,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 8,
}


def prediction(layer: int, width: int = 32, vocabulary: int = 96) -> dict[str, list[int]]:
    """Some tensors of a multi-token prediction layer, numbered after the model's own layers."""
    names = {"embed_tokens.weight": [vocabulary, width], "shared_head.head.weight": [vocabulary, width]}
    names |= {f"{norm}.weight": [width] for norm in ("enorm", "hnorm", "shared_head.norm", "input_layernorm")}
    names |= {"eh_proj.weight": [width, 2 * width], "self_attn.o_proj.weight": [width, width]}
    return {f"model.layers.{layer}.{name}": shape for name, shape in names.items()}


@dataclass(frozen=True)
class Release:
    """A release on the hub; `names` are pairs (pattern, replacement) from transformers' tensor names to the hub's."""

    config: dict[str, Any]  # config.json
    family: str  # model_type of the family that reads it
    names: tuple[tuple[str, str], ...] = ()
    transposed: str = ""  # pattern of the names of stacks that are stored transposed
    extra: dict[str, list[int]] = field(default_factory=dict)  # tensors that Onward does not read
    shards: int = 2
    others: tuple[str, ...] = ()  # further files with weights in another format
    reference: str = ""  # class of transformers, if it differs from the class in config.json


MODERN = (r"^model\.language_model\.", "language_model.model."), (r"^lm_head\.", "language_model.lm_head.")
ENCODERS = (r"^model\.(vision_tower|vision_model|multi_modal_projector|visual)\.", r"\1.")
RELEASES = {
    "Qwen/Qwen2.5-VL-7B-Instruct": Release(
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "attention_dropout": 0.0,
            "bos_token_id": 90,
            "eos_token_id": 91,
            "vision_start_token_id": 92,
            "vision_end_token_id": 93,
            "vision_token_id": 94,
            "image_token_id": 95,
            "video_token_id": 89,
            "max_window_layers": 28,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "sliding_window": 32_768,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
            "vision_config": QWEN_VISION
            | {
                "out_hidden_size": 32,
                "window_size": 28,
                "fullatt_block_indexes": [0],
                "in_chans": 3,
                "hidden_act": "silu",
            },
            **SIZES,
            **FILE,
        },
        "qwen2",
        names=((r"^model\.language_model\.", "model."), ENCODERS),
    ),
    "google/gemma-3-4b-it": Release(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "boi_token_index": 93,
            "eoi_token_index": 94,
            "eos_token_id": [1, 90],
            "image_token_index": 95,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 4,
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_hidden_layers": 3,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 8,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "vocab_size": 96,
            },
            "vision_config": VISION | {"image_size": 56, "model_type": "siglip_vision_model", "num_hidden_layers": 1},
            **FILE,
        },
        "gemma3_text",
        names=(*MODERN, ENCODERS),
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": Release(
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "image_token_index": 10,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "text_config": SIZES
            | {
                "model_type": "mistral",
                "attention_dropout": 0.0,
                "head_dim": 12,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e9,
                "sliding_window": None,
            },
            "vision_config": VISION
            | {"model_type": "pixtral", "num_hidden_layers": 1, "head_dim": 8, "image_size": 56},
            **FILE,
        },
        "mistral",
        names=(*MODERN, ENCODERS),
        shards=3,
        others=("consolidated.safetensors", "params.json"),
    ),
    "meta-llama/Llama-3.2-11B-Vision-Instruct": Release(
        {
            "architectures": ["MllamaForConditionalGeneration"],
            "model_type": "mllama",
            "image_token_index": 96,
            "text_config": SIZES
            | {
                "model_type": "mllama_text_model",
                "num_hidden_layers": 5,
                "cross_attention_layers": [1, 3],
                "dropout": 0,
                "bos_token_id": 90,
                "eos_token_id": [91, 92],
                "pad_token_id": 93,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500_000.0,
                "tie_word_embeddings": False,
                "rope_scaling": {
                    "factor": 8.0,
                    "high_freq_factor": 4.0,
                    "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 16,
                    "rope_type": "llama3",
                },
            },
            "vision_config": {
                "model_type": "mllama_vision_model",
                "hidden_size": 16,
                "intermediate_size": 24,
                "attention_heads": 2,
                "num_hidden_layers": 1,
                "num_global_layers": 1,
                "image_size": 28,
                "patch_size": 14,
                "intermediate_layers_indices": [0],
                "vision_output_dim": 32,
            },
            **FILE,
        },
        "llama",
        names=(*MODERN, ENCODERS),
    ),
    "zai-org/GLM-4.5-Air": Release(
        SIZES
        | {
            **EXPERTS,
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "head_dim": 8,
            "partial_rotary_factor": 0.5,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 1_000_000,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
            "tie_word_embeddings": False,
            **FILE,
        },
        "glm4_moe",
        extra=prediction(3),
    ),
    "deepseek-ai/DeepSeek-V3": Release(
        DEEPSEEK
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "n_group": 2,
            "topk_group": 1,
            "num_nextn_predict_layers": 1,
            "rope_scaling": YARN,
            "rope_theta": 10_000,
            **FILE,
        },
        "deepseek_v3",
        extra=prediction(3),
    ),
    "moonshotai/Kimi-K2-Instruct": Release(
        DEEPSEEK
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "routed_scaling_factor": 2.827,
            "rope_scaling": YARN,
            "rope_theta": 50_000.0,
            **FILE,
        },
        "kimi_k2",
        reference="DeepseekV3ForCausalLM",
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": Release(
        {
            "architectures": ["Qwen3VLMoeForConditionalGeneration"],
            "model_type": "qwen3_vl_moe",
            "image_token_id": 95,
            "video_token_id": 94,
            "vision_start_token_id": 93,
            "vision_end_token_id": 92,
            "tie_word_embeddings": False,
            "text_config": SIZES
            | {
                **EXPERTS,
                "model_type": "qwen3_vl_moe_text",
                "attention_bias": False,
                "attention_dropout": 0.0,
                "bos_token_id": 90,
                "eos_token_id": 91,
                "decoder_sparse_step": 1,
                "head_dim": 8,
                "mlp_only_layers": [],
                "num_experts": 6,
                "rms_norm_eps": 1e-6,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default"},
                "rope_theta": 5_000_000,
            },
            "vision_config": QWEN_VISION
            | {"model_type": "qwen3_vl_moe", "out_hidden_size": 32, "deepstack_visual_indexes": [0], "in_channels": 3},
            "transformers_version": "4.57.0.dev0",
        },
        "qwen3_moe",
        transposed=r"\.experts\.(gate_up|down)_proj$",
    ),
    "MiniMaxAI/MiniMax-M2": Release(
        SIZES
        | {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "attention_dropout": 0.0,
            "attn_type_list": [1, 1, 1],
            "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
            "head_dim": 8,
            "rotary_dim": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "mtp_transformer_layers": 1,
            "num_mtp_modules": 3,
            "qk_norm_type": "per_layer",
            "rms_norm_eps": 1e-6,
            "rope_theta": 5_000_000,
            "router_aux_loss_coef": 0.001,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "tie_word_embeddings": False,
            "use_mtp": True,
            "use_qk_norm": True,
            "use_routing_bias": True,
            "transformers_version": "4.46.1",
        },
        "minimax_m2",
        shards=4,
    ),
}


def release(name: str, folder: Path) -> None:
    """Write the folder of a release."""
    found = RELEASES[name]
    folder.mkdir()
    kind = getattr(transformers, found.reference or found.config["architectures"][0])
    model_type = kind.config_class.model_type
    hf = kind.config_class.from_dict({**found.config, "model_type": model_type})
    stir(kind(hf)).save_pretrained(folder)
    weights = {renamed(their, found): tensor for their, tensor in tensors(folder).items()}
    weights |= {extra: torch.randn(shape) for extra, shape in found.extra.items()}
    for path in folder.iterdir():
        path.unlink()
    files = [f"model-{i:05}-of-{found.shards:05}.safetensors" for i in range(1, found.shards + 1)]
    placed = {their: files[i * found.shards // len(weights)] for i, their in enumerate(sorted(weights))}
    for file in files:
        own = {their: stored(their, weights[their], found) for their in weights if placed[their] == file}
        save_file(own, folder / file, {"format": "pt"})
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": 0}, "weight_map": placed})
    write_json(folder / "config.json", found.config)
    for other in found.others:
        (folder / other).write_bytes(b"in another format")


def renamed(name: str, found: Release) -> str:
    for pattern, replacement in found.names:
        name = re.sub(pattern, replacement, name)
    return name


def stored(name: str, tensor: torch.Tensor, found: Release) -> torch.Tensor:
    """A tensor as stored on the hub: in bf16 except for routing biases, and transposed if `found` requires it."""
    turned = bool(found.transposed and re.search(found.transposed, name))
    dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
    return (tensor.mT if turned else tensor).to(dtype).contiguous()


def assert_read_as_in_transformers(name: str, folder: Path) -> None:
    """Check that Onward's logits equal those of transformers for the same folder, and that Onward warns of ignored
    tensors."""
    found = RELEASES[name]
    kind = getattr(transformers, found.reference or found.config["architectures"][0])
    hf = kind.config_class.from_dict({**found.config, "model_type": kind.config_class.model_type})
    theirs = kind.from_pretrained(folder, config=hf, dtype=torch.float32).eval()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours, keys = load_model(folder, torch.float32)
    parts = bool(found.extra) + (keys["model_type"] != found.config["model_type"])
    assert [warning.category for warning in said] == [LeftOut] * parts, [str(warning.message) for warning in said]
    assert keys["model_type"] == found.family
    theirs.config.vocab_size = SIZES["vocab_size"]
    assert_same_logits(ours, theirs)
