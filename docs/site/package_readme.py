"""README.md for a package index, where a relative link to another file of the repository would be broken. Such a link
becomes a link to the address in pyproject.toml or, without an address, plain text. Used by hatchling, which builds
packages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RELATIVE = r"\((?!https?://|#|mailto:)([^)\s]+)\)"
LINK = re.compile(rf"(?<!!)\[([^\]]+)\]{RELATIVE}")
IMAGE = re.compile(rf"<picture>.*?</picture>\n*|!\[[^\]]*\]{RELATIVE}\n*", re.DOTALL)

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface as Hook
except ImportError:  # in tests
    Hook = object  # type: ignore[assignment, misc]


def package_readme(text: str, repository: str) -> str:
    """Return the README without pictures from the repository. Relative links become links to `repository` or, if it is
    "", plain text."""
    text = IMAGE.sub("", text)
    return LINK.sub(rf"[\1]({repository.rstrip('/')}/\2)" if repository else r"\1", text)


class PackageReadme(Hook):
    def update(self, metadata: dict[str, Any]) -> None:
        root, config = self.root, self.config  # type: ignore[attr-defined]
        text = package_readme((Path(root) / "README.md").read_text(encoding="utf-8"), config["repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
