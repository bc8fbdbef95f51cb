"""onward serve: models behind the API of OpenAI."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, ClassVar

from onward.base.errors import UserError
from onward.cli.shared.compiling import Compiling, compile_steps
from onward.cli.shared.drafts import trained_draft, with_draft
from onward.cli.shared.loading import Loading, load
from onward.cli.shared.options import parse
from onward.cli.shared.output import console
from onward.serving.logs import logged
from onward.serving.server_options import EngineOptions, Listening

if TYPE_CHECKING:
    from onward.api.language_model import LanguageModel
    from onward.serving.models import Served

LOG = logging.getLogger("onward.serving")
ABOUT = """\
Serve models through the OpenAI API, at /v1.

examples:
  onward serve runs/mybook
  onward serve runs/mybook --port 9000 --quantize int8 --rows 32 --cache-memory 2GB
  onward serve gpt2 runs/mybook                          two models; a request names one of them
  onward serve runs/mybook --adapter runs/polite --adapter runs/terse
  ONWARD_API_KEY=secret onward serve runs/mybook --host 0.0.0.0
  onward serve runs/mybook --api-key-file keys.toml --log-format json
  curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "Once upon"}' -H 'Content-Type: application/json'
"""


@dataclass(frozen=True, kw_only=True)
class Options(Listening, EngineOptions, Compiling, Loading):
    """The options of `onward serve`, which serves models over HTTP."""

    positional: ClassVar[tuple[str, ...]] = ("models",)
    fixed: ClassVar[tuple[str, ...]] = ("adapter_folder",)  # each adapter is served under its own name
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {"prompt_cache": ("prompt_cache_size",)}
    models: tuple[str, ...] = ()  # folders of models or adapters, or names on the hub
    adapter: tuple[str, ...] = ()  # folder of an adapter of the first model; the folder's name is the served name


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward serve", about=ABOUT)
    if not options.models:
        raise UserError("no model to serve: name a folder, such as onward serve runs/quickstart")
    import torch

    from onward.hub.folder import locate
    from onward.serving.last_words import say_at_bus_error
    from onward.serving.models import check_weights, engines_of, load_served, row_counts
    from onward.serving.server import serve
    from onward.serving.weight_files import copy_to_memory

    if options.mmap:
        say_at_bus_error()
    head = options.draft if trained_draft(options.draft) else ""
    options = replace(options, draft="" if head else options.draft)
    names = *options.models, *({options.draft} - {"", "mtp"})
    # downloads the models, or raises an error for a model that does not exist
    folders = [locate(name, options.revision) for name in names]
    dtype = getattr(torch, options.dtype) if options.dtype else None
    check_weights(folders, dtype, options.quantize or None)
    say = LOG.info if options.log_format == "json" else partial(console.print, markup=False, soft_wrap=True)

    def load_one(name: str, adapters: Sequence[str]) -> LanguageModel:
        lm = load(name, options, adapters)
        with_draft(lm, name, head)
        if not options.mmap:
            copy_to_memory(lm.model)
        return lm

    def load_more(name: str) -> Sequence[Served]:
        check_weights([locate(name, options.revision)], dtype, options.quantize or None)
        return load_served((name,), (), options, load_one)

    def load_all() -> Sequence[Served]:
        served = load_served(options.models, options.adapter, options, load_one)
        if options.compile:
            for engine in engines_of(served):
                compile_steps(engine, row_counts(engine))
        return served

    with logged(options.log_format, options.log_level):
        if not options.is_local and not options.keys():
            say("everyone who can reach this machine can use the server: set a key with --api-key")
        say(f"loading {', '.join(options.models)}")
        serve(options, load_all, partial(announce, say), load_more)


def announce(say: Callable[[str], None], address: str, served: Sequence[Served]) -> None:
    """Print the served models and addresses, once the server listens."""
    from onward.base.limits import in_bytes
    from onward.serving.models import memory_of

    for one in served:
        what = f"an adapter of {one.base}" if one.base else f"context of {one.engine.length:,} tokens"
        say(f"  {one.name}: {what}{', with a draft' if one.lm.draft_head and not one.base else ''}")
    weights, cache = memory_of(served)
    say(f"memory: {in_bytes(weights)} of weights, at most {in_bytes(cache)} of keys and values")
    say(f"the page: {address}/   the API: {address}/v1   its fields: {address}/docs")
    name = quote(served[0].name)
    body = f'{{"model": "{name}", "prompt": "Once upon"}}'
    say(f"try:     curl {address}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
