"""Every entry of the glossary is one sentence whose names in the code exist."""

import importlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import onward
from onward.base.fields import hints
from onward.cli.overview import COMMANDS
from onward.cli.shared.arguments import arguments
from onward.learn.glossary import Entry, find, glossary, nearest_terms, plain

SOURCE = Path(onward.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
READERS = """CausalSelfAttention, Pre-LN, weight tying, few-shot, gradient checkpointing, FSDP, ZeRO, DDP, MoE,
flash attention, StoppingCriteria, TextStreamer, prompt engineering, KV cache, logits processor, nucleus, n_embd,
lm_head, GradScaler, past_key_values, block_size, autoregressive, chain rule,
emergent abilities, in-context learning, RLHF, YaRN, loss, kv, epoch, pretraining, gradient descent, one-hot, qkv, d_k,
GPU, exposure bias, vanishing gradient, biases, SiLU, dead units, feed-forward network, character-level model, GPT-2,
GPT vs Llama, LLaMA 2, GPT-4, sparse attention, maximum likelihood, initial loss, data loader, Lightning, MPS,
acceptance rate, residual distribution, positional head, syntactic head, attention visualization, end-of-sequence,
double the context, BooksCorpus, WebText, The Pile, FineWeb, licenses, Falcon, learning rate warmup,
loss scaling, cache memory, cache class, rotate-half, loading GPT-2, character model, open access, top ten, quiz,
loss axis, pitfalls, papers, exercises, batches, GPT from scratch, deployment, choosing a model, closed access,
hard limit, relative positions, chunk without mask, GPT uses ReLU, receptive field, active parameters,
Kaplan's constant"""


def exists(code: str) -> bool:
    """Whether a public name, a command with its option, or a file of the package exists."""
    if code.startswith("onward."):
        value: Any = onward
        for name in code.split(".")[1:]:
            value = (
                hints(value).get(name) if name in getattr(value, "__annotations__", {}) else getattr(value, name, None)
            )
        return value is not None
    if code.startswith("onward "):
        _, command, *option = code.split()
        module = importlib.import_module(f"onward.cli.commands.{command}") if command in COMMANDS else None
        flags = {argument.flag for argument in arguments(module.Options)} if hasattr(module, "Options") else set()
        return module is not None and (not option or option[0] in flags)
    return (SOURCE / code).is_file()


def test_the_glossary_has_150_terms_with_different_names() -> None:
    assert len(glossary()) >= 150
    repeated = [
        name for name, n in Counter(plain(n) for e in glossary() for n in {*map(plain, e.names)}).items() if n > 1
    ]
    assert not repeated


@pytest.mark.parametrize("entry", glossary(), ids=lambda entry: entry.name)
def test_an_entry_is_one_sentence_with_a_chapter_and_an_existing_name(entry: Entry) -> None:
    assert re.fullmatch(r"[^\n]+\.", entry.text)
    assert len(re.findall(r"[.?!](?= [A-Z])", entry.text)) == 0
    assert 1 <= entry.chapter <= 17
    assert not entry.code or exists(entry.code), entry.code
    assert not entry.guide or (DOCS / f"{entry.guide}.md").is_file(), entry.guide


@pytest.mark.parametrize("name", re.split(r",\s+", READERS))
def test_names_that_readers_bring_are_found(name: str) -> None:
    assert len(find(name)) == 1


NAMES = """tensor, vector, shape, step, probability, accuracy, kernel, ablation, circuit, einsum, momentum, rank,
hyperparameter, CPU, VRAM, ONNX, FP8, Unicode, WordPiece, NaN"""
FIRST = {  # words and questions -> the first entry found
    "parameter": "parameters",
    "inf": "NaN",
    "train": "training loop",
    "training": "training loop",
    "kl": "KL divergence",
    "d_ff": "feed-forward width",
    "intermediate_size": "feed-forward width",
    "d_v": "head width",
    "num_layers": "block",
    "embedding_dim": "hidden state",
    "max_tokens": "max_new_tokens",
    "machine": "machine learning",
    "neural": "neural network",
    "reinforcement": "reinforcement learning",
    "flash": "flash attention",  # the name begins with the word
    "embeddings": "embedding",
    "what is attention": "attention",
    "What is a KV cache?": "KV cache",
    "how does attention work": "attention",
    "what are the logits": "logits",
    "The Pile": "training data",
    "attention is all you need": "Transformer",
    "Language Models are Few-Shot Learners": "GPT-2",
    "mask": "causal mask",
    "rotary embeddings": "rotary positions",
    "layer normalisation": "layer normalization",
    "tokenise": "tokenizer",
    "perplexities": "perplexity",
    "top-p sampling": "nucleus sampling",
    "adamw optimizer": "AdamW",
    "dpo loss": "DPO",
    "flash attention 2": "flash attention",
    "EAGLE-3": "speculative decoding",
    "4bit": "quantization",
    "Llama 3.1": "Llama",
    "context size": "context length",
    "low rank adapters": "LoRA",
    "what's a token": "token",
    "why do we divide by sqrt(d)": "scale of the scores",
    "What is the difference between GPT and BERT?": "decoder-only",
    "difference between top-k and top-p": "top-k sampling",
}


@pytest.mark.parametrize("text", [*FIRST, *re.split(r",\s+", NAMES)])
def test_a_word_or_a_question_leads_to_its_entry(text: str) -> None:
    assert find(text)[0].name == FIRST.get(text, text)


@pytest.mark.parametrize("entry", glossary(), ids=lambda entry: entry.name)
def test_each_name_is_found_alone_and_in_a_question(entry: Entry) -> None:
    for name in entry.names:
        for text in name, f"what is {name}?", f"how does the {name} work":
            assert entry in find(text), text


def test_an_unknown_term_gets_the_nearest_ones() -> None:
    assert not find("nuclues")
    assert nearest_terms("nuclues") == "did you mean nucleus?"
    assert all("onward learn" in nearest_terms(word) for word in ("tanh", "numpy", "jax", "f1", "Karpathy"))
    assert "onward learn" in nearest_terms("qqqqqq")
