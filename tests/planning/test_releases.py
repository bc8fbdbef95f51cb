"""Published releases: lineages, steps, and the page that describes them."""

from pathlib import Path

import pytest

from onward import UserError
from onward.families import modules, presets
from onward.planning.families_page import renewed, table
from onward.planning.releases import catalog, find, lineage, step, steps

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def test_a_lineage_leads_to_the_first_decoder_step_by_step() -> None:
    assert lineage("llama-3.1-8b")[:3] == ["llama-3.1-8b", "llama-3-8b", "llama-2-7b"]
    assert lineage("llama-3.1-8b")[-1] == "gpt"
    assert [(s["before"], s["after"]) for s in steps("gpt2")] == [("gpt", "gpt2")]
    assert steps("gpt") == []


def test_a_folder_is_read_like_a_release(shared: Path) -> None:
    folder = str(shared / "stories260K")
    assert find(folder)[1].d_model == 64
    assert lineage(folder) == [folder]
    assert {change["what"] for change in step("llama-2-7b", folder)["changes"]} >= {"parameters", "d_model"}


def test_catalog_has_every_family_and_release() -> None:
    found = list(catalog())
    assert [family["family"] for family in found] == sorted(modules())
    assert sorted(preset["name"] for family in found for preset in family["presets"]) == sorted(presets())
    assert [family["family"] for family in found if not family["source"]] == ["onward"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("llama2-7b", "did you mean llama-2-7b"), ("no/such", "there is no folder no/such")],
)
def test_unknown_names_are_refused_in_one_sentence(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        find(name)


def test_families_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert renewed(page) == page, "make it again: python -m onward.planning.families_page docs/families.md"


def test_only_text_between_the_marks_is_generated() -> None:
    page = "Before.\n\n<!-- ladder -->\n\nstale\n\n<!-- end -->\n\nAfter.\n"
    made = renewed(page)
    assert made.startswith("Before.\n\n<!-- ladder -->\n\n### gpt → gpt2\n")
    assert made.endswith("\n\n<!-- end -->\n\nAfter.\n")
    assert "stale" not in made


def test_bars_in_a_cell_are_escaped() -> None:
    assert table(["a"], [["|x|"]]).splitlines()[-1] == "| \\|x\\| |"
