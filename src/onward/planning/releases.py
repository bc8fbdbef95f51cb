"""Published decoders: families, their releases, and the steps from the first decoder to each."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from onward.base.errors import UserError
from onward.base.files import read_json
from onward.checkpoint.load import open_source
from onward.config.decoder import DecoderConfig
from onward.families import Family, modules, preset, presets, read
from onward.hub.folder import locate
from onward.planning.descriptions import differences, sentence
from onward.planning.parameters import active_parameters, parameters


def find(name: str, others: Iterable[str] = ()) -> tuple[Family, DecoderConfig]:
    """Family and configuration of a release, a folder, a GGUF file or a model on the hub. For an unknown name, raises a
    UserError that suggests a release or one of `others`."""
    path = Path(name)
    if name not in presets() and (path.exists() or len(path.parts) > 1):
        return open_source(locate(name, only="config")).family()
    release = preset(name, others)
    return modules()[release.family], release.config


def decoder_of(name: str, others: Iterable[str] = ()) -> DecoderConfig:
    """The configuration that `find` returns, or that of a config.json."""
    path = Path(name)
    if path.suffix in (".gguf", ".json") and not path.exists():
        raise UserError(f"there is no file {path}: name a model's GGUF file, its config.json or its folder")
    if path.is_file() and path.suffix == ".json":
        return read(read_json(path), name)[1]
    return find(name, others)[1]


def lineage(name: str) -> list[str]:
    """A release and its ancestors, up to the first; a folder has no ancestors."""
    chain = [name]
    while chain[-1] in presets() and presets()[chain[-1]].ancestor:
        chain.append(presets()[chain[-1]].ancestor)
    return chain


def step(before: str, after: str) -> dict[str, Any]:
    changes = differences(find(before)[1], find(after)[1])
    return {"before": before, "after": after, "changes": [asdict(change) for change in changes]}


def steps(name: str) -> list[dict[str, Any]]:
    """The differences at each step of a release's `lineage`, the newest first."""
    return [step(before, after) for after, before in pairwise(lineage(name))]


def catalog(part: str = "") -> Iterator[dict[str, Any]]:
    """Families with their releases; with `part`, only the releases whose names contain it, and their families. Case,
    hyphens and spaces do not matter: "GPT-2" finds gpt2."""
    squeezed = lambda text: text.lower().replace("-", "").replace(" ", "")
    for name, module in sorted(modules().items()):
        named = (p for p in presets().values() if p.family == name and squeezed(part) in squeezed(p.name))
        of_family = [(preset, preset.config) for preset in named]
        entries = [
            {
                "name": preset.name,
                "parameters": parameters(config),
                "active_parameters": active_parameters(config),
                "context_length": config.context_length,
                "ancestor": preset.ancestor,
            }
            for preset, config in of_family
        ]
        if part and not entries:
            continue
        yield {
            "family": name,
            "about": sentence(module),
            "source": getattr(module, "SOURCE", ""),
            "architectures": module.ARCHITECTURES,
            "presets": entries,
        }
