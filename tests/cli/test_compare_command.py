"""The options of variants: of the shared file, of their own file, of the command line and of --variant."""

from pathlib import Path

import pytest

from onward.cli import main
from onward.training.studies.variants import Variant


def test_file_overrides_the_shared_file_and_the_command_line_overrides_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    variants: list[Variant] = []
    monkeypatch.setattr("onward.cli.commands.compare.train_all", lambda known, *_: variants.extend(known) or 0)
    for name, text in {
        "a": "learning_rate = 0.001\nclip = 3.0",
        "b": "model.d_ff = 64\nclip = 4.0",
        "shared": "learning_rate = 0.01\nmodel.d_model = 32\nmodel.n_heads = 2\nclip = 5.0\nseeds = 1",
    }.items():
        Path(f"{name}.toml").write_text(text)
    command = ["compare", "a.toml", "b.toml", "--config", "shared.toml", "--steps", "3", "--clip", "2.0"]
    assert main([*command, "--variant", "c: learning_rate=0.1 clip=6", "--variant", "d: model.d_model=64"]) == 0
    options = {one.name: (one.config.learning_rate, one.config.clip) for one in variants}
    assert options == {"a": (0.001, 2.0), "b": (0.01, 2.0), "c": (0.1, 6.0), "d": (0.01, 2.0)}
    models = {one.name: one.config.decoder(20) for one in variants}
    assert {name: (model.d_model, model.n_heads) for name, model in models.items()} == {
        **dict.fromkeys("abc", (32, 2)),
        "d": (64, 2),
    }
    assert models["b"].d_ff == 64
    assert {one.config.out for one in variants} == {"runs/embedded-compare"}
