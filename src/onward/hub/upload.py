"""Upload of a local folder as a model on the Hugging Face hub. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onward.base.errors import UserError
from onward.base.files import read_json
from onward.hub.download import Say, first_line, print_message, reason
from onward.hub.names import CARD, FILES, INDEX, SINGLE, WEIGHTS, HubName


def model_files(folder: Path) -> list[str]:
    """Files to upload: config, tokenizer, weights, the model card with its picture, and the license."""
    known = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    names = sorted(str(path.relative_to(folder)) for path in known if path.is_file())
    files = [name for name in names if FILES[""].fullmatch(name) or name in (CARD, "LICENSE", "loss.svg")]
    if SINGLE in files:
        return [name for name in files if name != INDEX]
    weight_map = read_json(folder / INDEX).get("weight_map")
    return files + (sorted({*weight_map.values()}) if isinstance(weight_map, dict) else [])


def upload(
    model: HubName, files: Mapping[str, Path | bytes], *, private: bool = False, say: Say = print_message
) -> str:
    """Upload files, by their paths on the hub, as one commit, which also deletes stale weight files; return the URL of
    the commit. A model card given as bytes is a generated card, which does not replace an existing card."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, new = HfApi(library_name="onward"), dict(files)
    try:
        api.create_repo(model.name, private=private, exist_ok=True)
        there = [entry.path for entry in api.list_repo_tree(model.name, revision=model.revision)]
        if CARD in there and isinstance(new.get(CARD), bytes):
            say(f"{model} has a card, which is kept: to replace it, write one with onward card")
            del new[CARD]
        stale = [path for path in there if WEIGHTS.fullmatch(path) and path not in new]
        changes = [CommitOperationAdd(path, file) for path, file in new.items()]
        deletions = [CommitOperationDelete(path) for path in stale]
        message = "Upload a model with Onward"
        done = api.create_commit(model.name, [*changes, *deletions], commit_message=message, revision=model.revision)
        return str(done.commit_url)
    except Exception as error:  # as in `fetch`
        raise UserError(upload_reason(model, error)) from error


def upload_reason(model: HubName, error: Exception) -> str:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    match error:
        case errors.OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set: unset it to upload a model"
        case errors.RevisionNotFoundError():
            return reason(model, error, local=False)
    if status in (401, 403):
        who = "log in with hf auth login, or set HF_TOKEN" if status == 401 else "give another token, or another name"
        return f"the hub does not let you write to {model.name}: {who} (with a token that has write access)"
    why = f"the hub answers {status}: {first_line(error)}" if status else first_line(error)
    return f"{model} cannot be uploaded ({why}): the model on the hub is unchanged; try again"
