"""The keyword arguments of Onward's functions as TypedDicts, for editors and type checkers, which run no code.

    PYTHONPATH=src:tests python -m support.keywords

writes them from the dataclasses and the signatures that declare them. A test checks that they are up to date.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import onward
from onward import Method
from onward.base.arguments import Choice, Either, Function, Instance, Limited, Row, Several, Table, Type, field_types
from onward.base.arguments import types as argument_types
from onward.base.fields import Part
from onward.generation.search.beam import beam_search

SOURCE = Path(onward.__file__).parent
Types = dict[str, str]  # types as source code, by argument name
PARTS: list[type] = [onward.Adapters, *Part.__subclasses__()]  # onward.Adapters is imported by its name
CLASSES = {cls.__name__: cls for cls in (onward.GenerationOptions, onward.MovingWeight, *PARTS)}
WIDER = {"json_schema": "str | Mapping[str, Any]"}  # the class itself converts mappings
FROM = {"collections.abc": ("Callable", "Mapping", "Sequence"), "typing": ("Any", "Literal", "TypedDict")}


def spelled(kind: Type) -> Iterable[str]:
    """The alternatives of a type as source code, including the types that are converted to it: a sequence to a tuple, a
    text to a part, a function or a text to a tuple of these."""
    match kind:
        case Limited():
            yield from spelled(kind.args[0])
        case Either():
            yield from dict.fromkeys(one for arg in kind.args for one in spelled(arg))
        case Choice():
            yield f"Literal[{', '.join(map(quoted, kind.values))}]"
        case Table():
            yield f"Mapping[{', '.join(map(joined, kind.args))}]"
        case Several():
            single = isinstance(kind.args[0], Function) or kind.args[0].annotation is str
            yield from [joined(kind.args[0])] * single
            yield f"Sequence[{joined(kind.args[0])}]"
        case Row():
            yield f"tuple[{', '.join(map(joined, kind.args))}]"
        case Instance() if kind.annotation is type(None):
            yield "None"
        case Instance() if issubclass(kind.annotation, Part):
            yield from ("int", "str") if kind.annotation.shorthand(1) else ("str",)
            yield kind.annotation.__name__
        case _:
            yield str(kind)


def quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def joined(kind: Type) -> str:
    return " | ".join(sorted(spelled(kind), key="None".__eq__))


def typed(types: Mapping[str, Type], without: Iterable[str] = (), only: Iterable[str] = ()) -> Types:
    names = only or [name for name in types if name not in {*without}]
    return {name: WIDER.get(name) or joined(types[name]) for name in names}


def together(tables: Iterable[Types]) -> Types:
    """Merge the keyword arguments of several functions; the types of arguments with the same name become
    alternatives."""
    found = dict[str, dict[str, None]]()
    for table in tables:
        for name, text in table.items():
            found.setdefault(name, {})[text] = None
    return {name: " | ".join(texts) for name, texts in found.items()}


def generation() -> dict[str, Types]:
    options, sampling = field_types(onward.GenerationOptions), field_types(onward.Sampling)
    passed = {"model", "prompts", "max_new_tokens", "min_new_tokens", "sampling", "stop_token_ids", "allowed", "n"}
    beams = typed(argument_types(beam_search), passed)
    searched = {"options": "GenerationOptions", **typed(options, only=[*sampling, "min_new_tokens", "stop_token_ids"])}
    return {
        "OptionKeywords": typed(options, without=("max_new_tokens", "n")),
        "BeamKeywords": beams,
        "BeamSearchKeywords": {**searched, **typed(options, only=["n"]), **beams},
    }


def training() -> dict[str, Types]:
    run, finetuning = field_types(onward.RunConfig), field_types(onward.FinetuneConfig)
    methods = [typed(field_types(method)) for method in Method.choices().values()]
    own = typed(finetuning, without=("sources", "base", "out", *onward.FinetuneConfig.fixed))
    return {
        "RunKeywords": typed(run, without=("sources", "out")),
        "FinetuneKeywords": together([own, *methods]),
    }


FILES: dict[str, Callable[[], dict[str, Types]]] = {"generation": generation, "training": training}


def module(classes: Mapping[str, Types]) -> str:
    """The source of a module of TypedDicts."""
    words = {word for types in classes.values() for text in types.values() for word in re.findall(r"\w+", text)}
    imports = {name: [one for one in names if one in words | {"TypedDict"}] for name, names in FROM.items()}
    ours = {name: value.__module__ for name in sorted(words) if (value := CLASSES.get(name))}
    lines = ['"""Keyword arguments, for editors and type checkers. Written by `python -m support.keywords`."""', ""]
    lines += [f"from {name} import {', '.join(names)}" for name, names in imports.items() if names]
    lines += [""] * bool(ours) + sorted(f"from {place} import {name}" for name, place in ours.items())
    for name, types in classes.items():
        lines += ["", "", f"class {name}(TypedDict, total=False):"]
        lines += [f"    {key}: {text}" for key, text in types.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    for folder, classes in FILES.items():
        (SOURCE / folder / "keywords.py").write_text(module(classes()))


if __name__ == "__main__":
    main()
