"""benchmarks.decode on a tiny model: its files, its computations, and its sections."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.decode import families, parts, serving, speculation, speed, uncached, variants
from benchmarks.decode.bench import Bench
from benchmarks.decode.models import CONFIG, TINY, gguf_name, gguf_tensor, random_model
from benchmarks.decode.tables import Table
from onward import Decoder
from onward.families import read
from onward.measuring.generation import Generation
from onward.planning.parameters import parameters

ROOT = Path(__file__).parents[1]
ALONE = (speed.decode, speed.prefill, speed.batch, speed.rows, serving.requests, serving.slots, serving.context)


@pytest.mark.parametrize(
    "section",
    [
        *ALONE,
        parts.parts,
        uncached.uncached,
        speculation.speculation,
        pytest.param(variants.variants, marks=pytest.mark.long),
    ],
    ids=lambda f: f.__name__,
)
def test_section_without_other_libraries_gives_a_table_of_onward(
    section: Callable[[Bench], Table], tmp_path: Path
) -> None:
    absent = {"transformers": "", "llama.cpp": ""}
    table = section(Bench(TINY, ["f32", "bf16", "int8", "int4"], 1, tmp_path, absent))
    assert table.rows
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert (table.picture is not None) == (section is uncached.uncached)
    assert len(table.as_text().split("\n\n")[1].splitlines()) == 2 + len(table.rows)


@pytest.mark.long
def test_program_prints_the_tables_of_all_sections_as_json() -> None:
    command = [sys.executable, "-m", "benchmarks.decode", "--tiny", "--rounds", "1", "--threads", "1", "--json"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["tables"]) == 15
    peers = {row[1] for row in result["tables"][1]["rows"]}
    assert peers == {"onward", "transformers", "llama.cpp"} - set(result["absent"])


@pytest.mark.parametrize("name", ["llama4_text", "afmoe", "ernie4_5_moe", "glm4"])
def test_steps_of_a_family_are_compiled(name: str) -> None:
    config = read(families.config_of(name, tiny=True).to_dict())[1]
    assert not families.refusal(Decoder(config).bfloat16().eval())


def test_the_model_has_124_668_672_parameters() -> None:
    assert parameters(CONFIG) == 124_668_672


@pytest.mark.parametrize("length", [1, 7])
def test_counted_flops_are_those_of_the_matrix_products(length: int) -> None:
    model = random_model(TINY.config)
    with (
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
    ):  # attention counted as matrix products
        model.logits(model.hidden(torch.zeros(1, length, dtype=torch.long))[:, -1:])
    assert uncached.flops(TINY.config, length, length) == counter.get_total_flops()


def test_decode_speed_counts_the_time_in_which_all_rows_decode() -> None:
    run = Generation([[0] * 4, [0] * 3], [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 6.0]])
    assert run.first == 2.0
    assert run.total == 6.0
    assert run.decode_speed == 3 / (4.0 - 2.0)


def test_gguf_queries_turn_in_neighboring_pairs() -> None:
    weight = torch.arange(2 * 6.0)[:, None]  # two heads of 6 rows, rotated as (0, 3), (1, 4), (2, 5)
    config = TINY.config.__class__(10, d_model=12, n_layers=1, n_heads=2)
    rows = gguf_tensor("blocks.0.attn.q.weight", weight, config)[:, 0].tolist()
    assert rows == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert (gguf_tensor("blocks.0.attn.v.weight", weight, config) == weight.numpy()).all()


def test_every_parameter_has_a_name_in_gguf() -> None:
    names = [gguf_name(name) for name, _ in random_model(TINY.config).named_parameters()]
    assert len(set(names)) == len(names) == 3 + 9 * TINY.config.n_layers
    assert "blk.1.ffn_down.weight" in names
