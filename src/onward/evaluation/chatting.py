"""Questions as conversations: rendered by a chat template, and encoded as lm-evaluation-harness does."""

from __future__ import annotations

from collections.abc import Sequence

from onward.text.chat import Message, chat_of
from onward.text.masked_string import MaskedString
from onward.text.tokenizer import Tokenizer


class ChatPrompts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.chat = tokenizer, chat_of(tokenizer)

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts, in addition to control tokens, that end an answer."""
        return self.chat.stop

    def text(self, turns: Sequence[str]) -> MaskedString:
        """Render messages of user and assistant in alternation, beginning and ending with the user, followed by the
        start of an answer."""
        roles = ("user", "assistant") * len(turns)
        messages: list[Message] = [{"role": role, "content": turn} for role, turn in zip(roles, turns)]
        return self.chat.text(messages)

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text, with a beginning-of-text token in front if the tokenizer adds one to every text
        and the template has not added it."""
        masked = text if isinstance(text, MaskedString) else MaskedString(text)
        tokens = [i for i, _, _ in self.chat.tokens(masked)]
        first = self.tokenizer.encode("")[:1]
        return tokens if tokens[:1] == first else first + tokens
