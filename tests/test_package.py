"""Onward's page on a package index."""

import re
import tomllib
from pathlib import Path

import onward
from docs.site.package_readme import package_readme

ROOT = Path(__file__).parents[1]


def test_the_readme_of_a_package_has_no_relative_link() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\]\((?!https?://|#)", text)
    for repository in "", "https://example.org/blob/main/":
        shown = package_readme(text, repository)
        assert not re.search(r"\]\((?!https?://|#)|<img|<source", shown)
        assert ("[serving](https://example.org/blob/main/docs/serving.md)" in shown) == bool(repository)
        assert "serving" in shown


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert version.startswith(headings[0])
    releases = {path.name for path in (ROOT / "tests/checkpoint/releases").iterdir()}
    assert {*headings[1:]} <= releases, "a run folder of each release is kept"
    assert onward.__name__
