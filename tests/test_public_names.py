"""The names that `import onward` gives."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints, is_typeddict

import pytest

import onward.training
from onward import LanguageModel, Method
from onward.api.language_model import EngineKeywords
from onward.base.fields import Part
from onward.config.part_types import DecoderPart
from onward.families import families


@pytest.mark.long
def test_loading_a_model_imports_no_training_and_no_reports() -> None:
    unused = {"onward.training", "onward.reports", "torch.distributed.fsdp", "sympy"}
    program = f"import onward, sys; onward.load; print(*({unused} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"


def test_importing_onward_does_not_import_torch_and_all_names_are_there() -> None:
    program = "import onward, sys; assert 'torch' not in sys.modules; from onward import *; print(*sorted(globals()))"
    names = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in names if not name.startswith("__")} == {*onward.__all__, "onward", "sys"}
    assert all(getattr(onward, name).__name__ == name for name in onward.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        onward.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_every_part_that_users_can_choose_is_a_public_name() -> None:
    families()  # families define parts that are not public
    types = [*Part.__subclasses__(), *DecoderPart.__subclasses__()]
    types.remove(DecoderPart)
    kinds = (kind for base in types for kind in (base, *base.choices().values()))
    # excludes training and parts defined by examples
    decoders = tuple(f"onward.{folder}." for folder in ("config", "families"))
    names = {kind.__name__ for kind in kinds if kind.__module__.startswith(decoders)}
    assert "Rotary" in names
    assert names <= set(onward.__all__)


def test_every_method_of_fine_tuning_is_a_public_name() -> None:
    kinds = [kind for kind in Method.choices().values() if kind.__module__.startswith("onward.training.methods.")]
    assert len(kinds) > 20
    assert {kind.__name__ for kind in kinds} <= {*onward.training.__all__}


def test_every_class_that_the_facade_takes_or_returns_is_a_public_name() -> None:
    methods = [f for name, f in vars(LanguageModel).items() if inspect.isfunction(f) and not name.startswith("_")]
    kinds = [kind for f in [*methods, onward.load, onward.train] for kind in get_type_hints(f).values()]
    named: set[str] = set()
    while kinds:
        kind = kinds.pop()
        kinds += get_args(kind)
        if isinstance(kind, type) and kind.__module__.startswith("onward.") and not is_typeddict(kind):
            named.add(kind.__name__)
    assert "Completion" in named
    assert named <= set(onward.__all__)


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py")]


def test_every_name_of_onward_on_a_page_is_a_public_name_or_in_its_module() -> None:
    named = {found for page in PAGES for found in re.findall(r"\bonward\.(\w+(?:\.\w+)*)", page.read_text())}
    modules = {path.stem for path in (ROOT / "src/onward").iterdir()}
    assert "load" in named
    assert {first for first in (name.split(".")[0] for name in named) if first not in modules} <= {
        *onward.__all__,
        *["ai", "json", "py", "service"],  # pieces of an address, and suffixes of files
    }


def test_typed_keywords_of_the_engine_are_its_arguments() -> None:
    arguments = {*inspect.signature(LanguageModel.engine).parameters} - {"self"}
    assert arguments == EngineKeywords.__optional_keys__
    assert not EngineKeywords.__required_keys__
