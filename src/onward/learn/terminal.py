"""A chapter in the terminal: Markdown without the HTML that rich would drop."""

import re


def for_terminal(text: str) -> str:
    """Markdown without HTML: an answer gets a heading, a picture becomes its title and file."""
    text = re.sub(r"<summary>(.*?)</summary>", r"**\1**", text)
    text = re.sub(r"</?details>|<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"!\[(.*?)\]\((.*?)\)", r"*Picture: \1 (\2)*", text)
