"""Questions as conversations: rendered by a chat template, and encoded as lm-evaluation-harness does."""

from __future__ import annotations

from collections.abc import Sequence

from onward.text.chat import Message, chat_of
from onward.text.masked_string import MaskedString
from onward.text.tokenizer import Tokenizer


class ChatPrompts:
    """Renders messages by the chat template of a tokenizer, and encodes the result together with a continuation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.chat = tokenizer, chat_of(tokenizer)

    @property
    def stop(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return self.chat.stop

    def text(self, turns: Sequence[str]) -> MaskedString:
        """Render turns of user and assistant, the user first and last, up to where the assistant's answer begins."""
        roles = ("user", "assistant") * len(turns)
        messages: list[Message] = [{"role": role, "content": turn} for role, turn in zip(roles, turns)]
        return self.chat.text(messages, True, {})

    def encode(self, text: str) -> list[int]:
        """Encode a rendered text, after the token that the tokenizer puts before texts unless it begins with that."""
        masked = text if isinstance(text, MaskedString) else MaskedString(text)
        tokens = [i for i, _, _ in self.chat.tokens(masked)]
        first = self.tokenizer.encode("")[:1]
        return tokens if tokens[:1] == first else first + tokens
