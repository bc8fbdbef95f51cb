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
    """Return the family and the configuration of a published release, of a model's folder or GGUF file, or of a model
    on the hub, whose config.json is downloaded. For any other name, raises a UserError that suggests a release or one
    of `others`."""
    path = Path(name)
    if name not in presets() and (path.exists() or len(path.parts) > 1):
        return open_source(locate(name, only="config")).family()
    release = preset(name, others)
    return modules()[release.family], release.config


def decoder_of(name: str, others: Iterable[str] = ()) -> DecoderConfig:
    """Return the configuration of a release, a folder, a config.json, a GGUF file or a model on the hub, without
    reading weights. Raises a UserError as `find` does."""
    path = Path(name)
    if path.suffix in (".gguf", ".json") and not path.exists():
        raise UserError(f"there is no file {path}: name a model's GGUF file, its config.json or its folder")
    if path.is_file() and path.suffix == ".json":
        return read(read_json(path), name)[1]
    return find(name, others)[1]


def lineage(name: str) -> list[str]:
    """List a published release, the release from which its design derives, and so on to the first one, by name. A
    folder with a model has no ancestors."""
    chain = [name]
    while chain[-1] in presets() and presets()[chain[-1]].ancestor:
        chain.append(presets()[chain[-1]].ancestor)
    return chain


def step(before: str, after: str) -> dict[str, Any]:
    """Return the differences between two releases or model folders, `before` and `after`, as a JSON object with the
    keys "before", "after" and "changes"."""
    changes = differences(find(before)[1], find(after)[1])
    return {"before": before, "after": after, "changes": [asdict(change) for change in changes]}


def steps(name: str) -> list[dict[str, Any]]:
    """List the differences at each step of a release's `lineage`, as `step` returns them, the newest first."""
    return [step(before, after) for after, before in pairwise(lineage(name))]


def catalog() -> Iterator[dict[str, Any]]:
    """Yield every family of published models as a JSON object with its releases and their sizes."""
    for name, module in sorted(modules().items()):
        entries = [
            {
                "name": preset.name,
                "parameters": parameters(preset.config),
                "active_parameters": active_parameters(preset.config),
                "context_length": preset.config.context_length,
                "ancestor": preset.ancestor,
            }
            for preset in presets().values()
            if preset.family == name
        ]
        yield {"family": name, "about": sentence(module), "architectures": module.ARCHITECTURES, "presets": entries}
