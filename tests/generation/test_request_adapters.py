"""Requests choose their adapter: rows of a batch with different adapters give the same tokens as with each adapter
alone."""

import pytest
from transforms.test_lora import stirred

from onward import (
    BlockManager,
    CacheManager,
    Decoder,
    Engine,
    KVCache,
    PagedKVCache,
    Request,
    Sampling,
    UserError,
    merge_lora,
)
from onward.generation import PrefixFiles

from support.decoders import DECODERS, decoder

CHOICES = "one", "two", "", None, "two"


def answers(
    model: Decoder, choices: tuple[str | None, ...], cache: CacheManager | None = None, **options
) -> list[list[int]]:
    """The answers to requests with the same prompt, each with its own adapter."""
    engine = Engine(model, cache=cache, **options)
    requests = [engine.add(Request([1, 2, 3, 4, 5], Sampling(temperature=0), 6, adapter=one)) for one in choices]
    for _ in engine.run():
        pass
    return [request.tokens for request in requests]


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "deepseek"])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_rows_with_different_adapters_are_answered_as_each_alone(name: str, kind: str) -> None:
    model = stirred(decoder(DECODERS[name]), "one", "two")  # "two" is the active adapter
    make = {
        "contiguous": lambda: CacheManager(KVCache(model.config, 8, 12, 12)),
        "paged": lambda: BlockManager(PagedKVCache(model.config, 8, 12, 12, blocks=60, block_size=2)),
    }[kind]
    together = answers(model, CHOICES, make())
    assert together == [answers(model, (one,), make())[0] for one in CHOICES]
    assert together[3] == together[1] != together[0] != together[2] != together[1]
    merge_lora(model, "one")
    assert answers(model, ("",), compile_after=0)[0] == together[0]


def test_prompts_in_files_are_those_of_one_adapter(tmp_path) -> None:
    model = stirred(decoder(DECODERS["llama"]), "one", "two")
    alone = answers(model, CHOICES)
    for _ in range(2):
        files = PrefixFiles(tmp_path, model)
        assert answers(model, CHOICES, files=files) == alone
    assert len(list(tmp_path.iterdir())) == 3


def test_unknown_adapter_of_a_request_is_named_with_the_nearest() -> None:
    engine = Engine(stirred(decoder(DECODERS["llama"]), "poems"))
    with pytest.raises(UserError, match=r"no adapter with the name 'poem': did you mean poems\?"):
        engine.add(Request([1], Sampling(), 1, adapter="poem"))
    with pytest.raises(UserError, match="the model has none"):
        Engine(decoder(DECODERS["llama"])).add(Request([1], Sampling(), 1, adapter="poem"))


def test_step_that_was_compiled_ahead_serves_the_first_request() -> None:
    model = stirred(decoder(DECODERS["llama"]), "one")
    for adapter in None, "one":
        engine = Engine(model, rows=1)
        assert engine.compile() == ""
        engine.add(Request([1, 2, 3], Sampling(temperature=0), 6, adapter=adapter))
        engine.step()
        engine.step()
        assert engine.runner.compiled
        assert any(engine.runner.compiled.used.values())
