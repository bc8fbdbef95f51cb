"""Training with one process imports nothing from `parallel/`."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path

from onward import FinetuneConfig, Run, RunConfig
from onward.training.run.result import evaluate_run

text, chats, trained, tuned = map(str, sys.argv[1:])
options = {"steps": 1, "device": "cpu", "precision": "fp32"}
sizes = {"n_layers": 1, "context_length": 128, "mlp": "experts(count=2, top_k=1)"}
for config in [
    RunConfig(out=trained, sources=(text,), preset="tiny", optimizer="muon", model=sizes, **options),
    FinetuneConfig.of(out=tuned, base=trained, sources=[chats], lora=2, template="plain", **options),
]:
    Run.start(config)
    run = Run.resume(config.out)
    assert [*run.train()] and evaluate_run(run)
print(*(name for name in sys.modules if name.startswith("onward.parallel")))
"""


@pytest.mark.long
def test_training_with_one_process_imports_no_file_of_parallel(chats: Path, story_file: Path, tmp_path: Path) -> None:
    words = [str(path) for path in (story_file, chats, tmp_path / "trained", tmp_path / "tuned")]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
