"""The examples, run as a user runs them; their claims are checked against their output."""

import ast
import importlib.util
import io
import json
import math
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
NUMBER = r"(-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)"


def call(name: str, *arguments: str) -> tuple[object, str, str]:
    """Run an example as a program in this process; return its exit status, standard output and standard error."""
    path = str(ROOT / "examples" / f"{name}.py")
    out, err, threads = io.StringIO(), io.StringIO(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err), torch.enable_grad():
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [path, *arguments])
        try:
            runpy.run_path(path, run_name="__main__")
            status: object = 0
        except SystemExit as exit:
            status = exit.code or 0
        finally:
            torch.set_num_threads(threads)
    return status, out.getvalue(), err.getvalue()


@cache
def printed(name: str, *arguments: str) -> str:
    status, out, err = call(name, *arguments)
    assert status == 0, err
    return out


def numbers(pattern: str, text: str) -> list[float]:
    """All numbers at the position of # in the pattern; at least one."""
    found = re.findall(re.escape(pattern).replace(r"\ ", r"\s+").replace(r"\#", NUMBER), text)
    assert found, f"{pattern!r} is not in\n{text}"
    return [float(number.replace(",", "")) for number in found]


def number(pattern: str, text: str) -> float:
    (found,) = numbers(pattern, text)
    return found


def two_prompts() -> dict:
    return runpy.run_path(str(ROOT / "examples" / "two_prompts.py"))


def test_the_list_of_examples_has_a_row_for_each() -> None:
    text = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\)", text, re.MULTILINE)) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_contains_the_first_line_of_the_docstring(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert text.partition('"""')[2].partition("\n")[0] in printed(name, "--help")


@pytest.mark.parametrize("name", ["char_model", "mini_gpt"])
def test_missing_text_is_one_sentence_and_status_2(name: str) -> None:
    status, _, err = call(name, "no_such_book.txt")
    assert status == 2
    assert "no_such_book.txt does not exist" in err


@pytest.mark.long
def test_program_prints_the_same_as_a_call_in_this_process() -> None:
    command = [sys.executable, str(ROOT / "examples" / "llama_block.py")]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, printed("llama_block"))


class TestOneHead:
    def test_attention_weights_sum_to_1_and_are_0_above_the_diagonal(self) -> None:
        rows = re.findall(r"\[((?:[\d.]+(?:, )?){6})\]", printed("one_head").split("Every row")[0])
        weights = torch.tensor([[float(x) for x in row.split(",")] for row in rows])
        assert weights.shape == (6, 6)
        assert (weights.sum(-1) - 1).abs().max() < 0.004  # printed with three digits
        assert number("sums to 1 (largest error #)", printed("one_head")) < 1e-6
        assert number("the largest weight is #", printed("one_head")) == 0.0
        assert weights.triu(1).max() == 0.0

    def test_output_has_the_shapes_of_vectors_weights_and_logits(self) -> None:
        assert "(1, 6, 4)" in printed("one_head")
        assert "(1, 1, 6, 6)" in printed("one_head")
        assert "(1, 6, 20)" in printed("one_head")

    def test_last_vector_changes_no_logits_at_earlier_positions(self) -> None:
        changes = re.search(r"each position:\ntensor\(\[(.*)\]\)", printed("one_head"))
        assert changes
        *before, last = map(float, changes[1].split(","))
        assert before == [0.0] * 5
        assert last > 0

    @pytest.mark.parametrize("seed", ["0", "1"])
    def test_untrained_loss_is_near_ln_20_and_falls_in_training(self, seed: str) -> None:
        text = printed("one_head", "--seed", seed)
        assert number("Untrained: loss #", text) == pytest.approx(math.log(20), abs=0.15)
        assert min(numbers("gradient norm at the query projection #", text)) > 1e-4
        assert number("AdamW: loss #", text) < number("Untrained: loss #", text)


class TestTwoPrompts:
    def test_model_has_37_parameters_and_answers_both_prompts(self) -> None:
        text = printed("two_prompts")
        assert number("parameters #", text) == 37
        assert "what is attention EOS -> awesome EOS\n  attention is what EOS -> awesome EOS" in text

    def test_38_of_40_seeds_answer_both_prompts(self) -> None:
        example, answered = two_prompts(), 0
        for seed in range(40):
            example["train"](model := example["new_model"](seed))
            answered += all(example["continuation"](model, prompt) == "awesome EOS" for prompt in example["PROMPTS"])
        assert answered >= 38

    def test_wrong_loss_falls_while_the_right_loss_is_worse_than_a_guess(self) -> None:
        example = two_prompts()
        model, inputs, targets = example["new_model"](0), example["INPUTS"], example["TARGETS"]
        before = example["wrong_loss"](model(inputs), targets)
        assert example["train"](model, example["wrong_loss"]) < before / 10  # the falling loss looks like learning
        # and the model is worse than a uniform guess
        assert example["right_loss"](model(inputs), targets) > math.log(5)
        with pytest.raises((RuntimeError, ValueError), match="target"):
            example["wrong_loss"](model(inputs[:, :4]), targets[:, :4])

    def test_output_has_the_wrong_loss_beside_the_right_one(self) -> None:
        text = printed("two_prompts")
        assert number("that loss falls to #", text) < 0.1
        assert number("The right loss of the same model is #", text) > math.log(5)
        assert "one token shorter it shows at once: Expected target size" in text

    @pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="needs the extra `lightning`")
    def test_lightning_trains_to_the_same_weights(self) -> None:
        assert number("the weights differ by # from", printed("two_prompts", "--lightning")) < 1e-6

    def test_missing_lightning_is_named_with_its_pip_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "lightning", None)
        example = two_prompts()
        with pytest.raises(SystemExit, match=r"pip install 'onward\[lightning\]'"):
            example["train_with_lightning"](example["new_model"](0))


class TestCharModel:
    def test_loss_falls_and_samples_have_characters_of_the_text_only(self) -> None:
        text = printed("char_model", "LICENSE", "--steps", "30")
        first, last = numbers("loss #", text.split("ln")[1])[:2]
        assert first == pytest.approx(number("= #", text), abs=0.15)
        assert last < first - 1
        assert number("validation  loss #", text) < first - 1
        known = set((ROOT / "LICENSE").read_text(encoding="utf-8"))
        lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
        samples = [ast.literal_eval(line) for line in lines]  # each was printed by repr
        assert len(samples) == 6
        assert set("".join(samples)) <= known | {"\ufffd"}
        assert samples[:3] != samples[3:]


class TestMiniGpt:
    def test_parts_add_up_to_30_044_544_parameters(self) -> None:
        parts, rest = printed("mini_gpt", "--steps", "2").split("total")
        assert number("#", rest.split("\n")[0]) == 30_044_544
        assert sum(int(n.replace(",", "")) for n in re.findall(r" ([\d,]+)(?:\s+\(.*)?$", parts, re.M)) == 30_044_544

    def test_loss_falls_with_gradients_clipped_to_1(self) -> None:
        text = printed("mini_gpt", "--steps", "2")
        first, second = numbers("loss #  gradient", text)
        assert first == pytest.approx(math.log(50_257), abs=0.15)
        assert second < first
        assert numbers("clipped to #", text) == [1.0, 1.0]
        assert min(numbers("gradient norm #,", text)) > 1


class TestLlamaBlock:
    def test_block_has_no_biases_and_a_d_ff_of_170_for_a_d_model_of_64(self) -> None:
        block = printed("llama_block").split("\n1.")[0]
        assert "mlp.gate.weight    (170, 64)" in block
        assert ".bias" not in block

    def test_rms_norm_scales_to_1_and_does_not_center(self) -> None:
        means = dict(re.findall(rf"(\w+)\s+mean\s+{NUMBER}", printed("llama_block")))
        assert abs(float(means["RMSNorm"])) > 0.5
        assert abs(float(means["LayerNorm"])) < 1e-3
        sizes = numbers("root mean square #", printed("llama_block"))
        assert sizes[1:] == [1.0, 1.0]

    def test_rotary_score_depends_on_the_distance_only(self) -> None:
        text = printed("llama_block")
        scores = numbers(": score #, the same", text)
        assert len(set(scores)) == len(scores) == 6
        assert max(numbers("pairs up to #", text)) < 1e-6

    def test_attention_is_finite_beyond_the_training_length(self) -> None:
        text = printed("llama_block")
        assert "256 tokens into a model for 32" in text
        assert "finite attention: True, finite logits: True" in text
        assert number("rows sum to 1 up to #", text) < 1e-5


class TestKvCache:
    def test_cache_gives_the_same_logits_for_a_hundredth_of_the_arithmetic(self, tmp_path: Path) -> None:
        text = printed("kv_cache", "--length", "256", "--rounds", "1", "--out", str(tmp_path / "cache.svg"))
        assert number("differ by # at most", text) < 1e-5
        assert number("by at most #%", text) < 1
        rows = re.findall(rf"^ +(\d+) +{NUMBER} MFLOP.*?ms +{NUMBER} MFLOP", text, re.M)
        without, cached = ([float(row[i].replace(",", "")) for row in rows] for i in (1, 2))
        assert without[-1] / without[0] > 256 / 32  # with attention, the cost grows faster than the length
        assert cached[-1] < 1.2 * cached[0]
        assert without[-1] > 200 * cached[-1]
        assert "without a cache" in (tmp_path / "cache.svg").read_text()


class TestBeyondLength:
    @pytest.mark.long
    def test_curves_of_both_positions_reach_four_times_the_trained_length(self, tmp_path: Path) -> None:
        out = tmp_path / "beyond.json"
        assert number("rotary perplexity #", printed("beyond_length", "--steps", "20", "--out", str(out))) < 40
        (panel,) = json.loads(out.read_text())["panels"]
        assert panel["x"][-1] == 120
        assert {name: len(values) for name, values in panel["series"].items()} == dict.fromkeys(
            ("rotary", "ALiBi", "sinusoidal", "learned", "rotary, yarn:4"), 15
        )
        assert panel["series"]["learned"][4:] == [None] * 11

    @pytest.mark.long
    def test_perplexity_rises_with_rotary_positions_and_stays_with_alibi(self) -> None:
        text = printed("beyond_length")
        rotary, alibi, sinusoidal, yarn = numbers("16 to 31, # at positions", text)
        assert min(rotary, sinusoidal) > 1.5 * yarn
        assert rotary > 1.5 * number("rotary perplexity #", text)
        assert alibi < 1.1 * number("ALiBi perplexity #", text)


class TestExperts:
    def test_shares_of_each_kind_sum_to_1_and_both_layers_are_drawn(self, tmp_path: Path) -> None:
        text = printed("experts", "--steps", "3", "--out", str(tmp_path / "experts.json"))
        assert "consonant" in text
        panels = json.loads((tmp_path / "experts.json").read_text())["panels"]
        assert [panel["title"] for panel in panels] == [
            *("layer 0: kinds of characters", "layer 1: kinds of characters"),
            *("layer 0", "layer 1"),
        ]
        for row in (row for panel in panels[:2] for row in panel["values"]):
            assert sum(row) == pytest.approx(1, abs=1e-3)

    @pytest.mark.long
    def test_routers_divide_spaces_digits_and_vowels_among_experts(self) -> None:
        layer = printed("experts").split("layer 1")[0]
        rows = {
            name: [int(x) for x in re.findall(r"(\d+)%", line)] for name, line in re.findall(r"  (\w+) +(.*%)", layer)
        }
        best = {name: max(range(4), key=row.__getitem__) for name, row in rows.items()}
        assert min(max(rows[name]) for name in ("space", "digit", "vowel")) > 60
        assert len({best[name] for name in ("space", "digit", "vowel")}) == 3


class TestArithmeticRl:
    def test_accuracy_is_measured_before_and_after(self, tmp_path: Path) -> None:
        out = tmp_path / "rl.json"
        text = printed("arithmetic_rl", "--sft-steps", "5", "--steps", "2", "--sums", "4", "--out", str(out))
        assert number("# parameters", text) < 1_000_000
        (panel,) = json.loads(out.read_text())["panels"]
        before, *during = panel["series"]["held-out sums"]
        assert panel["x"] == [0, 1, 2]
        assert 100 * before == pytest.approx(number("fine-tuning: #%", text))
        assert [100 * share for share in during] == pytest.approx(numbers("samples, #%", text))
        assert 100 * during[-1] == pytest.approx(number("after GRPO: #%", text))

    @pytest.mark.long
    def test_rewards_teach_what_examples_did_not(self) -> None:
        text = printed("arithmetic_rl")
        before, after = number("fine-tuning: #%", text), number("after GRPO: #%", text)
        assert before < 60
        assert after > before + 20


class TestCacheMemory:
    def test_windows_and_latents_keep_the_cache_small(self, tmp_path: Path) -> None:
        text = printed("cache_memory", "--out", str(tmp_path / "memory.json"))
        rows = {line.split()[0]: [float(x) for x in re.findall(r"\d+\.\d+", line)[-3:]] for line in text.splitlines()}
        assert rows["gpt2"] == [0.038, 0.302, 4.832]
        assert rows["llama-3-8b"][2] == pytest.approx(rows["llama-7b"][2] / 4, abs=0.01)
        assert rows["mistral-7b"][2] == rows["mistral-7b"][1]
        (panel,) = json.loads((tmp_path / "memory.json").read_text())["panels"]
        assert len(panel["series"]) == 7


class TestDoubleContext:
    def test_doubling_costs_twice_at_first_and_almost_four_times_in_the_end(self, tmp_path: Path) -> None:
        text = printed("double_context", "--out", str(tmp_path / "context.json"))
        factors = [float(found) for found in re.findall(r"(\d\.\d\d)x", text)]
        assert factors == sorted(factors)
        assert 2 < factors[0] < 2.1
        assert 3.7 < factors[-1] < 4
        assert "From 65,536 tokens on attention takes more" in text
        assert (tmp_path / "context.json").exists()


class TestChinchilla:
    def test_table_has_the_published_optima_and_the_refit_near_20_tokens(self, tmp_path: Path) -> None:
        row = next(
            line for line in printed("chinchilla", "--out", str(tmp_path / "c.json")).splitlines() if "10.0 B" in line
        )
        flops, tokens = re.findall(r"\de\+\d\d|\d\.\d\de\+\d\d", row), re.findall(r"([\d,.]+) B", row)[1:]
        assert [float(tokens[0]), float(tokens[1])] == pytest.approx([205.1, 219.5], rel=0.01)  # table 3, table A3
        assert float(tokens[2]) / 10 > 40
        assert 17 < float(tokens[3]) / 10 < 26
        assert len(flops) == 4
        assert len(json.loads((tmp_path / "c.json").read_text())["panels"]) == 3


class TestForecast:
    def test_last_run_is_forecast_from_the_first_three_within_one_percent(self, tmp_path: Path) -> None:
        text = printed("forecast", "--out", str(tmp_path / "forecast.json"))
        assert abs(number("off by #%", text)) < 1
        with_floor, without = number(": # bits per byte", text), number("without a floor: #,", text)
        assert 0.7 < without < with_floor < 0.8
        assert (tmp_path / "forecast.json").exists()


class TestGptSizes:
    def test_parts_of_each_model_add_up_to_its_published_size(self, tmp_path: Path) -> None:
        text = printed("gpt_sizes", "--out", str(tmp_path / "sizes.json"))
        published = {"gpt": 116_534_784, "gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "gpt3-175b": 174_604_259_328}
        for line in text.splitlines()[1:]:
            name, *cells = line.split()
            *parts, total, rule = (int(cell.replace(",", "")) for cell in cells)
            assert sum(parts) == total == published.get(name, total)
            assert rule < total
        assert len(json.loads((tmp_path / "sizes.json").read_text())["panels"]) == 6
