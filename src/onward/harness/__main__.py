"""The command of lm-evaluation-harness, `lm_eval`, with the model "onward": python -m onward.harness --model onward ...

The library has no plugins: importing a module registers its models.
"""

from lm_eval.__main__ import cli_evaluate

import onward.harness  # noqa: F401  # registers the model

if __name__ == "__main__":
    cli_evaluate()
