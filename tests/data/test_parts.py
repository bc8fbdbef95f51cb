"""Parts prepared by several machines are joined into the same folder that one machine writes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from onward import UserError, train_tokenizer
from onward.data.formats import PieceSizes
from onward.data.parts import join_parts, part_folder, prepare_part
from onward.data.prepare import Cleaning, MachinePart, prepare

from support.grids import first

BYTE = train_tokenizer("byte", [])
SMALL = PieceSizes(piece_chars=3000, block_bytes=500, serial_bytes=1 << 30)
CLEANINGS = {
    "duplicates": Cleaning(),
    "near duplicates and filters": Cleaning(near=0.7, min_words=20),
    "everything kept": Cleaning(exact=False),
    "near duplicates alone": Cleaning(exact=False, near=0.7),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, story: str) -> list[str]:
    """Documents in several units and sources; some are equal or similar, and a document of many units occurs twice."""
    place = tmp_path_factory.mktemp("corpus")
    (place / "many").mkdir()
    for i in range(8):
        (place / f"many/{i:02}.txt").write_text(story[i * 150 : i * 150 + 700])
    (place / "one.txt").write_text(story[:7000])
    (place / "same.txt").write_text(story[:7000])
    rows = [story[i * 40 : i * 40 + 600] for i in range(12)] + [story[:600], story[:590] + " the end."]
    (place / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows * 2))
    return [str(place / name) for name in ("many", "one.txt", "same.txt", "rows.jsonl")]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def parts(sources: list[str], folder: Path, count: int, **options: Any) -> list[Path]:
    numbers = reversed(range(1, count + 1))
    return [prepare_part(sources, BYTE, folder, MachinePart(n, count), sizes=SMALL, **options) for n in numbers]


@pytest.mark.parametrize("count", first(1, [3, 1, 20]))
@pytest.mark.parametrize("cleaning", first(3, CLEANINGS))
def test_joined_parts_are_the_folder_of_one_machine(
    cleaning: str, count: int, sources: list[str], tmp_path: Path
) -> None:
    prepare(sources, BYTE, tmp_path / "whole", cleaning=CLEANINGS[cleaning], workers=1, sizes=SMALL)
    parts(sources, tmp_path / "joined", count, cleaning=CLEANINGS[cleaning])
    join_parts(tmp_path / "joined")
    assert content(tmp_path / "joined") == content(tmp_path / "whole")


def test_part_that_is_missing_changed_or_different_is_named(sources: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "joined"
    with pytest.raises(UserError, match="has no parts to join"):
        join_parts(folder)
    third, second, _ = parts(sources, folder, 3)
    shutil.move(second, tmp_path / "aside")
    with pytest.raises(UserError, match=r"part-2-of-3 of 3 parts\)"):
        join_parts(folder)
    prepare_part(sources[:1], BYTE, folder, MachinePart(2, 3), sizes=SMALL)
    with pytest.raises(UserError, match=r"part-2-of-3 was prepared from other sources or settings \(sources"):
        join_parts(folder)
    shutil.rmtree(second)
    shutil.move(tmp_path / "aside", second)
    shard = next(third.glob("*.bin"))
    shard.write_bytes(b"\0" + shard.read_bytes()[1:])
    with pytest.raises(UserError, match=f"{shard.name} is missing or has changed"):
        join_parts(folder)
    assert not folder.exists()


@pytest.mark.parametrize("text", ["", "3", "0/2", "3/2", "1/2/3", "-1/2", "1/x", "١/٢"])
def test_part_is_a_number_of_a_number(text: str) -> None:
    with pytest.raises(UserError, match="give its number, from 1, and the number of parts"):
        MachinePart.parse(text)


def test_part_needs_a_tokenizer_and_files(sources: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Cannot learn the tokenizer 'bpe:300' from one part of the texts"):
        prepare_part(sources, "bpe:300", tmp_path / "out", MachinePart(1, 2))
    with pytest.raises(UserError, match="because a stream can be read only once"):
        prepare_part(["-"], BYTE, tmp_path / "out", MachinePart(1, 2))
    assert part_folder(tmp_path / "out", MachinePart(3, 16)) == tmp_path / "out.part-3-of-16"
