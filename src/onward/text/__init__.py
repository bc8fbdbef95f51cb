"""Chats and streams of text."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.text.chat import Chat, NoTemplate, chat_of
    from onward.text.stream import TextStream
    from onward.text.templates import with_template
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = ["Chat", "NoTemplate", "TextStream", "chat_of", "with_template"]
