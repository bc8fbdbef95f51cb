"""The tokens at which llama.cpp ends an answer. Source: llama_vocab::impl::load of llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NAMED = (  # tokens that end answers by their text, apart from EXCEPTIONS
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
FILLING = {  # keys of tokens for filling in the middle that end answers -> their texts in files without the key
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
DEFAULTS = {"llama": {"bos": 1, "eos": 2}}  # ids by kind of tokenizer, in files without the keys
ANY_TOKEN = 11  # llama.cpp's default id of the end-of-text token in byte-level vocabularies
CONTROLS = {*NAMED, *(text for texts in FILLING.values() for text in texts)}  # control tokens, whatever their type
EXCEPTIONS = (  # tokens that do not end answers if a token of each group does
    ("<|end|>", ({"<|return|>", "<|flush|>"}, {"<|call|>", "<|calls|>"})),  # ends only a part of an answer
    ("</s>", ({"<|tool_response>", "<|plamo:eos|>"},)),
)


def end_ids(keys: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    """The ids of the tokens at which llama.cpp ends an answer, the end-of-text token first; `keys` are the keys of a
    file, without the prefix tokenizer.ggml."""
    ids = {text: i for i, text in enumerate(tokens)}
    by_key = {name: token_id(keys, name, tokens) for name in ("eos", "eot", "eom", *FILLING)}
    for name, texts in FILLING.items():
        if by_key[name] is None:
            by_key[name] = min((ids[text] for text in texts if text in ids), default=None)
    found = dict.fromkeys([i for i in by_key.values() if i is not None])
    found |= dict.fromkeys([ids[text] for text in NAMED if text in ids])
    for text, groups in EXCEPTIONS:
        ending = {tokens[i] for i in found}
        if text in ending and all(ending & group for group in groups):
            del found[ids[text]]
    return list(found)


def token_id(keys: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    """The id under the key of a token, such as eos, by default the id in DEFAULTS; None if there is neither, or if the
    id is not in the vocabulary."""
    default = DEFAULTS.get(str(keys.get("model")), {}).get(name)
    i = keys.get(f"{name}_token_id", default)
    return i if type(i) is int and 0 <= i < len(tokens) else None
