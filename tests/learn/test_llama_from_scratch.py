"""The Llama that chapter 12 builds from an empty file gives the logits of a real trained model."""

from pathlib import Path

import torch

import onward
from onward.learn.cells import cells
from onward.learn.chapters import find_chapter


def test_the_llama_of_the_chapter_has_the_logits_of_stories(shared: Path) -> None:
    names: dict[str, object] = {}
    written = [cell.code for cell in cells(find_chapter("12").text)]
    own, loading = (next(code for code in written if start in code) for start in ("class Llama(", "def load_llama"))
    exec(own, names)
    exec(loading.partition("shutil.rmtree")[0], names)
    lm = onward.load(shared / "stories260K")
    tokens = torch.tensor([lm.tokenizer.encode("Once upon a time, there was a dog.")])
    with torch.inference_mode():
        torch.testing.assert_close(
            names["load_llama"](shared / "stories260K")(tokens),  # type: ignore[operator]
            lm.model(tokens),
            rtol=0,
            atol=1e-4,
        )
