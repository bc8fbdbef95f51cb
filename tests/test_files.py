"""Files are complete, unchanged or absent."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import UserError
from onward.base.files import atomic_write, read_json, write_json
from onward.cli import main

from support import disk


@given(old=st.none() | st.binary(max_size=50), new=st.binary(max_size=50), fails=st.booleans())
def test_a_file_is_the_old_one_or_the_new_one(old: bytes | None, new: bytes, fails: bool, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("whole") / "file"
    if old is not None:
        path.write_bytes(old)
    try:
        with atomic_write(path) as beside:
            beside.write_bytes(new)
            assert (path.read_bytes() if path.exists() else None) == old
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert (path.read_bytes() if path.exists() else None) == (old if fails else new)
    assert {p.name for p in path.parent.iterdir()} <= {"file"}


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    def interrupted() -> None:
        with atomic_write(tmp_path / "a") as new:
            (new / "inner").mkdir(parents=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())
    with atomic_write(tmp_path / "a") as new:
        (new / "inner").mkdir(parents=True)
        (new / "inner" / "file").write_text("x")
    assert [p.name for p in tmp_path.rglob("*")] == ["a", "inner", "file"]


def test_a_full_disk_is_one_sentence_and_the_old_file_stays(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"old": 1})
    with (
        disk.with_room_for(100),
        pytest.raises(UserError, match=r"cannot write .*a.json: .*; its former content is kept"),
    ):
        write_json(tmp_path / "a.json", ["long"] * 100)
    assert read_json(tmp_path / "a.json") == {"old": 1}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("place", ["file/inner/new.json", "file/new.json", "folder"])
def test_a_place_where_nothing_can_be_written_is_one_sentence(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(
        UserError, match="cannot write .*: .*; " + ("its former" if place == "folder" else "no part of")
    ):
        write_json(tmp_path / place, {})
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder", "full"]


@given(data=st.binary(max_size=30) | st.text(max_size=30).map(str.encode))
def test_any_bytes_are_a_table_or_refused(data: bytes, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_bytes(data)
    try:
        assert isinstance(read_json(path), dict)
    except UserError:
        pass


REPLACES = {  # a command with --out or the like, and the ending that its file needs
    "draw mask --out {}": (".json", "exists and does not hold the numbers of a picture"),
    "draw window --out {}": (".csv", "exists and does not hold the numbers of a picture"),
    "scaling optimum --flops 1e20 --out {}": (".csv", "exists and does not hold the numbers of a picture"),
    "convert RUN {} --to gguf": (".jsonl", "exists and is no GGUF file"),
    "learn 1 --web {}": (".py", "choose a name that ends in .html"),
    "learn 1 --notebook {}": (".html", "choose a name that ends in .ipynb"),
    "learn 1 --starter {}": (".txt", "choose a name that ends in .py"),
    "doctor nofile.py:GPT --html {}": (".py", "choose a name that ends in .html"),
    "report RUN --out {}": (".json", "choose a name that ends in .html"),
    "explain RUN word --out {}": (".json", "exists and does not hold the numbers of a picture"),
    "evaluate RUN RUN --answers {0} --page {0}": (".txt", "choose a name that ends in .html"),
}


@pytest.mark.parametrize("words", REPLACES)
def test_a_page_or_picture_does_not_replace_data(
    words: str, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ending, message = REPLACES[words]
    path = tmp_path / f"mine{ending}"
    if "--starter" not in words:
        path.write_text("my data, which no command may lose")
    assert main(words.replace("RUN", str(tiny_run)).format(path).split()) == 2
    assert message in capsys.readouterr().err
    assert "--starter" in words or path.read_text() == "my data, which no command may lose"


@pytest.mark.parametrize("words", ["draw mask", "draw samplers", "scaling optimum --flops 1e20", "explain RUN word"])
@pytest.mark.parametrize("ending", [".json", ".csv"])
def test_a_picture_replaces_its_numbers(words: str, ending: str, tiny_run: Path, tmp_path: Path) -> None:
    if words.startswith("explain") and ending == ".csv":
        return
    for _ in range(2):
        assert not main([*words.replace("RUN", str(tiny_run)).split(), "--out", str(tmp_path / f"x{ending}")])
