"""onward verify: measure on a user's model whether different ways of running it give the same results."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from onward.base.errors import UserError
from onward.cli.shared.loading import Loading, load
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_json, print_table

if TYPE_CHECKING:
    from onward.api.language_model import LanguageModel
    from onward.inspection.references import Reference

ABOUT = """\
Run a model with caches, in batches, with draft tokens and after saving, and measure each difference from a plain
forward pass. The exit status is 1 if a difference exceeds rounding.

examples:
  onward verify runs/mybook
  onward verify runs/mybook --dtype bfloat16
  onward verify runs/mybook --against transformers --json
  onward verify runs/mybook --against mybook.gguf
"""


@dataclass(frozen=True, kw_only=True)
class Options(Loading):
    """The options of `onward verify`, which measures whether different ways of running a model give the same
    results."""

    positional: ClassVar[tuple[str, ...]] = ("model",)
    model: str  # folder of the model, or its name on the hub
    against: str = ""  # also compare with transformers, or with llama.cpp and this GGUF file, layer by layer
    json: bool = False  # print the findings as JSON


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, prog="onward verify", about=ABOUT)
    lm = load(options.model, options)
    from onward.inspection.verify import left_out, verify

    reference = reference_of(options, lm) if options.against else None
    rows: list[dict[str, Any]] = []
    with console.status("measuring"):
        for finding in verify(lm.model, lm.tokenizer, lm.hf, reference):
            rows.append(asdict(finding) | {"holds": finding.holds})
    failed = [row["promise"] for row in rows if not row["holds"]]
    if options.json:
        print_json(rows)
    else:
        print_table([row | {key: readable(row[key]) for key in ("measured", "allowed", "holds")} for row in rows])
        summary = f"{len(rows) - len(failed)} of {len(rows)} promises hold"
        console.print(f"\n{summary}, in {lm.model.dtype} on {lm.model.device}")
        for name, reason in left_out(lm.model, lm.tokenizer).items():
            console.print(f"not measured: {name}, because {reason}", soft_wrap=True)
    return 1 if failed else 0


def readable(value: float | bool) -> str:
    return ("yes" if value else "NO") if isinstance(value, bool) else f"{value:.1e}"


def reference_of(options: Options, lm: "LanguageModel") -> "Reference":
    from pathlib import Path

    from onward.hub.folder import locate
    from onward.inspection.references import llama_cpp_reference, transformers_reference

    if options.against.endswith(".gguf"):
        return llama_cpp_reference(Path(options.against), lm.model)
    if options.against != "transformers":
        raise UserError(f"--against is {options.against!r}: give transformers, or a file that ends in .gguf")
    return transformers_reference(locate(options.model, options.revision), lm.model, options.model)
