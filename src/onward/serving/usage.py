"""Token counts and log-probabilities in the formats of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onward.generation.logprobs import TokenLogprob
from onward.serving.jobs import Job
from onward.text.stream import TextStream
from onward.text.tokenizer import Tokenizer

LEAST = -9999.0  # in place of minus infinity, which JSON lacks


def usage_of(job: Job, num_reasoning: int = 0) -> dict[str, Any]:
    """Token counts of a job's prompts, each counted once, and of its answers."""
    prompts = {id(request.prompt): len(request.prompt) for request in job.answers}
    cached = {id(request.prompt): request.num_shared for request in reversed(job.answers)}
    new = sum(len(request.tokens) for request in job.answers)
    read = sum(prompts.values())
    return {
        "prompt_tokens": read,
        "completion_tokens": new,
        "total_tokens": read + new,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; if its bytes are not UTF-8, as `bytes:\\xf0`, as in OpenAI's API."""
    own = tokenizer.token_bytes(token)
    try:
        own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)
    return tokenizer.piece(token)


class TextOffsets:
    """Finds, token by token, the index of the character with which the text of a token begins, in a text whose first
    token begins at `start`. `before` are the tokens before the first one. Tokens of parts of a character all begin with
    this character."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), start: int = 0) -> None:
        self.stream = TextStream(tokenizer, before)
        self.offset = self.length = start  # of the last token, and of the text that `stream` has returned

    def push(self, token: int) -> int:
        complete = self.stream.text().rstrip("\ufffd")  # a character that is incomplete makes others before it invalid
        self.offset = max(self.offset, self.length + len(complete))
        self.length += len(self.stream.push(token))
        return self.offset


def of_completion(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprob | int], offsets: Sequence[int], top: int
) -> dict[str, Any]:
    """Log-probabilities in the format of /v1/completions. A token without one, such as the first of a prompt, is given
    as its id; `offsets` are the indices of the characters with which the tokens' texts begin."""
    result: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [*offsets],
    }
    for one in tokens:
        token = one if isinstance(one, int) else one.token
        result["tokens"].append(spelled(tokenizer, token))
        if isinstance(one, int):
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        result["token_logprobs"].append(max(one.logprob, LEAST))
        best = {spelled(tokenizer, i): max(value, LEAST) for i, value in one.alternatives[:top]}
        result["top_logprobs"].append({spelled(tokenizer, token): max(one.logprob, LEAST)} | best if top else None)
    return result


def of_chat(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    """Log-probabilities in the format of /v1/chat/completions."""

    def record(token: int, logprob: float) -> dict[str, Any]:
        own = list(tokenizer.token_bytes(token))
        return {"token": spelled(tokenizer, token), "logprob": max(logprob, LEAST), "bytes": own}

    content = [
        record(one.token, one.logprob) | {"top_logprobs": [record(*other) for other in one.alternatives[:top]]}
        for one in tokens
    ]
    return {"content": content, "refusal": None}
