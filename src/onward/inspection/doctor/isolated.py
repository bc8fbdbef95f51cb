"""The doctor in a separate process with limits of time and memory, since a model's code may do anything.

python -m onward.inspection.doctor.isolated RESULTS ARGUMENTS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from onward.base.apart import run_apart
from onward.base.errors import UserError
from onward.base.fields import import_parts
from onward.base.limits import limit_memory

GIGABYTE = 1 << 30


def examine_apart(arguments: Mapping[str, Any], seconds: float, gigabytes: float) -> list[dict[str, Any]]:
    """Run all checks in a process limited to `seconds` and `gigabytes` GiB, for untrusted models. `arguments` are the
    arguments of `target.subjects_of`, plus `imports`, the user's modules to import first. Output of the model is
    discarded, and processes that it started are ended."""
    lines, status = run_apart(__name__, {**arguments, "gigabytes": gigabytes}, seconds)
    *rows, last = [dict[str, Any](), *lines]
    if "error" in last:
        raise UserError(last["error"])
    if last.get("done"):
        return rows[1:]
    after = f"after the check '{last['check']}'" if last else "before the first check"
    if status is None:
        raise UserError(f"the model took longer than {seconds:g} s, {after}: check a smaller model, or raise --seconds")
    mend = "raise --gigabytes" if status < 0 else "remove the call that ends the process, such as sys.exit()"
    raise UserError(f"the process of the model ended with status {status}, {after}: {mend}")


def main(results: str, options: str) -> None:
    """Write one line of JSON per finding to the file `results`, and a last line: done, or the error."""
    from onward.inspection.doctor.checks import examine
    from onward.inspection.doctor.target import subjects_of

    arguments = json.loads(options)
    gigabytes = arguments.pop("gigabytes")
    with open(results, "a", encoding="utf-8", buffering=1) as file:
        try:
            limit_memory(int(gigabytes * GIGABYTE))
            for module in arguments.pop("imports", ()):
                import_parts(module)
            for subject in subjects_of(**arguments):
                for finding in examine(subject):
                    print(json.dumps(asdict(finding)), file=file)
            print(json.dumps({"done": True}), file=file)
        except (UserError, MemoryError) as error:
            print(
                json.dumps({"error": str(error) or f"the model takes more than {gigabytes} GiB: raise --gigabytes"}),
                file=file,
            )
        except Exception as error:  # raised by user code, such as malformed batches
            what = " ".join(f"{type(error).__name__}: {error}".split())
            print(json.dumps({"error": f"the target cannot be examined ({what:.300}): check its options"}), file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
