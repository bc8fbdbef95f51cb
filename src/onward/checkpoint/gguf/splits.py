"""How byte-level tokenizers of GGUF files split texts before merging, by tokenizer.ggml.pre. Source: struct
llm_tokenizer_bpe of llama.cpp.

The patterns are those of the published tokenizers. llama.cpp writes some of them differently, because its regular
expressions support no letter cases except for A to Z, no scripts and no word boundaries; `APPROXIMATED` names them.
"""

from __future__ import annotations

from dataclasses import dataclass

from onward.text.patterns import (
    BLOOM,
    CONTRACTION,
    DEEPSEEK3,
    DIGIT,
    DIGITS,
    GPT2,
    LLAMA3,
    O200K,
    PUNCTUATION,
    QWEN2,
    TEKKEN,
)

Patterns = tuple[str, ...]


@dataclass(frozen=True)
class Splits:
    """The patterns that split texts, applied one after the other; `lookup`: whether a piece that is a token is used
    without merging; `bos`: whether texts begin with BOS if the file does not say."""

    patterns: Patterns
    lookup: bool = False
    bos: bool = False


THREE = "[0-9][0-9][0-9]"
CASED = (  # letters with cases
    "A-Za-z\u00b5À-ÖØ-öø-ƺƼ-ƿ\u01c4-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\u03f5Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
    "ὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124"
    "\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\ufb00"
    "-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
CJK = "[一-龥ࠀ-一가-\ud7ff]+"
BY_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"  # digits of a number in groups of three from its end
_KOREAN = (
    "[가-힣\u3131-\u318e]+|[\uff01\u2026“”‘’—\uff1a\uff1b\uff0c、-〿\ufe30-\ufe4f]+|[ㄅ-ㄯ]+|[一-龥"
    "\u3040-\u309f゠-\u30ff]+"
)
_ASIAN = (
    "[一-鿿㐀-䶿豈-\ufaff\u3040-\u309f゠-\u30ff\uff65-\uff9f\u2f00-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-"
    "႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
)
_NOT_HAN = O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("/]*", "]*")
_DEEP = DEEPSEEK3[2]
DEFAULT = (PUNCTUATION.replace("`", ""), GPT2, DIGITS, THREE)
PRE = {  # equal splits are written under the first name
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), Splits((GPT2,))),
    **dict.fromkeys(("exaone4", "gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe"), Splits((GPT2,))),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), Splits((GPT2,))),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code"), Splits((GPT2,))),
    **dict.fromkeys(("starcoder", "smollm", "refact", "command-r", "codeshell"), Splits((DIGIT, GPT2))),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), Splits((DIGIT, GPT2))),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Splits((LLAMA3,))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), Splits((LLAMA3,), True, True)),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2", "jina-v5-nano"), Splits((LLAMA3,), True, True)),
    **dict.fromkeys(("glm4", "glm5"), Splits((LLAMA3,), True)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), Splits((QWEN2,))),
    **dict.fromkeys(("kormo", "f2llmv2", "solar-open", "grok-2"), Splits((QWEN2,))),
    "qwen35": Splits((QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}"),)),
    "ufakzeka": Splits((QWEN2.removeprefix(f"{CONTRACTION}|"),)),
    "laguna": Splits((r"[^\n]+|[\n]+", QWEN2)),
    "minicpm5": Splits((r"\p{N}{1,3}", QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")), True),
    "seed-coder": Splits((QWEN2.replace(r"|\p{N}|", r"|\p{N}{1}|").replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), Splits((O200K,))),
    "granite-embed-multi-97m": Splits((O200K,), True),
    "youtu": Splits((_KOREAN, O200K.replace(r"\p{N}{1,3}", r"\p{N}")), True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Splits((BY_THREES, O200K))),
    "kimi-k2": Splits((rf"[\p{{Han}}]+|{_NOT_HAN}",)),
    "tekken": Splits((TEKKEN,), True, True),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Splits((BLOOM,))),
    "viking": Splits((BLOOM, DIGIT)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), Splits(DEEPSEEK3)),
    "spark2_5": Splits((*DEEPSEEK3[:2], _DEEP.replace(r"\p{S}]+[\r\n]*|\s*[\r\n]+", r"\p{S}]+|[\r\n]"), DIGIT)),
    "afmoe": Splits((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEP)),
    "deepseek-llm": Splits(
        ("[\r\n]", rf"\s?[{CASED}]+", r"\s?" "[!-/:-~\uff01-\uff0f\uff1a-\uff5e‘-‟\u3000-。]+", r"\s+$", CJK, DIGITS)
    ),
    "deepseek-coder": Splits(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT)),
    "falcon": Splits((PUNCTUATION, GPT2, THREE)),
    "default": Splits(DEFAULT),
    "jais-2": Splits(
        (
            LLAMA3.removesuffix(r"\s+(?!\S)|\s+")
            + "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
            + r"|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "superbpe": Splits((DIGITS, r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        Splits(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
                r"\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    "exaone-moe": Splits(
        (
            rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "chameleon": Splits(
        (
            *("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", DIGIT),
            *(r"[\p{P}!-/:-@\[-`{-~]", GPT2),
        ),
        bos=True,
    ),
}
ALIASES: dict[Patterns, str] = {  # patterns of published tokenizers -> llama.cpp's name for the same splits
    (PUNCTUATION, GPT2, DIGITS, THREE): "falcon",
    (*PRE["deepseek-llm"].patterns[:-1], DIGIT): "deepseek-llm",
    (BY_THREES, _ASIAN, _DEEP): "afmoe",
}
APPROXIMATED = {
    *("gpt-4o", "granite-embed-multi-97m", "tekken", "youtu", "tiny_aya", "kimi-k2", "afmoe", "superbpe"),
}
RAW = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")  # no byte alphabet: merges over the text itself


def name_of(patterns: Patterns, lookup: bool) -> str | None:
    """The first name under which llama.cpp splits by the patterns; None if it has none."""
    names = (name for name, own in PRE.items() if own.patterns == patterns and own.lookup == lookup)
    return next(names, None if lookup else ALIASES.get(patterns))
