"""The live picture of a run."""

from pathlib import Path

from rich.console import Console

from onward.cli.display import Display
from onward.training.config import RunConfig
from onward.training.run import Run


def test_the_picture_shows_figures_bar_and_the_continued_prompt_in_its_frame(story_file: Path, tmp_path: Path) -> None:
    model = {"d_model": 16, "n_layers": 1, "n_heads": 2, "context_length": 16}
    config = RunConfig(sources=(str(story_file),), out=str(tmp_path / "run"), tokenizer="char", steps=4, model=model)
    run = Run.start(config)
    console = Console(width=80)
    with Display(run) as display:
        for event in run.train():
            display.show(event)
        with console.capture() as shown:
            console.print(display.picture())
    names, values, _, top, *_, bottom = shown.get().splitlines()
    assert names.split() == ["step", "loss", "validation", "loss", "tokens/s", "time", "left"]
    assert values.startswith("4 of 4 ")
    assert top.startswith("╭─ the same prompt, continued ─")
    assert bottom.startswith("╰─")
