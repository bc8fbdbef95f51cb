"""The models that the server offers: each name in the API is an engine and, perhaps, an adapter."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from onward.api.language_model import LanguageModel
from onward.base.errors import UserError
from onward.base.limits import in_bytes, memory_size
from onward.checkpoint.load import open_source
from onward.config.decoder import DecoderConfig
from onward.generation.cache.blocks import BlockManager
from onward.generation.cache.manager import CHUNK
from onward.generation.engine.engine import Engine
from onward.model.adapters import adapter_names
from onward.model.decoder import Decoder
from onward.model.paged import PagedKVCache
from onward.planning.memory import cache_bytes, weight_bytes
from onward.planning.tables import byte_count
from onward.serving.config import EngineOptions
from onward.transforms.heads import head_labels

BLOCK = 16  # positions of a block of the cache
SHARE = 0.5  # of the memory left beside the weights, the most that the cache takes unless a size is given
MOST_COMPILED = 32  # rows
GIB = 1 << 30


@dataclass(frozen=True)
class Served:
    """A model under the name by which clients request it, with its engine. `adapter` is the name of its LoRA adapter in
    the engine, "" for the model without adapter. `tool_parser` and `reasoning_parser` are names of `calls.forms`, or
    auto, for those of the chat template."""

    name: str
    root: str  # the model as named in the command
    lm: LanguageModel
    engine: Engine
    adapter: str = ""
    base: str = ""  # for an adapter, the name of its model
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970


def load_served(
    models: Sequence[str],
    adapters: Sequence[str],
    options: EngineOptions,
    load: Callable[[str, Sequence[str]], LanguageModel],
) -> list[Served]:
    """Load `models`, and the LoRA adapters in the folders `adapters` on the first of them; return each with its engine.
    `load` loads a model with adapters. Raises a UserError for names that occur twice, for models that do not generate,
    and for models or caches that do not fit in memory."""
    loaded = [load(model, adapters if number == 0 else ()) for number, model in enumerate(models)]
    drafts = [load(options.draft, ()) if options.draft else None for _ in models]
    weights = sum(bytes_of(lm.model) for lm in (*loaded, *drafts) if lm)
    free = memory_size() - weights if memory_size() else 4 * GIB
    served: list[Served] = []
    for model, lm, draft in zip(models, loaded, drafts):
        lm.text()
        if head_labels(lm.model):
            raise UserError(f"{model} classifies texts and generates none: serve a model that generates")
        engine = engine_for(lm, options, draft, max(int(SHARE * free / len(models)), 0))
        name = Path(model).resolve().name if Path(model).exists() else model
        own = adapter_names(lm.model)
        alone = name in own  # the model was given as an adapter's folder
        plain = lm if alone or not Path(model).is_dir() else with_tokenizer_of(lm, Path(model))
        parsers = options.tool_parser, options.reasoning_parser
        served.append(Served(name, model, plain, engine, name if alone else "", "", *parsers))
        folders = {Path(folder).resolve().name: Path(folder) for folder in adapters}
        served += [
            Served(one, one, with_tokenizer_of(lm, folders[one]), engine, one, name, *parsers)
            for one in own
            if one != name
        ]
    names = [one.name for one in served]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{min(twice)} is the name of two models: rename one of their folders")
    return served


def with_tokenizer_of(lm: LanguageModel, folder: Path) -> LanguageModel:
    """Return a model with the tokenizer in the folder of a base model or an adapter, since each may have a chat
    template of its own; unchanged if the folder has no tokenizer."""
    if not (folder / "tokenizer.json").exists():
        return lm
    return replace(lm, tokenizer=open_source(folder).tokenizer())


def check_weights(folders: Sequence[Path], dtype: torch.dtype | None, quantize: str | None) -> None:
    """Raise a UserError if the weights of the models in these folders need more memory than this machine has; only
    headers are read. `dtype` is that of the weights in memory (None: as stored), `quantize` int8, int4 or None. Folders
    of adapters are skipped."""
    total, size = 0, memory_size()
    for folder in folders:
        if folder.is_dir() and not (folder / "config.json").exists():
            continue
        source = open_source(folder)
        stored = torch.float32 if Counter(source.tensor_types()).most_common(1)[0][0] == "F32" else torch.bfloat16
        total += weight_bytes(source.family()[1], dtype or stored, quantize)
    if size and total > size:
        names = ", ".join(folder.name for folder in folders)
        raise UserError(
            f"the weights of {names} need {in_bytes(total)}, and this machine has {in_bytes(size)} of memory: "
            "serve a smaller model, or set --quantize int4"
        )


def engine_for(lm: LanguageModel, options: EngineOptions, draft: LanguageModel | None, room: int) -> Engine:
    """Make an engine for a model with a paged cache, in which requests with a common prefix share blocks. `draft` is a
    smaller model that drafts tokens for speculative decoding, or None; `room` is the maximum number of bytes of the
    cache if the options give no size. Raises a UserError if the options ask for a longer context than the model's."""
    length = options.context or lm.config.context_length
    if length > lm.config.context_length:
        raise UserError(f"context is {length:,}, and the model's is {lm.config.context_length:,} tokens: lower it")
    chunk = min(CHUNK, length)
    if options.cache_memory:
        room = int(byte_count(options.cache_memory, "cache_memory"))
    blocks = num_blocks(lm.config, options.rows, length, chunk, lm.model.dtype, room)
    cache = PagedKVCache(
        lm.config,
        options.rows,
        length,
        chunk,
        blocks=blocks,
        block_size=BLOCK,
        device=lm.model.device,
        dtype=lm.model.dtype,
    )
    engine = lm.engine(
        rows=options.rows,
        cache=BlockManager(cache),
        draft=draft,
        lookup=options.lookup,
        prompt_cache=options.prompt_cache or None,
        prefill_budget=options.prefill_budget,
    )
    engine.state.owned = True
    return engine


def row_counts(engine: Engine) -> range:
    """Return the range of batch sizes (rows decoded at once) for which the server compiles decoding steps before they
    are needed: on a CPU, where each takes about 0.1 s, from 1 to MOST_COMPILED; elsewhere only 1."""
    on_cpu = engine.model.device.type == "cpu"
    return range(1, min(engine.scheduler.rows, MOST_COMPILED if on_cpu else 1) + 1)


def num_blocks(config: DecoderConfig, rows: int, length: int, chunk: int, dtype: torch.dtype, room: int) -> int:
    """Return the number of blocks of an engine's paged cache: those that fit in `room` bytes, at most as many as all
    `rows` (sequences decoded at once) of `length` tokens can use, when prompts are read in chunks of `chunk` tokens.
    Raises a UserError if one text of `length` tokens does not fit."""
    block = cache_bytes(config, 1, BLOCK, dtype)
    one_row = -(-(length + chunk) // BLOCK)
    blocks = min(room // block, rows * one_row)
    if blocks < one_row:
        least = one_row * block
        raise UserError(
            f"the cache has room for {blocks * BLOCK:,} tokens ({in_bytes(room)}), and a context of {length:,} "
            f"needs {in_bytes(least)}: set --context lower or --cache-memory higher"
        )
    return blocks


def engines_of(served: Sequence[Served]) -> list[Engine]:
    """Return the engines of the served models, each once: a model and its adapters share one."""
    return list({id(one.engine): one.engine for one in served}.values())


def memory_of(served: Sequence[Served]) -> tuple[int, int]:
    """Return (bytes of the models' weights, bytes of the engines' caches)."""
    engines = engines_of(served)
    caches = [entry for engine in engines for layer in engine.runner.cache.layers for entry in layer.entries.values()]
    return sum(bytes_of(engine.model) for engine in engines), sum(entry.nbytes for entry in caches)


def bytes_of(model: Decoder) -> int:
    """Return the bytes of a model's weights; tied weights count once."""
    return sum({id(one): one.nbytes for one in model.state_dict(keep_vars=True).values()}.values())
