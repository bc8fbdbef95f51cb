"""Rewards from a judge on a server: grades, wins in pairs, and a judge that is busy, slow or wrong."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from onward import UserError
from onward.evaluation import endpoint, judging
from onward.training import Completion, OpenReward, reward_of

from support.judge import Server, judge_server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with judge_server(monkeypatch) as server:
        yield server


def judged(server: Server, texts: list[str], options: str = "", kind: str = "judge", **columns: Any) -> list[float]:
    """The scores of texts from the model m on a server."""
    address = f"http://127.0.0.1:{server.server_port}/v1/"
    reward = OpenReward(reward_of(f"{kind}(url='{address}', model=m{options})"))
    return reward([Completion("Say hello", text, "hi", columns) for text in texts])


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        ("7", 0.7),
        ("I give it 7.5 of 10.", 0.75),
        ("Grade: 10/10", 1.0),
        ("Among 100 answers, this is an 8.", 0.8),
        ("<think>Is it a 3 or a 4?</think>\n**4**", 0.4),
    ],
)
def test_a_judge_grades_from_0_to_10(server: Server, reply: str, wanted: float) -> None:
    server.replies = [(200, reply)]
    assert judged(server, ["hello"]) == [wanted]


def test_a_judge_is_asked_in_the_words_of_its_prompt(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.replies = [(200, lambda text: text.rpartition(" ")[2])]
    options = ", prompt='{\"a\": {prompt}, {answer}, {level}, {other}} {completion}', key_env=KEY"
    assert judged(server, [str(i) for i in range(10)], options, level=3) == [i / 10 for i in range(10)]
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert body["model"] == "m"
    assert body["messages"][0]["content"].startswith('{"a": Say hello, hi, 3, {other}} ')
    monkeypatch.setenv("KEY", "secret")
    judged(server, ["1"], options)
    assert server.requests[-1][1]["Authorization"] == "Bearer secret"


def test_a_judge_is_asked_again_while_it_is_busy(server: Server) -> None:
    server.replies = [(429, b"busy"), (503, b""), (200, b"not JSON"), (200, "no grade"), (200, "9")]
    assert judged(server, ["hello"]) == [0.9]
    assert len(server.requests) == 5


SHORT = ", prompt='{prompt}|{answer}|{first}|{second}'"


def longer(text: str) -> str:
    """The reply of a judge that prefers the longer answer, or the first if both have the same length."""
    *_, first, second = text.split("|")
    return "<think>A or B?</think> **A**" if len(first) >= len(second) else "It is B."


@pytest.mark.parametrize(
    ("texts", "wanted", "requests"),
    [
        (["a", "aaa"], [0.0, 1.0], 2),
        (["ab", "ba"], [0.5, 0.5], 2),  # the judge replies A in both orders, which is a tie
        (["a", "a"], [0.5, 0.5], 0),
        (["aa", "a", "aaa", "a"], [2 / 3, 1 / 6, 1.0, 1 / 6], 10),
        (["a"], [0.0], 0),
    ],
)
def test_a_pairwise_judge_scores_the_share_of_wins(
    server: Server, texts: list[str], wanted: list[float], requests: int
) -> None:
    server.replies = [(200, longer)]
    assert judged(server, texts, SHORT, "pairwise") == pytest.approx(wanted)
    assert len(server.requests) == requests


def test_a_pairwise_judge_compares_completions_of_one_prompt(server: Server) -> None:
    server.replies = [(200, longer)]
    address = f"http://127.0.0.1:{server.server_port}/v1"
    reward = OpenReward(reward_of(f"pairwise(url='{address}', model=m{SHORT})"))
    lengths = [("p", 1), ("p", 2), ("q", 4), ("q", 3)]
    assert reward([Completion(prompt, "a" * n) for prompt, n in lengths]) == [0, 1, 1, 0]
    asked = {body["messages"][0]["content"] for _, _, body in server.requests}
    assert asked == {"p||a|aa", "p||aa|a", "q||aaaa|aaa", "q||aaa|aaaa"}


@pytest.mark.parametrize("reply", ["Both A and B", "neither", "Answer C", "a"])
def test_a_pairwise_judge_without_a_verdict_is_one_sentence(server: Server, reply: str) -> None:
    server.replies = [(200, reply)]
    with pytest.raises(UserError, match="without either A or B alone, 5 times: check the server"):
        judged(server, ["a", "b"], "", "pairwise")


@pytest.mark.parametrize(
    ("status", "reply", "sentence"),
    [
        (500, b"", "answered with status 500, 5 times"),
        (401, b"no\nkey", "refused with status 401 (no key): set OPENAI_API_KEY to a key"),
        (404, b"no such model", "refused with status 404 (no such model): check url and model"),
        (302, b"", "refused with status 302"),
        (200, "good", "replied 'good', without a number from 0 to 10, 5 times"),
        (200, b'{"choices": []}', "which is not a chat completion, 5 times"),
        (200, b" " * (endpoint.REPLY + 1), "replied with more than 1,048,576 bytes, 5 times"),
    ],
)
def test_a_judge_that_fails_is_one_sentence(server: Server, status: int, reply: Any, sentence: str) -> None:
    server.replies = [(status, reply)]
    with pytest.raises(UserError) as caught:
        judged(server, ["hello"])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_judge_that_is_not_there_or_slow_is_one_sentence(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "ATTEMPTS", 2)
    release = threading.Event()
    server.replies = [(200, lambda text: str(release.wait(5)))]
    with pytest.raises(UserError, match=r"cannot be asked .*timed out.*, 2 times"):
        judged(server, ["hello"], ", seconds=0.1")
    release.set()
    with pytest.raises(UserError, match=r"the judge m at http://127.0.0.1:9 cannot be asked .*refused"):
        OpenReward(reward_of("judge(url='http://127.0.0.1:9', model=m)"))([Completion("", "a")])
