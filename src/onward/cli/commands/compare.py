"""onward compare: variants of a run side by side."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar

from onward.base import fields
from onward.base.errors import UserError
from onward.base.fields import nearest
from onward.cli.shared.options import nest
from onward.cli.shared.output import console, print_json, print_next, print_table
from onward.cli.shared.run_options import from_toml
from onward.cli.shared.training import in_processes
from onward.cli.shared.variants import (
    COMMON_OF_VARIANTS,
    VariantOptions,
    folder_of,
    no_length,
    read_values,
    take,
    train_all,
    variant,
)
from onward.config.ranges import Size
from onward.training.config import RunConfig
from onward.training.presets import merge

ABOUT = """\
Train variants for equal time, tokens, operations or steps, and test whether their difference exceeds noise.

A variant is a TOML file with options of `onward train`, or `--variant NAME: option=value ...` with the options that
differ. Other options of `onward train` apply to all variants. For a given seed, all variants read the data in the same
order, so differences are computed seed by seed. The first variant is the baseline. Finished runs are not repeated: the
same command continues after an interruption, and accepts more seeds or variants.

examples:
  onward compare a.toml b.toml --time 60s --seeds 3
  onward compare mybook.txt --tokens 2M --seeds 3 --variant base --variant "alibi: model.position=alibi"
  onward compare mybook.txt --flops 1e12 --variant "wide: model.d_model=192" --variant "deep: model.n_layers=6"
  onward compare mybook.txt --steps 500 --variant adamw: --variant "muon: optimizer=muon" --json
  torchrun --standalone --nproc-per-node 2 -m onward compare a.toml b.toml --steps 500     two runs at a time
"""
OF_ALL = {"out", "seed"}  # options that a variant cannot set


@dataclass(frozen=True)
class Options(VariantOptions):
    """The options of `onward compare`, which trains and compares variants of a run."""

    common: ClassVar[tuple[str, ...]] = ("variant", *COMMON_OF_VARIANTS)
    sources: tuple[str, ...] = ()  # texts, and TOML files of variants
    variant: tuple[str, ...] = ()  # NAME, or "NAME: option=value ..." with the options that differ
    seeds: Size = 3  # runs per variant, with seeds seed, seed + 1, ...; all variants use the same seeds


def main(argv: Sequence[str]) -> int:
    return in_processes(lambda: compare(argv), "give the same command again")


def compare(argv: Sequence[str]) -> int:
    """All processes share the runs, and the first one prints the table."""
    shared, given = read_values(Options, argv, "onward compare", ABOUT)
    words = given.pop("sources", [])
    files, sources = [word for word in words if word.endswith(".toml")], [w for w in words if not w.endswith(".toml")]
    given |= {"sources": sources} if sources else {}
    common = merge(shared, given)
    own, length = take(common, Options)
    shared, given = ({name: one[name] for name in one if name in common} for one in (shared, given))
    named = [(Path(name).stem, from_toml(Path(name), RunConfig), name) for name in files]
    named += [changes(text) for text in own.get("variant", ())]
    named = [(name, {key: options[key] for key in options.keys() - OF_ALL}, where) for name, options, where in named]
    if len(named) < 2:
        raise UserError(
            f"{fields.counted(len(named), 'variant')} given: compare at least two (TOML files, or --variant)"
        )
    for _, options, where in named:
        no_length(options, where)
    # a file overrides the options of --config, and the command line the file; --variant overrides the command line
    values = [
        merge(merge(shared, options), given) if where in files else merge(common, options)
        for _, options, where in named
    ]
    out = Path(folder_of(merge(values[0], given), "compare"))
    variants = [variant(name, options | {"out": str(out)}) for (name, *_), options in zip(named, values)]
    seeds = fields.convert(int, own.get("seeds", Options.seeds), "seeds")
    if seeds < 1:
        raise UserError(f"seeds is {seeds}: give at least 1")
    outcomes = train_all(variants, seeds, length)
    if isinstance(outcomes, int):
        return outcomes
    from onward.reports.pictures.numbers import write_tables
    from onward.reports.runs.variants import LEVEL, comparison_picture, exact, plain, results, row
    from onward.training.studies.variants import common_measure

    measure = common_measure(variants)
    compared = results(outcomes, measure)
    axis = "seconds" if length.time else "tokens"
    picture = comparison_picture(outcomes, measure, str(length), axis)
    for name in "compare.svg", "compare.pdf", "compare-curves.csv":
        picture.write(out / name)
    table = [row(one, compared[0], measure) for one in compared]
    written = write_tables(out / "compare", table, [exact(one) for one in compared])
    if own.get("json"):
        rows = [plain(one) | {"differs": v.differences(variants[0])} for one, v in zip(compared, variants)]
        print_json({"measure": measure, "length": str(length), "variants": rows})
    else:
        print_table(table)
        if seeds > 1:
            console.print(
                f"\nIn brackets: Student's {LEVEL:.0%} interval of the mean difference over {seeds} seeds, paired by "
                "seed, for all variants together (Bonferroni). If 0 is outside the interval, the difference is "
                "more than noise.",
                soft_wrap=True,
            )
    console.print(f"picture: {out / 'compare.svg'}, compare.pdf, compare-curves.csv", markup=False, soft_wrap=True)
    console.print(f"table: {out / 'compare.md'}, {', '.join(path.name for path in written[1:])}", markup=False)
    if not own.get("json"):
        print_next(f"onward runs {quote(str(out))}", f"onward report {quote(str(outcomes[0].runs[0]))}")
    return 0


def changes(text: str) -> tuple[str, dict[str, Any], str]:
    """Parse `NAME: option=value ...` to (name, options as nested dicts, `--variant NAME` for errors)."""
    name, _, options = text.partition(":")
    if "=" in name:
        raise UserError(
            f"--variant {text!r} needs a colon after the name, because {name.strip()!r} reads as an option: write "
            "NAME: option=value ..."
        )
    table: dict[str, Any] = {}
    known = [*fields.hints(RunConfig)]
    for word in split_words(options):
        option, equals, value = word.partition("=")
        option = option.strip("-").replace("-", "_")
        if not equals or option.split(".")[0] not in known:
            wrong = f"{word!r} is not option=value" if not equals else f"{option} is not an option of `onward train`"
            raise UserError(f"--variant {text!r}: {wrong}: {nearest(option.split('.')[0], known)}")
        table[option] = [value] if isinstance(getattr(RunConfig, option, None), tuple) else value
    if not name.strip():
        raise UserError(f"--variant {text!r} has no name: write NAME: option=value ...")
    return name.strip(), nest(table), f"--variant {name.strip()}"


def split_words(text: str) -> list[str]:
    """Split at spaces, except inside parentheses."""
    return re.findall(r"(?:\([^()]*(?:\([^()]*\)[^()]*)*\)|\S)+", text)
