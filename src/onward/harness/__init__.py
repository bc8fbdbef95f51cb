"""lm-evaluation-harness with Onward's models: runs its tasks in this process. Needs the extra `eval`.

`onward evaluate MODEL --tasks arc_easy` runs it. `import onward.harness` registers the model "onward" with the library:
`lm_eval.simple_evaluate("onward", "path=runs/mybook", tasks=["arc_easy"])`. The command `lm_eval` with that model is
`python -m onward.harness --model onward --model_args path=runs/mybook --tasks arc_easy`.
"""

from onward.harness.model import HarnessModel
from onward.harness.run import run_harness

__all__ = ["HarnessModel", "run_harness"]
