"""Convert messages of data sets to the fields that chat templates read, and interpret their training flags."""

from collections.abc import Mapping, Sequence
from typing import Any

from onward.base.arguments import shown
from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.data.unread import WEIGHTS

ROLES = {  # roles in ShareGPT and related formats
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
OF_TEMPLATES = "model", "observation", "developer"  # roles that chat templates may read instead of those in ROLES
ASSISTANT = "assistant", "model"
SYSTEM = "system", "system_prompt", "system_message"  # columns with the text of a system message
TALKS = "messages", "prompt", "completion", "chosen", "rejected"  # fields that may hold messages
TEXTS = "text", "input_text", "output_text"  # types of content parts that are text


def message(value: Any, role: str = "") -> dict[str, Any]:
    """Make a message {"role", "content"} from {from, value}, {role, content} or a mixture, or from a text and a role;
    other fields are kept."""
    if isinstance(value, str) and role:
        return {"role": role, "content": value}
    if not isinstance(value, Mapping) or not ({"from", "role"} & value.keys()):
        raise UserError(f"a turn is {shown(value)}: write it as {{'role': 'user', 'content': 'text'}}")
    own = {str(name): one for name, one in value.items() if one is not None or name == "content"}
    speaker = own.pop("role" if "role" in own else "from", None)
    known = speaker if isinstance(speaker, str) else ""
    if "role" not in value and known not in ROLES:
        raise UserError(f"a turn is from {shown(speaker)}: {nearest(str(speaker), ROLES)}")
    if own.get("content") is None and "value" in own:
        own["content"] = own.pop("value")
    name = known if "role" in value and known in OF_TEMPLATES else ROLES.get(known, speaker)
    if isinstance(call := own.pop("function_call", None), Mapping) and call:  # OpenAI's former field for tool calls
        own["tool_calls"] = [*(own.get("tool_calls") or []), {"type": "function", "function": dict(call)}]
    return {"role": name, **own}


def read_messages(values: Sequence[Any]) -> list[Any]:
    """Convert `values` with `message`, and join content parts; values that are not messages stay unchanged."""
    result = list[Any]()
    for number, value in enumerate(values, 1):
        if not isinstance(value, Mapping) or not ({"from", "role"} & value.keys()):
            result.append(value)  # raises an error later, when messages are encoded
            continue
        result.append(with_text(message(value), number))
    return result


def with_text(value: dict[str, Any], number: int) -> dict[str, Any]:
    """Join the content parts of a message, which must all be texts."""
    content = value.get("content")
    if not isinstance(content, list | tuple):
        return value
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in TEXTS or not isinstance(part.get("text"), str):
            raise UserError(
                f"cannot train on message {number}, because its part of type {shown(kind)} is not text: remove the "
                "record"
            )
        texts.append(part["text"])
    return {**value, "content": "".join(texts)}


def with_system(values: dict[str, Any]) -> dict[str, Any]:
    """Move the text of a column such as `system` into the messages of a row, as their first message."""
    name = next((name for name in SYSTEM if values.get(name)), "")
    if not name or not (talks := [field for field in TALKS if values.get(field)]):
        return values
    if not isinstance(text := values[name], str):
        raise UserError(f"{name} is {shown(text)}: give a text")
    lists = [field for field in talks if isinstance(values[field], list | tuple)]
    wholes = ("messages", "prompt") if "prompt" in lists else ("messages", "chosen", "rejected")
    if not {*wholes} & {*lists}:
        raise UserError(
            f"cannot put its {name} text before its {talks[0]}, because that is a text, too: write the {talks[0]} as a "
            f"list of messages, join both texts, or leave the column out with --ignore {name}"
        )
    result = {key: value for key, value in values.items() if key != name}
    for field in {*wholes} & {*lists}:
        first = values[field][0]
        begins = isinstance(first, Mapping) and first.get("role") in ("system", "developer")
        if begins and first.get("content") != text:
            raise UserError(f"its {name} text differs from the system message in its {field}: remove one")
        result[field] = [*([] if begins else [message(text, "system")]), *values[field]]
    return result


def trained_messages(messages: Sequence[Mapping[str, Any]], given: int) -> list[bool]:
    """Whether each message is trained: True for the assistant's messages after the first `given` messages, unless a
    flag such as `weight` is 0."""
    result = []
    for number, one in enumerate(messages, 1):
        own = one["role"] in ASSISTANT
        flags = {name: one[name] for name in WEIGHTS if one.get(name) is not None}
        for name, flag in flags.items():
            if not isinstance(flag, int | float) or flag not in (0, 1):
                raise UserError(f"message {number} has the {name} {shown(flag)}: give 1 to train the message, or 0")
            if not own and flag and name != "weight":
                raise UserError(
                    f"cannot train message {number} ({name} {shown(flag)}), because its role is {one['role']!r}, not "
                    "assistant: remove the field"
                )
        result.append(number > given and own and all(flags.values()))
    return result
