"""Items prefetched by a thread: the same items, the same errors, and no thread left."""

import threading
from collections.abc import Iterator

import pytest

from onward import UserError
from onward.training.step.plans import prefetch


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_prefetch_yields_all_items_in_order_and_ends_its_thread(count: int) -> None:
    assert list(prefetch(range(count))) == [*range(count)]
    assert threads() == []


def test_next_items_are_made_while_the_caller_works_on_one() -> None:
    made = [threading.Event() for _ in range(5)]

    def items() -> Iterator[int]:
        for i, event in enumerate(made):
            event.set()
            yield i

    found = prefetch(items(), ahead=2)
    assert next(found) == 0
    assert all(event.wait(60) for event in made[:3])
    assert threads() != []
    assert not made[3].is_set(), "no more than two ahead"
    found.close()
    assert threads() == []
    assert not made[4].is_set()


def test_error_is_raised_when_its_item_is_asked_for() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise UserError("the file is gone")

    found = prefetch(items())
    assert next(found) == 0
    with pytest.raises(UserError, match="the file is gone"):
        next(found)
    assert threads() == []
