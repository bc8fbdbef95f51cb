"""A chapter in the terminal: Markdown without the HTML that rich would drop."""

import re

from onward.learn.chapters import Chapter
from onward.learn.interactive.figure import with_figures


def for_terminal(chapter: Chapter, answers: bool = False) -> str:
    """Markdown without HTML: a picture becomes its title and file, an interactive figure a line with its location, and
    the summary of an answer becomes bold. Without `answers`, a line after the last question says how to show them."""
    text = with_figures(chapter, chapter.alone, lambda figure: f"*{pointer(chapter, figure)}*")
    if not answers:
        *asked, rest = re.split(r"<details>.*?</details>", text, flags=re.DOTALL)
        hint = f"*The answers to all questions above: `onward learn {chapter.number} --answers`*" * bool(asked)
        text = "".join([*asked, hint, rest])
    text = re.sub(r"<summary>(.*?)</summary>", r"**\1**", text)
    text = re.sub(r"</?details>|<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"!\[(.*?)\]\((.*?)\)", r"*Picture: \1 (\2)*", text)


def pointer(chapter: Chapter, figure: object) -> str:
    """Where a reader in a terminal finds an interactive figure."""
    return f"{figure!r}: `onward learn {chapter.number} --web {chapter.path.stem}.html`, or the notebook"
