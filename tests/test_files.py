"""Files are complete, unchanged or absent."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import UserError
from onward.base.files import atomic_write, read_json, write_json

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
