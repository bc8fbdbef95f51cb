"""The cache of `huggingface_hub`: files are verified by the checksums that the hub announces, and requests have time
limits. Does not import torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

CHECKSUM = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


@contextmanager
def time_limits() -> Iterator[None]:
    """Limit how long requests wait: HF_HUB_ETAG_TIMEOUT for an answer, HF_HUB_DOWNLOAD_TIMEOUT for the next bytes of a
    file. Without limits, some requests of `huggingface_hub` wait for a minute or forever."""
    from huggingface_hub import constants, get_session

    def limit(request: Any) -> None:
        file = request.method == "GET" and not request.url.path.startswith("/api/")
        most = float(constants.HF_HUB_DOWNLOAD_TIMEOUT if file else constants.HF_HUB_ETAG_TIMEOUT)
        given = request.extensions.get("timeout") or {}
        waits = {name: given.get(name) for name in ("connect", "read", "write", "pool")}
        limited = {name: most if wait is None else min(wait, most) for name, wait in waits.items()}
        request.extensions = {**request.extensions, "timeout": limited}

    client = get_session()
    before = client.event_hooks
    client.event_hooks = {**before, "request": [*before["request"], limit]}
    try:
        yield
    finally:
        client.event_hooks = before


def cached(name: str, path: str, commit: str) -> str:
    """Local path of a model's file in the cache; "" if the cache does not have it."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(name, path, revision=commit)
    return file if isinstance(file, str) else ""


def unverified(name: str, commit: str) -> Path:
    """Path of a JSON file in the cache that lists the downloaded files not yet verified by the hub's checksums; the
    file may not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", f"unverified-{commit}.json")


def discard_wrong(name: str, commit: str) -> list[str]:
    """Verify the downloaded files that are not verified yet; delete and return files with a wrong checksum."""
    note, wrong = unverified(name, commit), list[str]()
    if not note.exists():
        return wrong
    for path in json.loads(note.read_text(encoding="utf-8")):
        file = cached(name, path, commit)
        if file and not is_announced(Path(file)):
            discard(Path(file))
            wrong.append(path)
    note.unlink()
    return wrong


def is_announced(file: Path) -> bool:
    """Whether a cached file has the checksum that is its name: SHA-256 for large files, SHA-1 of the Git blob for
    others. True if the name is not a checksum, as in a cache without links."""
    announced = file.resolve().name
    if not CHECKSUM.fullmatch(announced):
        return True
    digest = hashlib.sha256() if len(announced) == 64 else hashlib.sha1(f"blob {file.stat().st_size}\0".encode())
    with file.open("rb") as opened:
        hashlib.file_digest(opened, lambda: digest)
    return digest.hexdigest() == announced


def discard(file: Path) -> None:
    """Delete a cached file and, if it is a link, the file that it links to."""
    while file.is_symlink():
        target = file.parent / os.readlink(file)
        file.unlink()
        file = target
    file.unlink(missing_ok=True)


def cached_models() -> list[CachedRepoInfo]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        scanned = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted((repo for repo in scanned if repo.repo_type == "model"), key=lambda repo: repo.repo_id)


def cached_names() -> list[str]:
    """Names of the cached models, read from folder names, since a complete scan of the cache takes long."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    return [path.name.removeprefix("models--").replace("--", "/") for path in folder.glob("models--*")]
