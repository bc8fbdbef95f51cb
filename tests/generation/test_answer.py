"""Stop texts end an answer however they are split into tokens, and appear in it only with `include`."""

from hypothesis import given
from hypothesis import strategies as st

from onward import Answer, train_tokenizer
from onward.generation.answer import StopText

LETTERS = st.text("ab\n", min_size=1, max_size=4)


def in_one_sweep(text: str, stops: list[str], include: bool) -> str:
    """The text up to the first complete stop text (including it with `include`), found character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - max(map(len, found))]
    return text


@given(st.lists(st.text("ab\n", max_size=5), max_size=8), st.lists(LETTERS, max_size=3), st.booleans())
def test_pieces_join_to_the_text_up_to_the_first_stop(pieces: list[str], stops: list[str], include: bool) -> None:
    stream, said = StopText(stops, include), ""
    for piece in pieces:
        said += stream.push(piece)
        whole = in_one_sweep("".join(pieces), stops, include)
        assert whole.startswith(said)  # returned text is never withdrawn later
        if stream.stopped:
            break
    said += "" if stream.stopped else stream.finish()
    assert said == in_one_sweep("".join(pieces), stops, include)


@given(pieces=st.lists(st.text("ab\n", max_size=5), max_size=8), stops=st.lists(LETTERS, max_size=3))
def test_text_that_cannot_begin_a_stop_is_passed_at_once(pieces: list[str], stops: list[str]) -> None:
    stream = StopText(stops)
    for piece in pieces:
        stream.push(piece)
        if stream.stopped:
            break
        assert all(any(stop.startswith(stream.pending) for stop in stops) for _ in stream.pending[:1])


def test_overlapping_stop_texts() -> None:
    stream = StopText(["\n\nUser", "\n\n"])
    assert [stream.push(p) for p in ("one\n", "two\n", "\n", "User")][:3] == ["one", "\ntwo", ""]
    assert stream.stopped


def test_stop_text_that_the_last_token_completes_ends_the_answer() -> None:
    tokenizer = train_tokenizer("byte", [])
    half = tokenizer.encode("é")[0]  # the first byte of a character, held back until the end
    answer = Answer(tokenizer, stop=["\ufffd"], limit=2)
    assert [answer.push(token) for token in (*tokenizer.encode("a"), half)] == [False, True]
    assert answer.finish() == "a"
