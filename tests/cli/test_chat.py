"""onward chat: the conversation is remembered, turns can be undone, and Ctrl-C does not end the program."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import Decoder, DecoderConfig, LanguageModel, SelfAttention, train_tokenizer
from onward.cli import main
from onward.cli.commands.chat import Options, TerminalChat

from support.reading import tokens_read

MAIN = [sys.executable, "-c", "import sys; from onward.cli import main; sys.exit(main())"]
TEMPLATE = "{% for m in messages %}{{ m.role[0] ~ m.content }}|{% endfor %}{% if add_generation_prompt %}a{% endif %}"
HOW: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_new_tokens": 20}
WORDS = ["--temperature", "1", "--seed", "5", "--max-new-tokens", "20"]


def make(folder: Path, context_length: int, **changes: object) -> Path:
    """The folder of an untrained model with a chat template."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer("char", ["abcdefghijklmnopqrstuvwxyz |\n"])
    tokenizer.templates = {"default": TEMPLATE}
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1}
    config = DecoderConfig(tokenizer.vocab_size, context_length=context_length, **sizes | changes)  # type: ignore[arg-type]
    onward.save(LanguageModel(Decoder(config), tokenizer), folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models"), 256)


def said(lines: str, folder: Path, *words: str, monkeypatch: pytest.MonkeyPatch, capsys, status: int = 0) -> str:
    """The output of the command for these lines from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", str(folder), *words]) == status
    return capsys.readouterr().out


def answers(lm: LanguageModel, *messages: str, system: str = "") -> list[str]:
    """The model's answers to consecutive messages."""
    turns, found = [{"role": "system", "content": system}] if system else [], []
    for message in messages:
        turns.append({"role": "user", "content": message})
        found.append(lm.chat(turns, **HOW))
        turns.append({"role": "assistant", "content": found[-1]})
    return found


@pytest.mark.parametrize("system", ["", "be kind"])
def test_each_answer_follows_from_the_whole_conversation(system: str, folder: Path, monkeypatch, capsys) -> None:
    words = [*WORDS, *(["--system", system] if system else [])]
    expected = answers(onward.load(folder), "hello", "why", "and then", system=system)
    lines = "hello\n\n why \nand then"
    assert said(lines, folder, *words, monkeypatch=monkeypatch, capsys=capsys) == "".join(f"{a}\n" for a in expected)
    rows = said(lines, folder, *words, "--json", monkeypatch=monkeypatch, capsys=capsys).splitlines()
    assert [json.loads(row) for row in rows] == [{"role": "assistant", "content": answer} for answer in expected]


def test_reset_and_undo_take_messages_back_and_exit_leaves(folder: Path, monkeypatch, capsys) -> None:
    lm = onward.load(folder)
    lines = "one\ntwo\n/undo\nthree\n/reset\nfour\n/undo\n/undo\n/undo\nfive\n/exit\nsix\n"
    rows = said(lines, folder, *WORDS, "--json", monkeypatch=monkeypatch, capsys=capsys).splitlines()
    one, two, three = *answers(lm, "one", "two"), answers(lm, "one", "three")[1]
    expected = [one, two, three, *answers(lm, "four"), *answers(lm, "five")]
    assert [json.loads(row)["content"] for row in rows] == expected


def test_settings_change_what_follows(folder: Path, monkeypatch, capsys) -> None:
    lines = "/set temperature 0\n/set max-new-tokens 7\n/set\none\n/set regex [a-c]{3}\ntwo\n"
    *listed, first, second = said(lines, folder, monkeypatch=monkeypatch, capsys=capsys).splitlines()
    assert {"temperature 0.0", "max_new_tokens 7", "top_p 1.0"} <= set(listed)
    assert first == onward.load(folder).chat("one", 7, temperature=0)
    assert len(second) == 3
    assert set(second) <= set("abc")


def test_an_answer_may_have_no_tokens(folder: Path, monkeypatch, capsys) -> None:
    lines = "one\n/set max-new-tokens 5\ntwo\n/set max-new-tokens 0\nthree"
    rows = said(lines, folder, "--max-new-tokens", "0", "--seed", "5", monkeypatch=monkeypatch, capsys=capsys)
    first, second, third = rows.split("\n")[:-1]
    assert (first, third) == ("", "")
    assert second


def test_help_names_every_command(folder: Path, monkeypatch, capsys) -> None:
    out = said("/help\n", folder, monkeypatch=monkeypatch, capsys=capsys)
    assert all(word in out for word in ("/reset", "/undo", "/set", "/help", "/exit", "Ctrl-C", "Ctrl-D"))


BAD = {
    "/set temperature hot": "temperature is 'hot': it takes a number",
    "/set temperature -1": "temperature is -1.0: it must be a number from 0",
    "/set temprature 1": "did you mean temperature?",
    "/set processors x": "processors is not a setting",
    "/set n 2\nhello": "n is not a setting",
    "/set adapter none": "adapter is not a setting",
    "/set regex (\nhello": "unclosed group",
    "/rest": "did you mean /reset?",
    "/undo all": "did you mean /undo?",
    "hello " * 50: "this message is 47 tokens too long for a context of 256",
}


@pytest.mark.parametrize("lines", BAD)
def test_a_mistake_in_a_script_is_one_sentence(lines: str, folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert BAD[lines] in captured.err
    assert captured.err.count("\n") == 1


def test_a_conversation_that_gets_too_long_loses_its_beginning_and_says_so(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(["a" * 40] * 9)))
    assert main(["chat", str(folder), "--system", "hm", *WORDS, "--context", "100", "--regex", "[a-z]{20}"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "the context is full, so the oldest turns are dropped: 1\n" * 8
    lm = onward.load(folder)
    rows = captured.out.splitlines()
    for row in rows[1:]:  # each request contains the system prompt
        one = [{"role": "system", "content": "hm"}, {"role": "user", "content": "a" * 40}]
        assert row == lm.chat(one, regex="[a-z]{20}", **HOW)


@pytest.mark.parametrize(
    "changes", [{}, {"attention": (SelfAttention(window=20), SelfAttention())}], ids=["all", "windows"]
)
def test_what_was_read_before_is_not_read_again(changes: dict, tmp_path: Path, capsys, monkeypatch) -> None:
    lm = onward.load(make(tmp_path, 512, **changes))
    options = Options(model="", json=True, regex="[a-z]{60}", **HOW | {"max_new_tokens": 60})
    conversation, read = TerminalChat(lm, options), tokens_read(monkeypatch)
    for turn, message in enumerate(["b" * 50, "c" * 30, "d" * 20]):
        read.clear()
        conversation.answer(message)
        new = len(message) + 4 + 60
        assert sum(read) <= new + 16  # up to one block is computed again
        assert len(conversation.turns) == 2 * turn + 2
    plain = lm.chat(conversation.turns[:-1], regex=options.regex, **HOW | {"max_new_tokens": 60})
    assert conversation.turns[-1]["content"] == plain


def test_a_conversation_is_decoded_by_compiled_steps(folder: Path) -> None:
    lm = onward.load(folder)
    cache = TerminalChat(lm, Options(model="")).empty_cache()
    assert onward.Engine(lm.model, rows=1, cache=cache).compile() == ""


def test_an_answer_may_fill_the_context_to_its_last_token(folder: Path, capsys) -> None:
    conversation = TerminalChat(onward.load(folder), Options(model="", json=True, context=37, seed=1, regex="[a-z]*"))
    conversation.settings = replace(conversation.settings, suppress_tokens=tuple(conversation.lm.stop_token_ids))
    conversation.answer("abc")
    assert len(conversation.turns[-1]["content"]) == 37 - 6


def test_ctrl_c_stops_the_answer_which_is_kept_and_the_program_goes_on(tmp_path: Path) -> None:
    make(tmp_path, 100_000)
    words = ["--context", "100000", "--max-new-tokens", "90000", "--min-new-tokens", "90000", "--regex", "[a-z]*"]
    with subprocess.Popen(
        [*MAIN, "chat", str(tmp_path), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        begun = os.read(process.stdout.fileno(), 10)
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"/set min-new-tokens 0\n/set max-new-tokens 5\nwhy\n/exit\n")
        out, error = process.communicate()
    assert process.returncode == 0
    # a message about the second answer
    assert error in (b"", b"the answer was cut after 5 tokens: see --max-new-tokens\n")
    first, second = (begun + out).decode().splitlines()
    assert 0 < len(first) < 90_000
    assert 0 <= len(second) <= 5


def test_on_a_terminal_it_asks_ctrl_c_asks_again_and_ctrl_d_leaves(folder: Path) -> None:
    ours, its = pty.openpty()
    with subprocess.Popen(
        [*MAIN, "chat", str(folder), *WORDS], stdin=its, stdout=its, stderr=subprocess.PIPE
    ) as process:
        os.close(its)
        seen = b""

        def until(text: bytes, again: Callable[[], object] = lambda: None) -> None:
            nonlocal seen
            while text not in seen:
                if select.select([ours], [], [], 1)[0]:
                    seen += os.read(ours, 1000)
                else:
                    again()
            seen = seen.partition(text)[2]

        until(b"> ")
        interrupt = lambda: process.send_signal(signal.SIGINT)
        interrupt()
        # an interrupt before the prompt appears takes effect at the next key
        until(b"(Ctrl-D or /exit leaves)", interrupt)
        until(b"> ")
        os.write(ours, b"/set top_p 7\n")
        until(b"> ")
        os.write(ours, b"hello\n")
        until(b"hello\r\n")
        until(b"> ")
        for _ in range(60):  # a Ctrl-D before the prompt appears is lost
            os.write(ours, b"\x04")
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
                break
        assert process.returncode == 0
        error = process.stderr.read().decode()
        os.close(ours)
    assert "top_p is 7.0: it must be a number from" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["text", "JSON"])
def test_answer_cut_by_its_length_is_said_in_text_mode(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n"))
    assert main(["chat", str(folder), "--max-new-tokens", "2", "--seed", "1", *words]) == 0
    assert ("the answer was cut after 2 tokens" in capsys.readouterr().err) == (not words)
