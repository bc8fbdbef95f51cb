"""Public calls refuse a wrong argument, if at all, with a UserError that names it, never with an error of a library."""

import inspect
import math
import random
import re
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

import onward
from onward.base.fields import Part

SIZES: dict[str, Any] = {"vocab_size": 13, "d_model": 16, "n_layers": 2, "n_heads": 4}

TEXT = "the cat sat on the mat.\n" * 20
WRONG: list[Any] = [None, "abc", 3, -1, 2.5, math.nan, {"a": 1}, [object()], ["abc"], object(), torch.zeros(2, 3, 4)]
RESULTS = {  # classes of results, the base class of user-defined losses, and the store of evaluation results
    *(
        "Loss",
        "Kept",
        "Completion",
        "Evaluation",
        "Notice",
        "Rollback",
        "Score",
        "TaskResult",
        "SearchResult",
        "Step",
        "TokenLogprob",
        "Validation",
    )
}
INTERNAL = {  # called by other methods at each token or step
    *("Batch.changed", "Decoder.hidden_of_checked", "KVCache.narrow", "PagedKVCache.narrow", "Tokens.spans_in"),
    "Decoder.contexts",
    *("Engine.distribute", "Engine.forward", "Engine.propose", "Request.context_from", "Trainer.backward"),
    *("Trainer.accumulate", "Trainer.accumulating", "Trainer.summed"),
    *("Tokenizer.encoded", "Tokenizer.pieces"),
    *("LanguageModel.engine_for", "FinetuneConfig.of"),
    *(f"{name}.{of}" for name in ("Sampling", "GenerationOptions") for of in dir(onward.Sampling) if of[0] != "_"),
}
PLACES = {"revision", "base", "folder", "path", "sources", "spec"}  # messages describe these arguments by their content
BEHIND = {"BlockManager", "CacheManager", "Run"}  # classes whose methods are called by a scheduler or by `train`


def made_by_hand() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """The public functions, constructors and methods, each with arguments that are valid, apart from missing files."""
    tokenizer = onward.train_tokenizer("bpe:280", [TEXT])
    config = onward.DecoderConfig(**SIZES | {"vocab_size": tokenizer.vocab_size}, context_length=32)
    model, adapted = onward.Decoder(config), onward.Decoder(config)
    lm = onward.LanguageModel(model, tokenizer)
    cache = onward.KVCache(config, 2, 16, 4, step=8)
    paged = onward.PagedKVCache(config, 2, 16, 4, blocks=8)
    engine = onward.Engine(model)
    ids = torch.tensor([[1, 2, 3]])
    batch = onward.Batch(ids, ids)
    text = onward.Tokens.of(np.arange(99) % 9)
    windows = onward.Windows([text], 4, 0)
    optimizers = [torch.optim.SGD(model.parameters(), 0.0)]
    trainer = onward.Trainer(model, optimizers, lambda step: 0.0)
    request = onward.Request([1, 2], onward.Sampling(), 1)
    start: dict[str, Any] = {"sources": ("no/such.txt",), "out": "no/such/run"}
    prompt = {"prompt": "the cat", "max_new_tokens": 1}
    rows = {"config": config, "rows": 2, "length": 16}
    return {
        "load": (onward.load, {"model": "no/such"}),
        "add_lora": (onward.add_lora, {"model": adapted, "lora": onward.LoRA()}),
        "merge": (onward.merge, {"adapter_folder": "no/such", "out": "merged"}),
        "merge_lora": (onward.merge_lora, {"model": model}),
        "remove_lora": (onward.remove_lora, {"model": model}),
        "save_adapter": (onward.save_adapter, {"lm": lm, "folder": "saved", "base": "no/such"}),
        "use_adapter": (onward.use_adapter, {"model": model, "name": ""}),
        "activation_names": (onward.activation_names, {"model": model}),
        "attached": (onward.attached, {"model": model}),
        "doctor": (onward.doctor, {"model": model, "checks": ["causal"]}),
        "verify": (onward.verify, {"model": model}),
        "explain": (onward.explain, {"model": model, "tokenizer": tokenizer, "text": "the cat"}),
        "edit": (onward.edit, {"model": model, "changes": {"blocks.0": 0.0}}),
        "trace": (onward.trace, {"model": model}),
        "mean_loss": (onward.mean_loss, {"model": model, "batches": [batch]}),
        "next_token_distribution": (
            onward.next_token_distribution,
            {"logits": torch.zeros(1, 9), "samplings": onward.Sampling()},
        ),
        "save": (onward.save, {"lm": lm, "path": "saved"}),
        "train": (onward.train, start),
        "finetune": (onward.finetune, start | {"base": "no/such"}),
        "train_tokenizer": (onward.train_tokenizer, {"spec": "bpe:280", "texts": [TEXT]}),
        "Answer": (onward.Answer, {"tokenizer": tokenizer}),
        "Answer.push": (onward.Answer(tokenizer).push, {"token": 1}),
        "Batch": (onward.Batch, {"tokens": ids, "targets": ids}),
        "Batch.to": (batch.to, {"device": "cpu"}),
        "BlockManager": (onward.BlockManager, {"cache": paged}),
        "CacheManager": (onward.CacheManager, {"cache": cache}),
        "Decoder": (onward.Decoder, {"config": config}),
        "Decoder.forward": (model.forward, {"tokens": ids}),
        "Decoder.hidden": (model.hidden, {"tokens": ids}),
        "Decoder.logits": (model.logits, {"hidden": torch.zeros(1, 3, config.d_model)}),
        "DecoderConfig": (onward.DecoderConfig, SIZES),
        "Engine": (onward.Engine, {"model": model}),
        "Engine.add": (engine.add, {"request": request}),
        "Engine.compile": (engine.compile, {}),
        "Engine.cancel": (engine.cancel, {"request": request}),
        "GenerationOptions": (onward.GenerationOptions, {}),
        "KVCache": (onward.KVCache, rows),
        "KVCache.grow": (cache.grow, {"capacity": 12}),
        "KVCache.view": (cache.view, {}),
        "LanguageModel": (onward.LanguageModel, {"model": model}),
        "LanguageModel.generate": (lm.generate, prompt),
        "LanguageModel.complete": (lm.complete, prompt),
        "LanguageModel.stream": (lm.stream, prompt),
        "LanguageModel.chat": (lm.chat, {"messages": "the cat", "max_new_tokens": 1}),
        "LanguageModel.stream_chat": (lm.stream_chat, {"messages": "the cat", "max_new_tokens": 1}),
        "LanguageModel.beam_search": (lm.beam_search, prompt),
        "LanguageModel.score": (lm.score, {"text": "the cat"}),
        "LanguageModel.evaluate": (lm.evaluate, {"text": "the cat"}),
        "LanguageModel.evaluate_tasks": (lm.evaluate_tasks, {"tasks": "brackets", "limit": 2}),
        "LanguageModel.classify": (lm.classify, {"texts": ["the cat"]}),
        "LanguageModel.rewards": (lm.rewards, {"prompt": "the", "answers": ["cat"]}),
        "LanguageModel.engine": (lm.engine, {}),
        "LanguageModel.submit": (
            lm.submit,
            {"engine": engine, "prompts": ["the cat"], "options": onward.GenerationOptions(max_new_tokens=1)},
        ),
        "PagedKVCache": (onward.PagedKVCache, rows | {"blocks": 8}),
        "PagedKVCache.grow": (paged.grow, {"capacity": 12}),
        "PagedKVCache.view": (paged.view, {}),
        "Request": (onward.Request, {"prompt": [1], "sampling": onward.Sampling(), "max_new_tokens": 1}),
        "Run.resume": (onward.Run.resume, {"folder": "no/such"}),
        "Run.start": (onward.Run.start, {"config": onward.RunConfig(**start)}),
        "RunConfig": (onward.RunConfig, start),
        "FinetuneConfig": (onward.FinetuneConfig, start | {"base": "no/such"}),
        "FinetuneConfig.decoder": (onward.FinetuneConfig(base="no/such").decoder, {"vocab_size": 9}),
        "FinetuneConfig.peak_learning_rate": (
            onward.FinetuneConfig(base="no/such").peak_learning_rate,
            {"d_model": 9},
        ),
        "RunConfig.decoder": (onward.RunConfig().decoder, {"vocab_size": 9}),
        "RunConfig.peak_learning_rate": (onward.RunConfig().peak_learning_rate, {"d_model": 9}),
        "Sampling": (onward.Sampling, {}),
        "StepConfig": (onward.StepConfig, {}),
        "StepPlan": (onward.StepPlan, {"batches": [batch]}),
        "Tokenizer": (onward.Tokenizer, {"inner": tokenizer.inner}),
        "Tokenizer.load": (onward.Tokenizer.load, {"path": "no/such"}),
        "Tokenizer.save": (tokenizer.save, {"folder": "saved"}),
        "Tokenizer.encode": (tokenizer.encode, {"text": "the cat"}),
        "Tokenizer.encode_batch": (tokenizer.encode_batch, {"texts": ["the cat"]}),
        "Tokenizer.begin": (tokenizer.begin, {"tokens": [1]}),
        "Tokenizer.continuation": (tokenizer.continuation, {"before": "the ", "text": "cat"}),
        "Tokenizer.encode_inside": (tokenizer.encode_inside, {"text": "cat"}),
        "Tokenizer.decode": (tokenizer.decode, {"ids": [1]}),
        "Tokenizer.byte_count": (tokenizer.byte_count, {"ids": [1]}),
        "Tokenizer.token_bytes": (tokenizer.token_bytes, {"token_id": 1}),
        "Tokenizer.piece": (tokenizer.piece, {"token_id": 1}),
        "Tokenizer.textless": (tokenizer.textless, {"size": 9}),
        "Tokens": (onward.Tokens, {"spans": []}),
        "Tokens.of": (onward.Tokens.of, {"ids": np.arange(9)}),
        "Tokens.join": (onward.Tokens.join, {"parts": [text]}),
        "Tokens.part": (text.part, {"start": 0, "stop": 9}),
        "Tokens.starts": (text.starts, {"start": 0, "stop": 9}),
        "Trainer": (onward.Trainer, {"model": model, "optimizers": optimizers, "learning_rate": lambda step: 0.0}),
        "Trainer.train": (trainer.train, {"plans": [onward.StepPlan([batch])]}),
        "Trainer.train_step": (trainer.train_step, {"plan": onward.StepPlan([batch])}),
        "Trainer.load_state": (trainer.load_state, {"state": trainer.state_dict()}),
        "ValidationWindows": (onward.ValidationWindows, {"tokens": text, "context_length": 4}),
        "ValidationWindows.read": (onward.ValidationWindows(text, 4).read, {"numbers": [0]}),
        "ValidationWindows.batches": (onward.ValidationWindows(text, 4).batches, {"size": 2}),
        "Windows": (onward.Windows, {"sources": [text], "context_length": 4, "seed": 0}),
        "Windows.read": (windows.read, {"numbers": [0]}),
    }


def public() -> Iterator[str]:
    """The names of all public functions, constructors and methods that take arguments, except those of parts,
    exceptions, RESULTS and INTERNAL."""
    for name in onward.__all__:
        value = getattr(onward, name)
        if not isinstance(value, type):
            yield name
        elif not issubclass(value, Exception | Part) and name not in RESULTS:
            if name != "Run":
                yield name
            for method in dir(value) if name not in BEHIND else ():
                function = inspect.getattr_static(value, method)
                function = getattr(function, "__func__", function)
                ours = inspect.isfunction(function) and function.__module__.startswith("onward.")
                known = method.startswith("_") or f"{name}.{method}" in INTERNAL
                if ours and not known and len(inspect.signature(function).parameters) > 1:
                    yield f"{name}.{method}"


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments of a function, including those of a TypedDict for its `**keywords`."""
    found = inspect.signature(function).parameters.values()
    parts = [p.name for p in found if p.kind is p.VAR_KEYWORD]
    keywords = [key for one in parts for key in get_args(get_type_hints(function)[one])[0].__annotations__]
    return [p.name for p in found if p.name not in parts] + keywords


CALLS = made_by_hand()
PARTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    kind.__name__: (kind, {})
    for slot in (
        onward.Position,
        onward.Attention,
        onward.FeedForward,
        onward.Norm,
        onward.Block,
        onward.Routing,
        onward.Scaling,
        onward.Method,
        onward.Adapters,
    )
    for kind in slot.choices().values()
}


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    """The exception that a call raises; None if it raises none."""
    try:
        result = function(**arguments)
        for _ in islice(result, 3) if isinstance(result, Generator | map) else ():
            pass
    except Exception as error:
        return error
    return None


def test_the_walk_has_every_public_call() -> None:
    assert {*public()} - {*CALLS} == set()
    assert {*CALLS} - {*public()} == {"Run.resume", "Run.start"}


@pytest.mark.filterwarnings("ignore::onward.text.chat.NoTemplate", "ignore::DeprecationWarning")
@pytest.mark.parametrize("count", [2, pytest.param(len(WRONG), marks=pytest.mark.long)])
@pytest.mark.parametrize("call", [*CALLS, *PARTS])
def test_wrong_argument_is_refused_by_its_name(
    call: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function, right = (CALLS | PARTS)[call]
    usual = outcome(function, right)
    assert usual is None or isinstance(usual, onward.UserError)
    for name in parameters(function):
        for value in random.Random(f"{call} {name}").sample(WRONG, count):
            error = outcome(function, right | {name: value})
            message = str(error)
            its_name = rf"\b{name.removesuffix('s')}(s|_id)?\b"  # or the name of one element
            named = re.search(its_name, message) or (name in PLACES and "abc" in message)
            known = isinstance(error, onward.UserError) and (named or message == str(usual))
            assert error is None or (known and "\n" not in message), f"{call}({name}={value!r}): {error!r}"


@pytest.mark.parametrize("call", sorted({*CALLS, *PARTS} - {"Decoder.forward", "Decoder.hidden", "Decoder.logits"}))
def test_unknown_and_missing_arguments_are_named(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function, right = (CALLS | PARTS)[call]
    error = outcome(function, right | {"nonsense": 1})
    assert isinstance(error, onward.UserError)
    assert "nonsense" in str(error)
    for name in right:
        error = outcome(function, {other: right[other] for other in right if other != name})
        assert error is None or isinstance(error, onward.UserError)


CONFIG: Any = onward.DecoderConfig
FITS: list[tuple[Any, Any]] = [
    (CONFIG(**SIZES | {"d_model": 16.0}), CONFIG(**SIZES)),
    (CONFIG(**SIZES | {"n_layers": np.int64(2)}), CONFIG(**SIZES)),
    (CONFIG(**SIZES, dropout=torch.tensor(0.5)), CONFIG(**SIZES, dropout=0.5)),
    (CONFIG(**SIZES, norm=[onward.RMSNorm()]), CONFIG(**SIZES)),
    (onward.Rotary(theta=5), onward.Rotary(theta=5.0)),
    (onward.RunConfig(sources=["a"]), onward.RunConfig(sources=("a",))),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("value", "wanted"), FITS, ids=lambda value: type(value).__name__)
def test_number_or_list_of_another_type_becomes_the_declared_one(value: Any, wanted: Any) -> None:
    assert value == wanted
    assert repr(value) == repr(wanted) or isinstance(value, onward.Rotary)


def test_error_in_a_call_with_right_arguments_stays_what_it_is() -> None:
    def fail(model: onward.Decoder, batch: onward.Batch) -> Any:
        raise KeyError("mine")

    model = CALLS["mean_loss"][1]["model"]
    trainer = onward.Trainer(model, [], lambda step: 0.0, loss=fail)
    with pytest.raises(KeyError, match="mine"):
        trainer.train_step(CALLS["StepPlan"][0](**CALLS["StepPlan"][1]))
