"""The share of near duplicates that `near` finds, among pairs of texts whose similarity is known."""

import re
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest

from onward.data.duplicates import (
    KEPT,
    NEAR,
    PERMUTATIONS,
    RECALL,
    Verdicts,
    band_match_probability,
    band_width,
    signature,
)

WORDS = 400  # number of words in a text
ABOVE = -0.1, -0.05, 0.0, 0.02, 0.05  # similarities of pairs, relative to the threshold `near`
PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def signatures(similarity: float, pairs: int, words: count) -> np.ndarray:
    """Signatures of pairs of texts whose word 5-grams have this Jaccard similarity, (pairs, 2, PERMUTATIONS)."""
    grams = WORDS - 4
    shared = round(2 * grams * similarity / (1 + similarity)) + 4  # number of words that both texts begin with
    new = lambda number: " ".join(str(word) for word in islice(words, number))
    found = []
    for _ in range(pairs):
        common = new(shared)
        found.append([signature(f"{common} {new(WORDS - shared)}") for _ in range(2)])
    return np.array(found)


def measure(near: float, pairs: int, folder: Path) -> list[float]:
    """The shares of pairs that `near` finds: one share for each similarity in ABOVE, and one for the pairs whose
    signatures agree in at least the fraction `near` of their columns. Pairs whose signatures agree in fewer columns
    must not be found."""
    words = count()
    made = np.concatenate([signatures(near + above, pairs, words) for above in ABOVE])
    documents = len(made) * 2
    np.save(folder / "00000.npy", made.reshape(documents, PERMUTATIONS))
    np.savez(folder / "00000.npz", verdicts=np.full(documents, KEPT, np.uint8), hashes=np.arange(documents))
    verdicts = Verdicts(folder, 1)
    verdicts.drop_duplicates(exact=False, near=near)
    first, second = verdicts.verdicts.reshape(-1, 2).T
    assert (first == KEPT).all(), "the first of a pair is kept"
    alike, found = (made[:, 0] == made[:, 1]).mean(1) >= near, second == NEAR
    assert not found[~alike].any()
    return [*found.reshape(len(ABOVE), pairs).mean(1).tolist(), float(found[alike].mean())]


@pytest.mark.parametrize("near", [0.8, 0.9])
def test_near_finds_nearly_all_pairs_whose_signatures_are_similar_enough(near: float, tmp_path: Path) -> None:
    *by_similarity, alike = measure(near, 40, tmp_path)
    assert alike > 0.97
    assert by_similarity[0] < 0.05
    assert by_similarity[-1] > 0.85


@pytest.mark.long
def test_docs_give_the_measured_recall(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (0\.\d) \| (.*) % \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 4
    for near, shares in rows:
        measured = measure(float(near), 1000, tmp_path)
        written = [float(share) / 100 for share in shares.split(" % | ")]
        assert written == pytest.approx(measured, abs=0.006), [f"{share:.1%}" for share in measured]


@pytest.mark.parametrize(("agreeing", "width"), [(116, 14), (103, 8), (64, 3), (128, 128), (20, 1), (100, 60)])
def test_probability_that_a_band_agrees_is_exact(agreeing: int, width: int) -> None:
    random, trials = np.random.default_rng(0), 20_000
    columns = random.random((trials, PERMUTATIONS)).argsort(1) < agreeing
    bands = columns[:, : PERMUTATIONS // width * width].reshape(trials, -1, width)
    assert band_match_probability(agreeing, width) == pytest.approx(np.mean(np.any(np.all(bands, 2), 1)), abs=0.01)


def test_bands_find_pairs_at_any_similarity() -> None:
    for similarity in np.linspace(0.01, 1, 100):
        least = int(np.ceil(similarity * PERMUTATIONS))
        assert band_match_probability(least, band_width(float(similarity))) >= RECALL
    assert band_width(1.0) == PERMUTATIONS
