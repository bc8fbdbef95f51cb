"""onward chat: a conversation with a model."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from onward.base import fields
from onward.base.arguments import field_types
from onward.base.errors import UserError
from onward.cli.shared.compiling import Compiling, compile_steps
from onward.cli.shared.drafts import tell_draft
from onward.cli.shared.input import read_line
from onward.cli.shared.loading import Loading, load
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, printable
from onward.cli.shared.warnings import warn_of_temperature, warn_of_unknown
from onward.generation.options import GenerationOptions

if TYPE_CHECKING:
    from onward.api.language_model import LanguageModel
    from onward.generation.cache.conversation import ConversationCache
    from onward.text.chat import Message

ABOUT = """\
Chat with a model. Each line of piped input is one message.

examples:
  onward chat runs/mybook
  onward chat models/assistant --system "Answer in one sentence." --temperature 0
  echo "What is a cat?" | onward chat models/assistant --json

Ctrl-C stops an answer and keeps the text so far. Ctrl-D or /exit ends the chat. /help lists the other commands.
"""

HELP = """\
/reset               forget the conversation, but not the system prompt
/undo                forget the last message and its answer
/set                 list the settings
/set NAME VALUE      change a setting, as /set temperature 0.7
/help                this list
/exit                leave, as Ctrl-D does; Ctrl-C stops an answer
Type a space before a message that begins with /."""

OF_TEXTS = "n", "logprobs"  # options of onward generate that do not apply to a conversation


@dataclass(frozen=True, kw_only=True)
class Settings(GenerationOptions):
    """Settings of the chat's answers, such as the temperature; `/set` changes them during the chat."""

    max_new_tokens: int | None = 1024  # maximum number of tokens in an answer; none: as many as the context holds


@dataclass(frozen=True, kw_only=True)
class Options(Settings, Compiling, Loading):
    """The options of `onward chat`, which holds a conversation in the terminal."""

    positional: ClassVar[tuple[str, ...]] = ("model",)
    fixed: ClassVar[tuple[str, ...]] = (*OF_TEXTS, "adapter")  # answers always use the adapter that --adapter selects
    common: ClassVar[tuple[str, ...]] = (
        "system",
        *("max_new_tokens", "temperature", "top_k", "top_p", "stop", "seed", "device", "json"),
    )
    model: str  # folder of the model, or its name on the hub
    system: str = ""  # system prompt: a message at the start that contains instructions for the model
    context: int = 8192  # number of tokens of the conversation that the model sees, at most its context length
    json: bool = False  # print each answer as one line of JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward chat", about=ABOUT)
    if options.context < 2:
        raise UserError(f"context is {options.context}: it must be at least 2")
    warn_of_temperature(options.temperature)
    lm = load(options.model, options)
    if lm.draft_head:
        tell_draft(options.model)
    conversation, typed = TerminalChat(lm, options), sys.stdin.isatty()
    if options.compile:
        compile_steps(lm.engine(rows=1, cache=conversation.empty_cache()), [1])
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401 - so that lines can be edited
        console.print("/help lists the commands")
    while True:
        try:
            line = input("> ") if typed else read_line()
        except EOFError:
            if typed:
                print()
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            print("\n(Ctrl-D or /exit leaves)")
            continue
        try:
            if line.strip() == "/exit":
                return
            if line.startswith("/"):
                conversation.command(line)
            elif line.strip():
                conversation.answer(line.strip())
        except UserError as error:
            if not typed:
                raise
            console.print(f"onward: {error}", markup=False, soft_wrap=True)


class TerminalChat:
    """A conversation in the terminal: its messages, the settings of the answers, and the cache of the messages so
    far."""

    def __init__(self, lm: "LanguageModel", options: Options) -> None:
        self.lm, self.options = lm, options
        self.length = min(options.context, lm.config.context_length)
        self.settings: Settings = options
        self.system = [{"role": "system", "content": options.system}] if options.system else []
        self.turns: list[dict[str, str]] = []  # messages of the user and answers of the assistant, alternating
        self.cache: ConversationCache | None = None
        self.finish_reason = ""  # finish reason of the last answer; empty if it was interrupted

    def empty_cache(self) -> "ConversationCache":
        from onward.generation.cache.conversation import ConversationCache
        from onward.generation.cache.manager import CHUNK, STEP
        from onward.model.cache import KVCache

        # one contiguous row, not blocks: each turn continues in place, and there are no other rows to share blocks with
        model, chunk = self.lm.model, min(CHUNK, self.length)
        return ConversationCache(
            KVCache(self.lm.config, 1, self.length, chunk, step=STEP, device=model.device, dtype=model.dtype)
        )

    def answer(self, text: str) -> None:
        warn_of_unknown(self.lm.tokenizer, [text])
        self.turns.append({"role": "user", "content": text})
        printed: list[str] = []
        show = printable if sys.stdout.isatty() else str
        self.cache = self.cache or self.empty_cache()
        try:
            room = self.room()
            new = min(self.limit(room), room)
            messages = [*self.system, *self.turns]
            for piece in self.pieces(messages, new):
                printed.append(piece)
                if not self.options.json:
                    print(show(piece), end="", flush=True)
        except KeyboardInterrupt:
            self.cache = None  # a step may have been interrupted while it changed the cache
        except UserError:
            self.turns.pop()
            raise
        self.turns.append({"role": "assistant", "content": "".join(printed)})
        print(json.dumps(self.turns[-1]) if self.options.json else "", flush=True)
        if self.finish_reason == "length" and not self.options.json:
            console.print(f"the answer was cut after {new:,} tokens: see --max-new-tokens", soft_wrap=True)

    def pieces(self, messages: "Sequence[Message]", new: int) -> Iterator[str]:
        """Yield the answer, of at most `new` tokens, in pieces; `finish_reason` is then the reason why the answer
        ended."""
        self.finish_reason = ""
        stream = self.lm.stream_chat(messages, new, options=self.settings, rows=1, cache=self.cache)
        self.finish_reason = yield from stream

    def room(self) -> int:
        """Return how many tokens of the next answer fit into the context; if too few fit, first drop the oldest
        turns."""
        from onward.text.chat import chat_of

        def left(dropped: int) -> int:
            return self.length - len(chat.encode([*self.system, *self.turns[dropped:]]))

        chat, half, dropped = chat_of(self.lm.text()), self.length // 2, 0
        if left(0) < min(self.limit(half), half):
            while left(dropped) < half and dropped + 1 < len(self.turns):
                dropped += 2
        if left(dropped) < 1:
            raise UserError(
                f"this message is {1 - left(dropped)} tokens too long for a context of {self.length}: shorten it"
            )
        if dropped:
            del self.turns[:dropped]
            console.print(f"the context is full, so the oldest turns are dropped: {dropped // 2}")
        return left(0)

    def limit(self, default: int) -> int:
        return default if self.settings.max_new_tokens is None else self.settings.max_new_tokens

    def command(self, line: str) -> None:
        """Execute a line that begins with a slash; see HELP."""
        kinds = field_types(Settings)
        names = [name for name, kind in kinds.items() if not kind.only_in_python and name not in Options.fixed]
        match line.split(maxsplit=2):
            case ["/reset"]:
                self.turns.clear()
            case ["/undo"]:
                del self.turns[-2:]
            case ["/help"]:
                print(HELP)
            case ["/set"]:
                for name in names:
                    print(f"{name} {getattr(self.settings, name)}")
            case ["/set", name, value]:
                name = name.replace("-", "_")
                if name not in names:
                    raise UserError(f"{name} is not a setting: {fields.nearest(name, names)}")
                self.settings = replace(self.settings, **{name: fields.converted(kinds[name], value, name)})
                if name == "temperature":
                    warn_of_temperature(self.settings.temperature)
            case [word, *_]:
                known = ["/reset", "/undo", "/set", "/set NAME VALUE", "/help", "/exit"]
                raise UserError(f"{word} cannot be used like this: {fields.nearest(line, known)}")
