"""onward verify: the promises of exactness, measured on a model of the user's own."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from onward.cli.loading import Loading, load
from onward.cli.options import parse
from onward.cli.output import console, print_json, print_table
from onward.errors import UserError

if TYPE_CHECKING:
    from onward.language_model import LanguageModel

ABOUT = """\
Run a model in every way that Onward has, and measure how far each is from the plain run. Exit status 1 if one is beyond
rounding.

examples:
  onward verify runs/mybook
  onward verify runs/mybook --dtype bfloat16
  onward verify runs/mybook --against transformers --json
"""


@dataclass(frozen=True, kw_only=True)
class Options(Loading):
    """The model and the reference."""

    positional: ClassVar[tuple[str, ...]] = ("model",)
    model: str  # folder of the model, or its name on the hub
    against: Literal["", "transformers"] = ""  # also compare with this library, layer by layer
    json: bool = False  # print the findings as JSON


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, prog="onward verify", about=ABOUT)
    lm = load(options.model, options)
    from onward.inspection.verify import verify

    reference = from_transformers(options, lm) if options.against else None
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
    return 1 if failed else 0


def readable(value: float | bool) -> str:
    """A measurement, or whether a promise holds."""
    return ("yes" if value else "NO") if isinstance(value, bool) else f"{value:.1e}"


def from_transformers(options: Options, lm: "LanguageModel") -> Any:
    """The same model in transformers, without code from the folder."""
    from onward.hub import locate

    try:
        from transformers import AutoModelForCausalLM, logging
    except ImportError:
        raise UserError("--against transformers needs transformers: pip install transformers") from None
    logging.disable_progress_bar()
    folder = locate(options.model, options.revision)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=lm.model.dtype, trust_remote_code=False)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"transformers cannot load {options.model} ({reason}): verify it without --against") from None
    return model.to(lm.model.device).eval()
