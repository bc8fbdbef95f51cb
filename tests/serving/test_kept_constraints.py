"""Prepared constraints are cached separately for each vocabulary size."""

import asyncio

from onward import train_tokenizer
from onward.generation.constraint import Language
from onward.serving import RequestLimits
from onward.serving.constraints.remote import Constraints


def test_a_constraint_is_kept_for_a_tokenizer_and_a_vocabulary_size() -> None:
    tokenizer, language = train_tokenizer("byte", []), Language("regex", "[ab]{2}")

    async def sizes() -> list[int]:
        constraints = Constraints(RequestLimits())
        try:
            return [len((await constraints.start(language, tokenizer, size, (256,))).mask) for size in (257, 300, 257)]
        finally:
            constraints.close()

    assert asyncio.run(sizes()) == [257, 300, 257]
