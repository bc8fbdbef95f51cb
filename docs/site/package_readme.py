"""README.md as a package index shows it. There, a link to another file of the sources would lead nowhere. It becomes a
link to the address in pyproject.toml or, without an address, plain text. Used by hatchling, which builds packages."""

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
    """The README without pictures of the sources, with links to `repository` ("": none) in place of relative ones."""
    text = IMAGE.sub("", text)
    return LINK.sub(rf"[\1]({repository.rstrip('/')}/\2)" if repository else r"\1", text)


class PackageReadme(Hook):
    def update(self, metadata: dict[str, Any]) -> None:
        root, config = self.root, self.config  # type: ignore[attr-defined]
        text = package_readme((Path(root) / "README.md").read_text(encoding="utf-8"), config["repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
