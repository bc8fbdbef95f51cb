"""Finds the folder of a model by name, on this machine or on the Hugging Face hub. Does not import torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from onward.base.errors import UserError
from onward.hub.cache import cached_names
from onward.hub.download import Say, fetch, print_message
from onward.hub.names import ADDRESS, ADVICE, FILES, NAME, HubName

DRAFT = "draft"  # the folder of a draft head in the folder of its model


def is_model(path: str | Path) -> bool:
    return os.path.isfile(os.path.join(path, "config.json")) or (str(path).endswith(".gguf") and os.path.isfile(path))


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists() and not (folder / "config.json").exists()


def locate(
    name: str | Path,
    revision: str = "",
    *,
    only: Literal["", "config", "tokenizer", "pickles"] = "",
    say: Say = print_message,
) -> Path:
    """Return the path of a model: `name` itself if it exists, else the folder in the cache of `huggingface_hub` to
    which the model of this name is downloaded. `revision` is a branch, tag or commit ("": main). `only` restricts the
    download: "" takes all files that a model needs, "config" or "tokenizer" only their files, "pickles" takes .bin
    weights in place of safetensors. `say` is called with messages, such as the size of a download.

    An existing path takes precedence over a name on the hub; hf://NAME is always a name on the hub. Raises a UserError
    if there is no such model.
    """
    text = str(name)
    address = ADDRESS.fullmatch(text)
    if not address and os.path.exists(text):
        if revision:
            raise UserError(f"revision is {revision!r}, but {text} is a path on this machine: name hf://{text} instead")
        if (name_on_hub := NAME.fullmatch(text)) and name_on_hub[1] in cached_names():
            say(f"{text} is a local path, which is used; the model of that name on the hub is hf://{text}")
        return Path(name)
    hub_name = HubName.of(text, revision)
    if hub_name is None or "\0" in text:
        if "://" in text or re.match(r"\w\w+:/", text):
            full = re.sub(r"^(\w\w+):/(?=[^/])", r"\1://", text)
            raise UserError(
                f"{full} is a URL and not the name of a model on the hub: download the model's files into a folder, "
                "and give its path"
            )
        raise UserError(f"there is no folder {text}: {ADVICE}")
    parent = Path(text).parent
    if not address and parent != Path(".") and parent.exists():  # a misspelled path is not sent to a server
        raise UserError(f"there is no folder {text}: {ADVICE} (or hf://{text}, if this is its name on the hub)")
    return fetch(hub_name, FILES[only], say, local=not address)
