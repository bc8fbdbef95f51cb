"""lm-evaluation-harness with Onward's models: its tasks, scored in this process. Needs the extra `eval`.

`onward evaluate MODEL --tasks arc_easy` runs it. `import onward.harness` makes the model "onward" known to it:
`lm_eval.simple_evaluate("onward", "path=runs/mybook", tasks=["arc_easy"])`. The command `lm_eval` with that model is
`python -m onward.harness --model onward --model_args path=runs/mybook --tasks arc_easy`.
"""

from onward.harness.model import HarnessModel
from onward.harness.run import run_harness

__all__ = ["HarnessModel", "run_harness"]
