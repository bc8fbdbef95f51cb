"""The models that the server offers: each name in the API stands for an engine and, perhaps, an adapter."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from onward.api.language_model import LanguageModel
from onward.base.errors import UserError
from onward.base.limits import in_bytes, memory_size, resident_memory
from onward.checkpoint.load import open_source
from onward.checkpoint.peft.adapters import changes_base, load_adapter
from onward.checkpoint.peft.bases import check_adapter_folder, check_base
from onward.config.decoder import DecoderConfig
from onward.generation.cache.blocks import BlockManager
from onward.generation.cache.manager import CHUNK
from onward.generation.drafts.head_draft import NUM_DRAFT_TOKENS as OF_HEAD
from onward.generation.drafts.model_draft import NUM_DRAFT_TOKENS as OF_MODEL
from onward.generation.engine.engine import Engine
from onward.hub.folder import locate
from onward.model.adapters import adapter_names, selection
from onward.model.decoder import Decoder
from onward.model.paged import PagedKVCache
from onward.planning.memory import cache_bytes, weight_bytes
from onward.planning.tables import byte_count
from onward.serving.server_options import EngineOptions
from onward.transforms.heads import head_labels
from onward.transforms.lora import remove_lora

BLOCK = 16  # number of positions in a block of the cache
SHARE = 0.5  # largest fraction of the memory left by the weights that the cache takes by default
MOST_COMPILED = 32  # largest number of rows whose steps are compiled in advance on a CPU
GIB = 1 << 30


@dataclass(frozen=True)
class Served:
    """A model under its name in the API. `adapter` is its LoRA adapter in the engine ("": none); parsers are names of
    `calls.forms`, or auto."""

    name: str
    root: str  # the model as named in the command; for an adapter, its folder
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
    """Load `models`, and the LoRA adapters in the folders `adapters` onto the first of them. Raises a UserError for
    names that occur twice, for models that do not generate, and for models that do not fit in memory."""
    used = resident_memory()
    loaded = [load(model, adapters if number == 0 else ()) for number, model in enumerate(models)]
    drafts = [load(options.draft, ()) if options.draft not in ("", "mtp") else None for _ in models]
    weights = sum(bytes_of(lm.model) for lm in (*loaded, *drafts) if lm)
    free = memory_size() - weights - used if memory_size() else 4 * GIB
    served: list[Served] = []
    for model, lm, draft in zip(models, loaded, drafts):
        lm.text()
        if head_labels(lm.model):
            raise UserError(
                f"Cannot serve {model}, which classifies texts and generates none: serve a model that generates"
            )
        engine = engine_for(lm, options, draft, max(int(SHARE * free / len(models)), 0))
        name = Path(model).resolve().name if Path(model).exists() else model
        own = adapter_names(lm.model)
        alone = name in own  # the model was given as an adapter's folder
        plain = lm if alone or not Path(model).is_dir() else with_tokenizer_of(lm, Path(model))
        parsers = options.tool_parser, options.reasoning_parser
        served.append(Served(name, model, plain, engine, name if alone else "", "", *parsers))
        folders = {Path(folder).resolve().name: Path(folder) for folder in adapters}
        served += [
            Served(one, str(folders[one]), with_tokenizer_of(lm, folders[one]), engine, one, name, *parsers)
            for one in own
            if one != name
        ]
    names = [one.name for one in served]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"Cannot serve two models with the name {min(twice)}: rename one of their folders")
    return served


def check_adapter_of(base: Served, folder: Path) -> None:
    """Raise a UserError unless a folder has an adapter that can be added to a served model."""
    check_adapter_folder(folder)
    check_base(folder, locate(base.root))
    if changes_base(folder):
        raise UserError(
            f"Cannot add {folder}, because it has fully trained weights, which would change {base.name}: serve it as a "
            "model of its own"
        )


def add_adapter(base: Served, folder: Path, name: str) -> Served:
    """Add the LoRA adapter in a folder to a served model, under a name; called in the engines' thread. Raises a
    UserError, and changes nothing, for an adapter that does not fit the model."""
    model = base.lm.model
    try:
        load_adapter(model, folder, base.lm.hf, name)
    except BaseException:
        remove_lora(model, name)
        raise
    finally:
        selection(model).name = ""
        renew(base.engine)
    lm, root = with_tokenizer_of(base.lm, folder), str(folder)
    return Served(name, root, lm, base.engine, name, base.name, base.tool_parser, base.reasoning_parser)


def drop_adapter(served: Served) -> None:
    """Remove an adapter that no request uses; called in the engines' thread."""
    remove_lora(served.lm.model, served.adapter)
    renew(served.engine)


def renew(engine: Engine) -> None:
    """Make an engine check its changed model before the next step, since compiled steps and cached prefixes of the
    earlier model no longer apply."""
    engine.state.snapshot = engine.state.known = None


def with_tokenizer_of(lm: LanguageModel, folder: Path) -> LanguageModel:
    # a base model and each adapter may have a chat template of their own
    if not (folder / "tokenizer.json").exists():
        return lm
    return replace(lm, tokenizer=open_source(folder).tokenizer())


def check_weights(folders: Sequence[Path], dtype: torch.dtype | None, quantize: str | None) -> None:
    """Raise a UserError if the weights need more memory than this process may use; only headers are read, and folders
    of adapters are skipped."""
    total, size, used = 0, memory_size(), resident_memory()
    for folder in folders:
        if folder.is_dir() and not (folder / "config.json").exists():
            continue
        source = open_source(folder)
        stored = torch.float32 if Counter(source.tensor_types()).most_common(1)[0][0] == "F32" else torch.bfloat16
        total += weight_bytes(source.family()[1], dtype or stored, quantize)
    if size and total + used > size:
        names = ", ".join(folder.name for folder in folders)
        raise UserError(
            f"Cannot load {names}, because the weights need {in_bytes(total)} and this process may "
            f"use {in_bytes(size)} of memory: serve a smaller model, or set --quantize int4"
        )


def engine_for(lm: LanguageModel, options: EngineOptions, draft: LanguageModel | None, room: int) -> Engine:
    """An engine with a paged cache of at most `room` bytes unless the options give its size; requests with a common
    prefix share its blocks."""
    length = options.context or lm.config.context_length
    if length > lm.config.context_length:
        raise UserError(f"context is {length:,}: it must be at most the model's {lm.config.context_length:,} tokens")
    chunk = min(CHUNK, length)
    if options.cache_memory:
        left, room = int(room / SHARE), int(byte_count(options.cache_memory, "cache_memory"))
    blocks = num_blocks(lm.config, options.rows, length, chunk, lm.model.dtype, room)
    size = blocks * cache_bytes(lm.config, 1, BLOCK, lm.model.dtype)
    if options.cache_memory and lm.model.device.type == "cpu" and size > left:
        raise UserError(
            f"cache_memory is {options.cache_memory}, of which this cache would take {in_bytes(size)}, but only "
            f"{in_bytes(left)} of memory are free after loading the weights: give less"
        )
    keep = options.lookup or 0
    if options.draft or (lm.draft_head and options.lookup is None):
        keep = OF_MODEL if options.draft else OF_HEAD
    cache = PagedKVCache(
        lm.config,
        options.rows,
        length,
        chunk,
        blocks=blocks,
        block_size=BLOCK,
        keep=keep,
        device=lm.model.device,
        dtype=lm.model.dtype,
    )
    engine = lm.engine(
        rows=options.rows,
        cache=BlockManager(cache),
        draft="mtp" if options.draft == "mtp" else draft,
        lookup=options.lookup,
        prompt_cache=options.prompt_cache or None,
        prompt_cache_size=int(byte_count(options.prompt_cache_size, "prompt_cache_size")),
        prefill_budget=options.prefill_budget,
    )
    # no program of a user changes a served model, so a step need not check every module and tensor
    engine.state.owned = True
    return engine


def row_counts(engine: Engine) -> range:
    """Batch sizes whose steps are compiled before they are needed: on a CPU, where compiling one takes about 0.1 s, up
    to MOST_COMPILED; elsewhere only 1."""
    on_cpu = engine.model.device.type == "cpu"
    return range(1, min(engine.scheduler.rows, MOST_COMPILED if on_cpu else 1) + 1)


def num_blocks(config: DecoderConfig, rows: int, length: int, chunk: int, dtype: torch.dtype, room: int) -> int:
    """The number of blocks that fit in `room` bytes, at most what all rows can use; raises a UserError if one text does
    not fit."""
    block = cache_bytes(config, 1, BLOCK, dtype)
    one_row = -(-(length + chunk) // BLOCK)
    blocks = min(room // block, rows * one_row)
    if blocks < one_row:
        least = one_row * block
        raise UserError(
            f"Cannot keep a context of {length:,} tokens, which needs {in_bytes(least)}, in a cache of "
            f"{in_bytes(room)} for {blocks * BLOCK:,} tokens: set --context lower or --cache-memory higher"
        )
    return blocks


def engines_of(served: Sequence[Served]) -> list[Engine]:
    """Each engine once: a model and its adapters share one."""
    return list({id(one.engine): one.engine for one in served}.values())


def memory_of(served: Sequence[Served]) -> tuple[int, int]:
    """(bytes of the weights, bytes of the caches) of the engines."""
    engines = engines_of(served)
    caches = [entry for engine in engines for layer in engine.runner.cache.layers for entry in layer.entries.values()]
    return sum(bytes_of(engine.model) for engine in engines), sum(entry.nbytes for entry in caches)


def bytes_of(model: Decoder) -> int:
    return sum({id(one): one.nbytes for one in model.state_dict(keep_vars=True).values()}.values())  # tied weights once
