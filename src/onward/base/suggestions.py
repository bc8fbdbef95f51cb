"""Suggestions for an unknown name: known names with the same meaning, last component or beginning, or with similar
letters."""

import difflib
import re
from collections.abc import Iterable
from functools import partial

SYNONYMS: dict[str, str] = {  # names in other libraries -> the last component of our names
    **dict.fromkeys(("rope", "roformer"), "rotary"),
    **dict.fromkeys(("absolute", "wpe"), "learned"),
    **dict.fromkeys(("sin", "fixed"), "sinusoidal"),
    **dict.fromkeys(("nope", "no"), "none"),
    **dict.fromkeys(("mha", "gqa", "mqa", "causal", "softmax", "full"), "self"),
    "mla": "latent",
    **dict.fromkeys(("swiglu", "geglu", "glu"), "gated"),
    **dict.fromkeys(("mlp", "ffn", "dense"), "plain"),
    **dict.fromkeys(("moe", "mixture"), "experts"),
    **dict.fromkeys(("experts", "num_experts", "n_experts", "num_local_experts", "n_routed_experts"), "count"),
    **dict.fromkeys(("per_token", "experts_per_token", "num_experts_per_tok", "active"), "top_k"),
    **dict.fromkeys(("rmsnorm", "rms_norm"), "rms"),
    **dict.fromkeys(("layernorm", "layer_norm", "ln"), "layer"),
    # sizes
    **dict.fromkeys(("hidden_size", "n_embd", "width", "dim", "embed_dim"), "d_model"),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "hidden_dim"), "d_ff"),
    **dict.fromkeys(("layers", "num_layers", "n_layer", "num_hidden_layers", "depth"), "n_layers"),
    **dict.fromkeys(("head", "heads", "num_heads", "n_head", "num_attention_heads"), "n_heads"),
    **dict.fromkeys(("kv_heads", "num_key_value_heads"), "n_kv_heads"),
    **dict.fromkeys(("head_dim", "head_size"), "d_head"),
    **dict.fromkeys(
        ("block_size", "seq_len", "max_seq_len", "seq_length", "ctx", "n_ctx", "context"), "context_length"
    ),
    "max_position_embeddings": "context_length",
    **dict.fromkeys(("vocab", "vocabulary"), "vocab_size"),
    **dict.fromkeys(("sliding_window", "local"), "window"),
    **dict.fromkeys(("rope_theta", "base"), "theta"),
    "tie_word_embeddings": "tied",
    # training
    **dict.fromkeys(("lr", "max_lr"), "learning_rate"),
    **dict.fromkeys(("batch", "bs", "micro_batch_size"), "batch_size"),
    **dict.fromkeys(("grad_accum", "gradient_accumulation_steps", "accumulate"), "accumulation"),
    **dict.fromkeys(("iters", "max_iters", "max_steps", "num_steps", "iterations"), "steps"),
    **dict.fromkeys(("num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clip"), "clip"),
    "wd": "weight_decay",
    "optim": "optimizer",
    **dict.fromkeys(("scheduler", "lr_scheduler"), "schedule"),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), "warmup"),
    **dict.fromkeys(("dtype", "fp16", "bf16", "fp32", "amp"), "precision"),
    **dict.fromkeys(("val", "eval", "valid", "test"), "validation"),
    **dict.fromkeys(("eval_interval", "eval_every", "eval_steps"), "validate_every"),
    **dict.fromkeys(("output", "output_dir", "o", "save", "dir"), "out"),
    **dict.fromkeys(("data", "dataset", "input"), "sources"),
    **dict.fromkeys(("continue", "restart"), "resume"),
    "gradient_checkpointing": "recompute",
    "ema": "average",
    **dict.fromkeys(("duration", "minutes", "seconds"), "time"),
    # generation
    **dict.fromkeys(("temp", "t", "greedy", "do_sample"), "temperature"),
    **dict.fromkeys(("max_tokens", "max_length", "length", "num_tokens", "n_predict", "tokens"), "max_new_tokens"),
    **dict.fromkeys(("stop_sequences", "stop_strings", "eos"), "stop"),
    **dict.fromkeys(("num_return_sequences", "best_of", "num_samples", "samples"), "n"),
    **dict.fromkeys(("num_beams", "beam", "beam_size"), "beams"),
    **dict.fromkeys(("repeat_penalty", "rep_penalty"), "repetition_penalty"),
    **dict.fromkeys(("schema", "grammar", "json"), "json_schema"),
    "arithmetic": "number",  # rewards
    **dict.fromkeys(("nucleus", "p"), "top_p"),
    "k": "top_k",
    # weights
    **{f"{name}_proj": name for name in ("q", "k", "v", "gate", "up", "down")},
    **dict.fromkeys(("o_proj", "o", "c_proj"), "out"),
    "lm_head": "head",
    **dict.fromkeys(("draft_model", "assistant_model"), "draft"),
    **dict.fromkeys(("bits", "int4", "int8", "load_in_4bit", "load_in_8bit"), "quantize"),
}
OTHERWISE = {  # further meanings, for commands without the option in SYNONYMS
    **dict.fromkeys(("context", "ctx", "max_length", "max_seq_length"), ("context", "context_length", "length")),
    **dict.fromkeys(("tokens", "num_tokens"), ("new", "completion_length", "steps")),
    **dict.fromkeys(("bits", "int4", "int8", "load_in_4bit", "load_in_8bit"), ("dtype", "precision", "to")),
}


MANY = 50  # a message does not list this many known names or more


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: "did you mean X?" or, if none is close, "choose from ..."."""
    known = sorted(filter(None, known))  # "" is a choice, but never a typed word
    if close := closest(name, known):
        return f"did you mean {close}?"
    return f"choose from {', '.join(known)}" if len(known) <= MANY else f"none of {len(known)} known names is similar"


def closest(name: str, known: Iterable[str]) -> str:
    """The known name with the same meaning, beginning or most letters as `name`; "" if none is close."""
    known = sorted(filter(None, known))
    like = partial(difflib.get_close_matches, name, n=1, cutoff=0.5 if len(known) <= MANY else 0.6)
    return next(iter(same_meaning(name, known) or same_beginning(name, known) or like(known)), "")


def same_meaning(name: str, known: Iterable[str]) -> list[str]:
    """The `known` names that mean the same, best first: names with the same last component (--model.attention.window
    for --model.window), synonyms (--learning-rate for --lr), and names whose last component begins with the given one
    (--temperature for --temp)."""
    *path, last = parts(name)
    meanings = [last, SYNONYMS.get(last, last), *OTHERWISE.get(last, ())]

    def rank(candidate: str) -> tuple[int, int, int]:
        *its_path, its_last = parts(candidate)
        if its_last in meanings:
            fit = 2 + len(meanings) - meanings.index(its_last)
        else:
            fit = int(len(last) > 2 and its_last.startswith(last))
        return fit, len({*path} & {*its_path}), -len(its_path)

    ranked = sorted(known, key=rank, reverse=True)
    return [candidate for candidate in ranked if rank(candidate)[0]]


def has_meaning(name: str) -> bool:
    """Whether an unknown name has synonyms; names of similar spelling are then not suggested for it."""
    return parts(name)[-1] in SYNONYMS.keys() | OTHERWISE.keys()


def same_beginning(name: str, known: Iterable[str]) -> list[str]:
    """The `known` names that are a prefix of the unknown name, or have it as a prefix, ignoring separators: gemma-2-2b
    for gemma2, gpt2 for gpt2-small. The longest common prefix comes first, then the shortest name."""
    plain = lambda text: re.sub(r"[^a-z0-9]", "", text.lower())
    typed = plain(name)
    shared = {candidate: min(typed, plain(candidate), key=len) for candidate in known}
    close = [c for c, text in shared.items() if len(text) > 2 and typed.startswith(text) and plain(c).startswith(text)]
    begins = "[^a-z0-9]*".join(map(re.escape, typed)) + r"(?!\d)"  # llama3 begins llama-3-8b rather than llama-30b
    whole = lambda candidate: not typed[-1].isdigit() or bool(re.match(begins, candidate.lower()))
    return sorted(close, key=lambda one: (-len(shared[one]), not whole(one), len(one), one))


def parts(name: str) -> list[str]:
    """The components of a dotted name: --model.d-model is ["model", "d_model"]; any other text is one component."""
    plain = name.lower().removeprefix("--").replace("-", "_")
    return plain.split(".") if re.fullmatch(r"[a-z_]\w*(\.[a-z_]\w*)*", plain) else [plain]
