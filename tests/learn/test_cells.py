"""Blocks of code of a page, and the comparison of their output with the page."""

import re
from collections.abc import Sequence

import pytest

from onward.learn.cells import Cell, cells, difference, output, rewritten

PAGE = """\
# 1. A page

```text
formula
```

```python
x = 2
print("x is", x)
```

```text
x is 2
```

```sh
onward echo one \\
  two
# a comment
```

<!-- within 10 % -->

```text
one two
```

```python
x += 1
```

<!-- varies -->

```text
```
"""


def echo(words: Sequence[str]) -> int:
    print(*words[1:])
    return 0


def test_the_last_expression_of_a_block_is_kept_and_named_by_a_comment() -> None:
    names: dict[str, object] = {}
    [first, second] = cells(
        "```python\nx = 2\nx + 1\n```\n\n<!-- varies -->\n<!-- interactive: 01-a.json -->\n\n```python\ny = 1\n```\n"
    )
    assert (first.figure, first.varies, second.figure) == ("01-a.json", True, "")
    assert output(first, names, echo) == ""
    assert names["_"] == 3
    output(second, names, echo)
    assert names["_"] is None


def test_blocks_have_their_outputs_and_tolerances() -> None:
    found = [(cell.kind, cell.output, cell.percent, cell.varies) for cell in cells(PAGE)]
    assert found == [
        ("python", "x is 2\n", 1.0, False),
        ("sh", "one two\n", 10.0, False),
        ("python", "", 1.0, True),
    ]


def test_blocks_share_variables_and_run_commands() -> None:
    names: dict[str, object] = {}
    assert [output(cell, names, echo) for cell in cells(PAGE)] == ["x is 2\n", "one two\n", ""]
    assert names["x"] == 3


def test_rewriting_a_page_with_its_own_outputs_changes_nothing() -> None:
    assert rewritten(PAGE, ["x is 2\n", "one two\n", ""]) == PAGE
    assert "x is 5" in rewritten(PAGE, ["x is 5\n", "one two\n", ""])


def test_an_error_that_the_page_does_not_show_is_raised() -> None:
    with pytest.raises(RuntimeError, match="onward echo"):
        output(Cell("sh", "onward echo\n"), {}, lambda words: 2)


@pytest.mark.parametrize(
    ("shown", "got", "percent", "equal"),
    [
        ("loss 1.234", "loss  1.235\n", 0.0, True),  # differs by one unit in the last digit
        ("loss 1.234", "loss 1.236", 0.0, False),
        ("loss 1.00", "loss 1.04", 5.0, True),
        ("loss 1.00", "loss 1.07", 5.0, False),
        ("12,000 tokens", "12,100 tokens", 1.0, True),
        ("12,000 tokens", "12,200 tokens", 1.0, False),
        ("3 layers", "4 layers", 1.0, False),
        ("p 0.44 ▇▇", "p 0.44 ▇▇▇", 0.0, True),
        ("1.0e-07", "1.1e-07", 0.0, True),
        ("1.0e-07", "2.0e-07", 0.0, False),
        ("loss 1.0", "gain 1.0", 1.0, False),
        ("a 1", "a 1 2", 1.0, False),
        ("−1.5", "-1.5", 0.0, True),  # two characters for a minus sign
    ],
)
def test_numbers_may_differ_by_the_tolerance_of_the_block(shown: str, got: str, percent: float, equal: bool) -> None:
    assert (difference(Cell("python", "", shown, percent), got) == "") == equal


def test_outputs_that_vary_and_missing_ones_are_not_compared() -> None:
    assert not difference(Cell("python", "", "a", varies=True), "b")
    assert not difference(Cell("python", "", None), "b")
    assert re.search("shows 'a'", difference(Cell("python", "", "a"), "b"))


def test_a_claim_that_is_false_after_its_code_is_raised() -> None:
    page = "```python\nx = {}\n```\n\n<!-- varies -->\n<!-- holds: x > 1 -->\n\n```text\n```\n"
    [true], [false] = cells(page.format(2)), cells(page.format(0))
    assert true.varies
    assert output(true, {}, lambda words: 0) == ""
    with pytest.raises(RuntimeError, match="x > 1"):
        output(false, {}, lambda words: 0)
