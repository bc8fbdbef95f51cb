"""Questions as conversations: rendered by a chat template, and encoded as lm-evaluation-harness does."""

from __future__ import annotations

from collections.abc import Sequence

from onward.text.chat import Message, chat_of
from onward.text.masked_string import MaskedString
from onward.text.tokenizer import Tokenizer


class ChatPrompts:
    """Renders questions by the chat template of a tokenizer, and encodes the rendered text, alone or with a
    continuation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.chat = tokenizer, chat_of(tokenizer)

    @property
    def stop(self) -> tuple[str, ...]:
        """The texts that end an answer; () if only control tokens do."""
        return self.chat.stop

    def text(self, turns: Sequence[str]) -> MaskedString:
        """Render turns of user and assistant, the user's first and last, followed by the beginning of an answer."""
        roles = ("user", "assistant") * len(turns)
        messages: list[Message] = [{"role": role, "content": turn} for role, turn in zip(roles, turns)]
        return self.chat.text(messages, True, {})

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered text, with the token in front that the tokenizer puts before every text,
        unless they begin with it already."""
        masked = text if isinstance(text, MaskedString) else MaskedString(text)
        tokens = [i for i, _, _ in self.chat.tokens(masked)]
        first = self.tokenizer.encode("")[:1]
        return tokens if tokens[:1] == first else first + tokens
