"""Models that Onward does not read or write as GGUF: architectures of llama.cpp, and families that llama.cpp does not
have. Remove a name when Onward learns to read it (`tests/checkpoint/test_gguf_architectures.py` checks this)."""

from __future__ import annotations

ARCHITECTURES_UNREAD = {  # completes "FILE is of architecture X, which Onward does not read, because ..."
    "it is an encoder, whose tokens attend in both directions": (
        "bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding "
        "llama-embed t5encoder"
    ),
    "its decoder attends to the output of an encoder": "t5",
    "it encodes images or generates audio instead of text": "clip wavtokenizer-dec qwen3tts pockettts",
    "it generates by diffusion, not token by token": "dream llada llada-moe rnd1",
    "it is a draft model that reads the hidden states of another model": "gemma4-assistant eagle3 dflash",
    "its attention selects tokens with an indexer, whose tensors Onward does not read from GGUF": (
        "deepseek4 hy_v4 dots3note minimax-m3 qwen4exp glm5-next"
    ),
    "it has recurrent layers that Onward does not have": (
        "mamba jamba plamo2 rwkv6 rwkv6qwen2 rwkv7 arwkv7 minimax-01 bailingmoe3 kimi-k3"
    ),
    "its layers run several times": "hrm_text",
    "its layers have sizes of their own, and some are left out": "deci openelm",
    "its images are tokens of the vocabulary": "chameleon",
    "its layers have other weights for images": "cogvlm",
    "its adapters are chosen by a layer of their own": "graniteswitch",
    "llama.cpp has only the name": "gptj",
    "Onward does not have its family": (
        "arctic baichuan bailingmoe bailingmoe2 codeshell deepseek deepseek2-ocr exaone grok grovemoe internlm2 jais "
        "maincoder maple minicpm nanbeige orion pangu-embedded plamo plamo3 plm qwen refact "
        "smallthinker spark2_5 talkie xverse"
    ),
}
UNREAD = {name: reason for reason, names in ARCHITECTURES_UNREAD.items() for name in names.split()}
FAMILIES_WITHOUT = {  # model_types for which llama.cpp has no architecture, or one that Onward does not read
    *("aria_text", "axk1", "beam", "biogpt", "codegen", "cohere_compass_text", "cosmos3_edge_text", "ctrl"),
    *("deepseek_ocr2_text", "diffllama", "flex_olmo", "flint"),
    *("gpt_neo", "gpt_neox_japanese", "gptj", "helium", "hyperclovax", "kolibri1", "modernbert-decoder"),
    *("nanochat", "olmo_hybrid", "onward", "openai-gpt", "opt", "persimmon"),
    *("vaultgemma", "xglm"),
}
