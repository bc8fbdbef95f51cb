"""One merge of byte pair encoding."""

from random import Random

from onward.learn.exercise import Exercise, Mistake


def merge(tokens: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """Replace each occurrence of a pair of adjacent tokens by one new token, from left to right.

    A token belongs to one pair only: merge([7, 7, 7], (7, 7), 9) is [9, 7].
    """
    merged, i = [], 0
    while i < len(tokens):
        if tuple(tokens[i : i + 2]) == pair:
            merged.append(new)
            i += 2
        else:
            merged.append(tokens[i])
            i += 1
    return merged


def draw(pick: Random) -> tuple[list[int], tuple[int, int], int]:
    tokens = pick.choices([1, 2], [2, 1], k=pick.randint(3, 9))
    return tokens, pick.choice([(1, 1), (1, 1), (1, 2), (2, 1)]), 9


EXERCISE = Exercise(
    chapter=2,
    answer=merge,
    draw=draw,
    mistakes=(
        Mistake("i += 2", "i += 1", "the second token of a pair is read again: after a merge, go on two tokens later"),
        Mistake(
            "i < len(tokens)",
            "i < len(tokens) - 1",
            "the last token is lost if it is in no pair: read up to the last one",
        ),
        Mistake(
            "            i += 2", "            return merged + tokens[i + 2 :]", "only the first pair is merged: go on"
        ),
        Mistake(
            "== pair", "in (pair, pair[::-1])", "the reversed pair is merged too: the order of the two tokens counts"
        ),
        Mistake(
            "            merged.append(new)",
            "            merged += [new, tokens[i + 1]]",
            "the second token of a pair is kept: the new token replaces both",
        ),
        Mistake("merged.append(tokens[i])", "pass", "tokens outside of pairs are lost: keep them"),
        Mistake(
            "    merged, i = [], 0",
            "    for j in range(len(tokens) - 1, 0, -1):\n"
            "        if tuple(tokens[j - 1 : j + 1]) == pair:\n"
            "            tokens = [*tokens[: j - 1], new, *tokens[j + 1 :]]\n"
            "    return tokens\n"
            "    merged, i = [], 0",
            "pairs are merged from the right: begin on the left, so that 7 7 7 becomes 9 7",
        ),
        Mistake(
            "tuple(tokens[i : i + 2])",
            "tokens[i : i + 2]",
            "nothing is merged: a list never equals a tuple, so compare tuple(tokens[i : i + 2])",
        ),
        Mistake("merged.append(new)", "merged.append(pair)", "the pair itself is inserted: insert the new token"),
    ),
)
