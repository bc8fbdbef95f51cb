"""The pair that byte pair encoding merges next."""

from random import Random

from onward.learn.exercise import Exercise, Mistake


def frequent_pair(words: dict[tuple[str, ...], int]) -> tuple[str, str]:
    """Return the pair of adjacent pieces that occurs most often in a text.

    words: each word of the text as its pieces, with the number of times that the word occurs. Pairs never cross the
    boundary of a word. One pair is the most frequent.
    """
    counts: dict[tuple[str, str], int] = {}
    for pieces, times in words.items():
        for i in range(len(pieces) - 1):
            pair = pieces[i], pieces[i + 1]
            counts[pair] = counts.get(pair, 0) + times
    return max(counts, key=lambda pair: counts[pair])


def draw(pick: Random) -> tuple[dict[tuple[str, ...], int]]:
    """Words in which (x, y) is the most frequent pair: in one frequent word, or in two."""
    x, y, z = pick.sample("abcdef", 3)
    times = pick.randint(7, 9)
    one = {(x, y): times, (y, x, z): pick.randint(1, 3), (z, y, x): pick.randint(1, 3)}
    two = {(x, y): times - 4, (x, y, z): times - 2, (z, x): times - 1}
    words = [*pick.choice([one, two]).items()]
    return (dict(pick.sample(words, len(words))),)


EXERCISE = Exercise(
    chapter=2,
    answer=frequent_pair,
    draw=draw,
    mistakes=(
        Mistake("+ times", "+ 1", "each word counts once: add the number of times that the word occurs"),
        Mistake("max(", "min(", "the rarest pair is returned: use max"),
        Mistake(
            "counts[pair] = counts.get(pair, 0) + times",
            "counts[pair] = times",
            "a later word replaces the count of an earlier one: add to it",
        ),
        Mistake(
            "max(counts, key=lambda pair: counts[pair])",
            "max(counts)",
            "the last pair of the alphabet is returned: give max the counts, key=counts.get",
        ),
        Mistake(
            "max(counts, key=lambda pair: counts[pair])",
            "max(counts.values())",
            "the count is returned: return the pair",
        ),
        Mistake(
            "max(counts, key=lambda pair: counts[pair])",
            "max(counts.items(), key=lambda item: item[1])",
            "the pair comes with its count, as from most_common: return the pair alone",
        ),
    ),
)
