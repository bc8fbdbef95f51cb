"""Downloads models of the Hugging Face hub into the local cache. Does not import torch.

`huggingface_hub` does the transfers, with its cache, progress bars, token, HF_HUB_OFFLINE and HF_ENDPOINT.
"""

from __future__ import annotations

import difflib
import errno
import glob
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from onward.base.errors import UserError
from onward.base.files import read_json, write_json
from onward.base.limits import memory_size
from onward.families._needed import needed
from onward.hub.cache import cached, cached_names, discard_wrong, time_limits, unverified
from onward.hub.names import ADVICE, INDEX, SINGLE, HubName, size_of

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

COMMIT = re.compile("[0-9a-f]{40}")
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
Say = Callable[[str], None]


def print_message(text: str) -> None:
    print(f"onward: {text}", file=sys.stderr)


def fetch(model: HubName, files: re.Pattern[str], say: Say, *, local: bool) -> Path:
    """Download the files whose paths match `files`, unless they are in the cache; return their folder. Asks the hub for
    the revision's commit, unless the revision is a commit in the cache or HF_HUB_OFFLINE is set, and for files only if
    some are missing. `local`: whether the name may have been meant as a local folder."""
    begun = False
    try:
        with time_limits():
            commit, offline = commit_of(model, say)
            paths, missing = plan(model, commit, files, offline)
            if not missing:
                return Path(cached(model.name, "config.json", commit)).parent
            announce(model, missing, say)
            begun = True
            return download(model, commit, paths, missing)
    except UserError:
        raise
    except Exception as error:  # raised by the HTTP client (its class differs by version), the disk or the hub
        raise UserError(reason(model, error, local, begun)) from error


def download(model: HubName, commit: str, paths: Iterable[str], missing: Mapping[str, RepoFile]) -> Path:
    """Download files into the cache; `missing` are the files that the cache lacks. Returns their folder.

    Each downloaded file is compared once with the hub's checksum, and deleted if it differs; a list in the cache names
    the files that are not yet compared, so that an interrupted download is checked later."""
    from huggingface_hub import snapshot_download

    note = unverified(model.name, commit)
    note.parent.mkdir(parents=True, exist_ok=True)
    write_json(note, sorted(missing))
    patterns = [glob.escape(path) for path in paths]
    folder = Path(snapshot_download(model.name, revision=model.revision, allow_patterns=patterns))
    if wrong := discard_wrong(model.name, commit):
        raise UserError(
            f"{' and '.join(wrong)} of {model} does not match the content that the hub announces, and was discarded: "
            "try again; if it fails again, use another network or HF_ENDPOINT"
        )
    return folder


def commit_of(model: HubName, say: Say) -> tuple[str, bool]:
    """Return the commit hash of the revision, and whether only the cache may be used, because HF_HUB_OFFLINE is set or
    the hub cannot be reached."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RevisionResolutionError

    api, known = HfApi(library_name="onward"), ""
    try:
        known = api.resolve_revision(model.name, revision=model.revision, local_files_only=True).resolved
    except RevisionResolutionError:
        pass
    if known and (constants.HF_HUB_OFFLINE or COMMIT.fullmatch(model.revision)):
        return known, constants.HF_HUB_OFFLINE
    try:
        commit = api.model_info(model.name, revision=model.revision).sha
        if not commit or not COMMIT.fullmatch(commit):
            raise ValueError(f"it names the commit {commit!r:.60}")
        return commit, False
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", 500)
        if not known or (status < 500 and status != 429):
            raise
        say(f"the hub cannot be reached ({first_line(error)}): {model} is taken from the cache")
        return known, True


def plan(model: HubName, commit: str, files: re.Pattern[str], offline: bool) -> tuple[list[str], dict[str, RepoFile]]:
    """Return the paths of the files that match `files` and of the shards of the weights, and the hub's entries of those
    that are not in the cache."""
    from huggingface_hub import HfApi, RepoFile, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        listed = list(get_cached_repo_tree(model.name, revision=commit))
    except CachedRepoTreeNotFoundError:
        if offline and cached(model.name, "config.json", commit):
            return [], {}  # downloaded by another program, which keeps no list of files: use the files in the cache
        tree = HfApi(library_name="onward").list_repo_tree(model.name, revision=commit, recursive=True)
        listed = [entry for entry in tree if isinstance(entry, RepoFile)]
    entries = {entry.path: entry for entry in listed}
    discard_wrong(model.name, commit)
    paths = [path for path in entries if files.fullmatch(path)]
    check(model, paths, entries, files)
    if INDEX in paths and SINGLE not in paths:
        paths += shards(model, commit, entries)
    missing = {path: entries[path] for path in paths if not cached(model.name, path, commit)}
    if missing and offline:
        raise UserError(
            f"Cannot load {model}, because the cache lacks {', '.join(sorted(missing)[:3])} and the hub cannot be "
            "reached: try again with a network"
        )
    return paths, missing


def shards(model: HubName, commit: str, entries: Mapping[str, RepoFile]) -> list[str]:
    """Paths of the weight files with tensors of the text decoder, according to the index of shards; downloads the index
    and config.json if they are not in the cache."""
    both = "config.json", INDEX
    missing = {path: entries[path] for path in both if not cached(model.name, path, commit)}
    folder = download(model, commit, missing, missing) if missing else Path(cached(model.name, INDEX, commit)).parent
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        return []
    wanted = needed(read_json(folder / "config.json"), weight_map)
    return sorted({shard for name, shard in weight_map.items() if name in wanted} & entries.keys())


def check(model: HubName, paths: Collection[str], there: Collection[str], files: re.Pattern[str]) -> None:
    """Raise a UserError if the model has no config.json or, if `files` matches weights, no safetensors; `there` are the
    paths of all its files."""
    endings = {Path(path).suffix for path in there}
    if "config.json" not in paths:
        kind = "an adapter" if "adapter_config.json" in there else "GGUF files" if ".gguf" in endings else "other files"
        raise UserError(f"{model} on the hub has no config.json but {kind}: name the model that it was made from")
    if files.fullmatch(SINGLE) and not {SINGLE, INDEX} & {*paths}:
        raise UserError(
            f"Cannot load {model}, because on the hub it has no {SINGLE} but pickles (.bin), which can run any code: "
            "give the revision of another commit, such as refs/pr/1, if one has safetensors files, or make them with "
            f"onward convert {model} OUT --from-bin"
        )


def announce(model: HubName, missing: Mapping[str, RepoFile], say: Say) -> None:
    """Report the size of a download; warn if the weights are larger than the machine's memory."""
    from huggingface_hub import constants

    weights = sum(entry.size for path, entry in missing.items() if path.endswith((".safetensors", ".bin")))
    memory = memory_size() or weights
    more = f"; the weights alone do not fit into the {size_of(memory)} of memory here" if weights > memory else ""
    files = f"{len(missing)} files" if len(missing) > 1 else next(iter(missing))
    size, folder = size_of(sum(entry.size for entry in missing.values())), constants.HF_HUB_CACHE
    say(f"downloading {model} from the hub: {files}, {size}, into {folder}{more}")


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")


def reason(model: HubName, error: Exception, local: bool, begun: bool = False) -> str:
    """The error message for an exception raised while a model was looked up or downloaded. `local`: whether the name
    may have been meant as a local folder."""
    from huggingface_hub import constants, errors

    hidden = errors.LocalEntryNotFoundError, errors.RevisionResolutionError  # their causes say more
    cause = error.__cause__ if isinstance(error, hidden) and error.__cause__ else error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    missing = f"there is no folder {model}" if local else f"hf://{model}"
    close = difflib.get_close_matches(model.name, cached_names(), 1)
    meant = f"did you mean {close[0]}, which is in the cache?" if close else "check its spelling"
    match cause:
        case errors.GatedRepoError():
            page = f"{constants.ENDPOINT}/{model.name}"
            return f"{model.name} is gated: accept its terms at {page}, then log in with hf auth login or set HF_TOKEN"
        case errors.RevisionNotFoundError():
            return f"{model.name} on the hub has no branch, tag or commit {model.revision}: name another revision"
        case errors.RepositoryNotFoundError():
            return (
                f"{missing}, and the hub has no model of that name, or a private one: {meant} (if it is yours, log in "
                "with hf auth login)"
            )
        case errors.HFValidationError():
            return f"there is no folder {model}: {ADVICE}"
        case errors.OfflineModeIsEnabled():
            return f"{missing}: {ADVICE} (HF_HUB_OFFLINE is set, and the cache has no {model}: {meant})"
        case OSError() if cause.filename or cause.errno in FULL:
            place = cause.filename or constants.HF_HUB_CACHE
            return (
                f"{model} cannot be written to the cache ({place}: {cause.strerror}): make room or set HF_HOME to "
                "another folder"
            )
        case (
            ValueError()
            | TypeError()
            | LookupError()
            | AttributeError()
            | AssertionError()
            | errors.FileMetadataError()
        ):
            what = f"{type(cause).__name__}: {first_line(cause)}"
            return (
                f"{missing}, and the answer of {constants.ENDPOINT} for {model} is not that of a hub ({what}): check "
                "HF_ENDPOINT and whether a proxy answers in its place"
            )
    why = f"the hub answers {status}" if status else first_line(cause)
    kept = "; the received part is kept" if begun else ""
    return f"{missing}, and {model} cannot be downloaded ({why}): try again{kept}"
