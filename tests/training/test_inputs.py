"""The inputs of a run, texts and prepared folders, are the same when it resumes as when it was started."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onward import Run, RunConfig, Tokens, UserError, Windows, train_tokenizer
from onward.data.prepare import prepare
from onward.training import inputs_of
from onward.training.inputs.texts import open_inputs
from onward.training.run.checks import start_checks

from support.runs import SETTINGS, TINY, config


@pytest.fixture
def prepared(story_file: Path, tmp_path: Path) -> Path:
    """Two sources prepared with another tokenizer; one is the story."""
    other = tmp_path / "other.txt"
    other.write_text("A queen sailed to an island.\n" * 60)
    prepare([str(story_file), str(other)], "bpe:300", tmp_path / "prepared", workers=1)
    return tmp_path / "prepared"


def started(tmp_path: Path, *sources: object, **changes: object) -> Run:
    values = SETTINGS | {"steps": 4, "validate_every": 2, "tokenizer": ""} | changes
    return Run.start(RunConfig(sources=tuple(map(str, sources)), out=str(tmp_path / "run"), **values))


def test_prepared_folder_is_used_in_place_with_its_tokenizer(prepared: Path, tmp_path: Path) -> None:
    run = started(tmp_path, prepared)
    assert run.tokenizer.vocab_size == 300
    assert len(run.inputs.train) == 1
    assert not (run.folder / "data").exists()
    list(run.train())
    assert (run.folder / "model.safetensors").exists()


def test_texts_and_prepared_folders_keep_their_order(prepared: Path, tmp_path: Path) -> None:
    text = tmp_path / "third.txt"
    text.write_text("The end of it all.\n" * 50)
    run = started(tmp_path, text, prepared, weights=(0.3, 0.7))
    first = run.tokenizer.decode(run.inputs.train[0][:40].tolist())
    assert first.startswith("The end of it all.")
    second = run.tokenizer.decode(run.inputs.train[1][:].tolist())
    assert "mat" in second
    assert "A queen" in second
    assert isinstance(run.planner.windows, Windows)
    assert (run.planner.windows.mixture.locate(np.arange(10_000))[0] == 0).mean() == 0.3


def test_the_validation_text_is_the_end_of_each_source(prepared: Path, tmp_path: Path) -> None:
    run = started(tmp_path, prepared, validation="0.25")
    text = run.tokenizer.decode(run.inputs.validation[:].tolist())
    assert text.endswith("island.\n")
    assert "mat" in text
    assert inputs_of(run.folder).validation[:].tolist() == run.inputs.validation[:].tolist()
    assert len(run.inputs.validation) == pytest.approx(run.inputs.tokens / 3, rel=0.02)


@pytest.mark.parametrize(
    ("lengths", "share", "train", "validation"),
    [
        ([60, 30, 10], 0.1, [60, 30], [10]),  # a document begins exactly at the share
        ([60, 33, 7], 0.1, [60, 33], [7]),
        ([60, 25, 15], 0.1, [60, 25], [15]),
        ([70, 25, 5], 0.2, [70], [25, 5]),  # the earlier document start is nearer
        ([10, 90], 0.1, [10, 80], [10]),  # the nearest start would more than double the validation text
        ([100], 0.1, [90], [10]),
    ],
)
def test_validation_begins_with_the_nearest_document_where_documents_are_packed(
    lengths: list[int], share: float, train: list[int], validation: list[int], tmp_path: Path
) -> None:
    rows = [json.dumps({"text": chr(97 + i) * (length - 1)}) for i, length in enumerate(lengths)]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    options = {"tokenizer": "byte", "validation": str(share), "weights": ()}
    run = started(tmp_path, tmp_path / "t.jsonl", pack="documents", model=TINY | {"context_length": 4}, **options)

    def sizes(tokens: Tokens) -> list[int]:
        return np.diff([*tokens.starts(0, len(tokens)), len(tokens)]).tolist()

    assert [sizes(run.inputs.train[0]), sizes(run.inputs.validation)] == [train, validation]
    assert run.inputs.cut_documents == (sum(train) not in np.cumsum(lengths))
    plain = open_inputs(replace(run.config, pack="stream"), run.folder)
    assert len(plain.validation) == round(share * sum(lengths)), "documents that are not packed are one text"


@pytest.mark.parametrize("validation", ["prepared", "pipe"])
def test_validation_text_may_be_a_prepared_folder_or_a_pipe(
    validation: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    # absolute path, since the thread may start after the directory changes
    source, text = tmp_path / "pipe", "A queen sailed to an island.\n" * 60
    threading.Thread(target=source.write_text, args=[text], daemon=True).start()
    run = started(tmp_path, prepared, validation=validation)
    assert run.tokenizer.decode(run.inputs.validation[:].tolist()).endswith("island.\n")
    assert inputs_of(run.folder).validation[:].tolist() == run.inputs.validation[:].tolist()


def test_another_validation_text_is_kept_apart(prepared: Path, story_file: Path, tmp_path: Path) -> None:
    run = started(tmp_path, story_file, validation=str(story_file), tokenizer="char")
    assert run.inputs.validation[:].tolist() == run.inputs.train[0][:].tolist()
    texts = run.inputs.train, run.inputs.validation
    (check,) = [
        check
        for check in start_checks(run.model, run.planner.first_batch(), *texts, fresh=True)
        if check.name == "validation"
    ]
    assert not check.ok


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "another tokenizer": ({"tokenizer": "byte"}, "have different tokenizers"),
    "weights for more sources": ({"weights": (0.5, 0.3, 0.2)}, "3 weights for 1 sources"),
    "a share beyond 1": ({"validation": "1.5"}, r"validation is 1\.5"),
    "a validation text that is not there": ({"validation": "gone.txt"}, r"gone\.txt does not exist"),
    "an impossible model": ({"model": {"d_model": 30, "n_heads": 4}}, "30 is not divisible"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unfit_inputs_are_one_sentence_and_leave_no_folder(case: str, prepared: Path, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        started(tmp_path, prepared, **changes)
    assert not (tmp_path / "run").exists()


def edit(path: Path, change: Callable[[dict], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def another_tokenizer(run: Path, prepared: Path) -> None:
    train_tokenizer("byte", []).save(run)


def another_architecture(run: Path, prepared: Path) -> None:
    edit(run / "run.json", lambda values: values["model"].update(n_layers=3))


def other_tokens(run: Path, prepared: Path) -> None:
    edit(prepared / "data.json", lambda values: values.update(report={}))


def a_changed_shard(run: Path, prepared: Path) -> None:
    shard = next(prepared.glob("*.bin"))
    data = bytearray(shard.read_bytes())
    data[7] ^= 1
    shard.write_bytes(data)


def a_vanished_source(run: Path, prepared: Path) -> None:
    shutil.rmtree(prepared)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (another_tokenizer, ["the tokenizer"]),
        (another_architecture, [r"model.n_layers (2 then, 3 now)"]),
        (other_tokens, ["the tokens in", "prepared"]),
        (a_vanished_source, ["the tokens in", "prepared"]),
        (a_changed_shard, ["has changed since it was written"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_run_goes_on_only_as_it_was_started(
    change: Callable[[Path, Path], None], said: list[str], prepared: Path, tmp_path: Path
) -> None:
    run = started(tmp_path, prepared)
    for _ in run.train(stop=lambda: run.step == 2):
        pass
    change(run.folder, prepared)
    with pytest.raises(UserError) as caught:
        Run.resume(run.folder)
    assert all(words in str(caught.value) for words in said)
    assert "\n" not in str(caught.value)


def test_everything_that_differs_is_listed(prepared: Path, tmp_path: Path) -> None:
    run = started(tmp_path, prepared)
    for change in another_tokenizer, another_architecture, other_tokens:
        change(run.folder, prepared)
    with pytest.raises(UserError, match=r"the tokens in .*, the tokenizer, model\.vocab_size .*, model\.n_layers"):
        Run.resume(run.folder)


def test_text_is_prepared_once_and_may_change_later(story_file: Path, tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    shutil.copy(story_file, text)
    run = Run.start(config(text, tmp_path / "run", steps=4, model=TINY))
    text.unlink()
    for _ in run.train(stop=lambda: run.step == 2):
        pass
    assert Run.resume(run.folder).step == 2
