"""Generates the page that lists the transformers models that generate text, and states whether Onward reads them:
`python -m docs.site.transformers_models docs/models-of-transformers.md`."""

import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from onward.families import families
from onward.families._unread import UNREAD
from onward.families._wrappers import FLAT, TEXT_TYPES

MAPS = {
    "Models of text": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "Models of images and text": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "Models of audio and text, some also of images": MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}
ABOUT = """# Models of transformers

Every model of transformers that answers in text, by the `model_type` in its config.json. *Read* names the family whose
file in `src/onward/families/` reads it; for a model that also takes images or audio, the family of its text decoder,
the only part that is loaded. Other models are refused with the reason given here. A model in several of transformers'
lists appears only in the first. After adding a family, remove its rows from `src/onward/families/_unread.py` and
regenerate this page: `python -m docs.site.transformers_models docs/models-of-transformers.md`.
"""


def text_type(model_type: str) -> str:
    """The model_type of a model's text decoder according to transformers' defaults; the model's own model_type if it
    has no separate text decoder or no default config."""
    try:
        config = CONFIG_MAPPING[model_type]()
        return str(config.get_text_config(decoder=True).model_type)
    except (ValueError, TypeError):  # the config cannot be constructed without arguments
        return model_type


def reader(model_type: str) -> str | None:
    """The model_type of the family that reads a model; None if there is none."""
    kind = FLAT.get(model_type, model_type)
    kind = TEXT_TYPES[kind][0] if kind in TEXT_TYPES else kind
    return kind if kind in families() else None


def rows() -> Iterator[tuple[str, str, str | None, str | None]]:
    """Yield (title of the list, model_type, family that reads it, reason why there is none). The test requires exactly
    one of the last two to be None."""
    seen = set[str]()
    for title, names in MAPS.items():
        for name in sorted({*names} - seen):
            seen.add(name)
            text = name if reader(name) or name in UNREAD else text_type(name)
            yield title, name, reader(text), UNREAD.get(name) or UNREAD.get(text)


def page() -> str:
    tables = {title: f"\n## {title}\n\n| model_type | read | reason |\n| --- | --- | --- |\n" for title in MAPS}
    for title, name, family, reason in rows():
        tables[title] += f"| `{name}` | {f'`{family}`' if family else 'no'} | {reason or ''} |\n"
    return ABOUT + "".join(tables.values())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
