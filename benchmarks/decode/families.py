"""Families that transformers also implements, with random weights: tokens per second of both libraries."""

import importlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

import onward
from benchmarks.decode.bench import Bench, decode_speeds
from benchmarks.decode.models import PRECISIONS, Files, prompt
from benchmarks.decode.peers import Onward, Transformers
from benchmarks.decode.tables import Cell, Table, in_turns
from onward.compiled.interface import NotCompilable
from onward.compiled.steps import compile_step
from onward.families import read
from onward.planning.parameters import parameters

SIZES = {"vocab_size": 32_000, "hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12}
GATED = {"intermediate_size": 2048, "num_key_value_heads": 4, "head_dim": 64}
PLAIN = {"intermediate_size": 3072}
LOCAL = {**GATED, "intermediate_size": 384, "num_local_experts": 8, "num_experts_per_tok": 2}
EXPERTS = {**GATED, "moe_intermediate_size": 384, "num_experts": 8, "num_experts_per_tok": 2}
HEADS = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64, "head_dim": 32, "num_key_value_heads": 12}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"intermediate_size": 2048, "moe_intermediate_size": 384, "kv_lora_rank": 128, "q_lora_rank": 256}
DEEPSEEK = {**LATENT, **HEADS, **ROUTED}
GLM = {**GATED, **ROUTED, "moe_intermediate_size": 384, "n_group": 1, "topk_group": 1}
DELTA = {
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
MAMBA = {"mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
BY_FOUR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {  # keys of config.json besides SIZES; all others have transformers' defaults
    "afmoe": {**GATED, "moe_intermediate_size": 384, "num_experts": 8, "num_experts_per_tok": 2, "num_dense_layers": 1},
    "apertus": GATED,
    "bamba": {**GATED, **MAMBA, "attn_layer_indices": [3, 7]},
    "bloom": {},
    "cohere": GATED,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": {**DEEPSEEK, "n_group": 1, "topk_group": 1},
    "ernie4_5_moe": {**GATED, "moe_intermediate_size": 384, "moe_num_experts": 8, "moe_k": 2},
    "exaone4": GATED,
    "falcon": {"num_kv_heads": 4, "new_decoder_architecture": True},
    "falcon_h1": {**GATED, **MAMBA, "mamba_d_ssm": 1536},
    "gemma": GATED,
    "gemma2": GATED,
    "gemma3_text": GATED,
    "gemma4_text": {**GATED, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 32_000},
    "glm4": GATED,
    "glm4_moe": GLM,
    "gpt2": {},
    "gpt_neo": {},
    "gpt_neox": PLAIN,
    "gpt_oss": LOCAL,
    "gptj": {"rotary_dim": 32},
    "granite": GATED,
    "hunyuan_v1_dense": GATED,
    "lfm2": {**GATED, "layer_types": ["conv", "conv", "full_attention", "conv"] * 2, "block_auto_adjust_ff_dim": False},
    "llama": GATED,
    "llama4_text": {**LOCAL, "intermediate_size_mlp": 2048},
    "mamba2": {"num_heads": 24, "head_dim": 64, "state_size": 64, "n_groups": 1},
    "minimax_m2": LOCAL,
    "ministral3": GATED,
    "mistral": GATED,
    "mixtral": LOCAL,
    "mpt": {},
    "nanochat": {**GATED, "intermediate_size": 3072},
    "nemotron": GATED,
    "olmo2": GATED,
    "olmo3": GATED,
    "openai-gpt": {},
    "opt": {"ffn_dim": 3072, "word_embed_proj_dim": 768},
    "phi": PLAIN,
    "phi3": GATED,
    "qwen2": GATED,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 384},
    "qwen3": GATED,
    "qwen3_5_text": {**GATED, **DELTA, "layer_types": BY_FOUR},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, **DELTA, "layer_types": BY_FOUR, "shared_expert_intermediate_size": 384},
    "seed_oss": GATED,
    "smollm3": GATED,
    "stablelm": {"intermediate_size": 2048, "num_key_value_heads": 4},
    "starcoder2": {**PLAIN, "num_key_value_heads": 4},
}
TINY = {"vocab_size": 96, "hidden_size": 384, "num_hidden_layers": 2, "word_embed_proj_dim": 384}
TINY |= {"mamba_n_heads": 12, "num_heads": 12, "mamba_d_ssm": 768}  # twice the hidden size in total


@dataclass(frozen=True)
class Published(Files):
    """A model of transformers with random weights, written by transformers."""

    hf: Any = None

    def folder(self, dtype: torch.dtype) -> Path:
        folder = self.root / str(dtype).removeprefix("torch.")
        if not folder.exists():
            torch.manual_seed(0)
            automatic = importlib.import_module("transformers").AutoModelForCausalLM
            automatic.from_config(self.hf, dtype=dtype).save_pretrained(folder)
        return folder


def config_of(name: str, tiny: bool) -> Any:
    """The config of a family in transformers. Its special token ids are removed, so that no answer ends early."""
    given = {**SIZES, **FAMILIES[name]}
    if tiny:
        given |= {key: value for key, value in TINY.items() if key in given}
        if "layer_types" in given:
            given["layer_types"] = given["layer_types"][-given["num_hidden_layers"] :]
    if name == "gpt_neo":
        given["attention_types"] = [[["global", "local"], given["num_hidden_layers"] // 2]]
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return importlib.import_module("transformers").CONFIG_MAPPING[name](**given, **ids)


def refusal(model: onward.Decoder) -> str:
    """The reason why a decoding step of one row cannot be compiled; "" if it can."""
    try:
        compile_step(model, onward.KVCache(model.config, 1, 64, dtype=model.dtype), (1, 1))
    except NotCompilable as reason:
        return str(reason)
    return ""


def families(bench: Bench) -> Table:
    """Tokens per second after the first one, for one row of each family, compared with transformers."""
    length, new = (8, 4) if bench.sizes.name == "tiny" else (64, 64)
    columns = ["family", "M parameters", "precision", "Onward", "transformers", "ratio", "not compiled because of"]
    table = Table(f"Families: tokens/s, prompt {length}, {new} new tokens, batch 1", columns)
    if "transformers" in bench.absent:
        return table
    importlib.import_module("transformers").utils.logging.set_verbosity_error()
    for name in bench.families or FAMILIES:
        hf = config_of(name, bench.sizes.name == "tiny")
        config = read(hf.to_dict())[1]
        for precision in (name for name in bench.precisions if not PRECISIONS[name].quantize):
            with TemporaryDirectory(dir=bench.root) as root:
                files, tokens = Published(Path(root), config, hf=hf), prompt(config, length)
                ours, theirs = Onward(files, precision, rows=1), Transformers(files, precision)
                runs = in_turns(
                    {peer.name: partial(peer.generate, [tokens], new) for peer in (ours, theirs)}, bench.rounds
                )
            speeds = {peer: median(found) for peer, found in decode_speeds(runs).items()}
            ratio = speeds["onward"] / speeds["transformers"]
            row: list[Cell] = [parameters(config) / 1e6, precision, speeds["onward"], speeds["transformers"], ratio]
            table.rows.append([name, *row, refusal(ours.model)])
    return table
