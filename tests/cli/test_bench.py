"""onward bench: figures for each precision and number of rows, a picture, and mistakes in one sentence."""

import json
from pathlib import Path

import pytest
import torch

import onward
from onward.cli import main
from onward.families.falcon import FalconAlibi
from onward.measuring import generation as speed
from onward.measuring.decoders import models_in, stored_precision
from onward.measuring.roofline import roofline
from onward.planning.parameters import parameters
from onward.transforms import quantize_model

LIMITS = speed.MachineLimits(1e10, {torch.float32: 1e11})
TINY = onward.DecoderConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, context_length=64)


@pytest.mark.long
def test_bench_prints_a_row_for_each_precision_and_batch(tiny_run: Path, tmp_path: Path, capsys) -> None:
    picture = tmp_path / "roof.json"
    words = f"bench {tiny_run} --batch 1,3 --precision float32,int8 --prompt 8 --new 8 --seconds 0 --out {picture}"
    assert main([*words.split(), "--json"]) == 0
    captured = capsys.readouterr()
    assert "4 cases" in captured.err
    found = json.loads(captured.out)
    cases = [(one["precision"], one["batch"]) for one in found["speeds"]]
    assert cases == [(precision, batch) for precision in ("float32", "int8") for batch in (1, 3)]
    for one in found["speeds"]:
        assert min(value for value in one.values() if isinstance(value, float)) > 0
        assert one["plain"] == ""
    assert [point["batch"] for point in json.loads(picture.read_text())["panels"][0]["points"]] == [1, 3, 1, 3]
    assert (
        main(
            [
                "bench",
                str(tiny_run),
                *["--batch", "1", "--precision", "float32", "--prompt", "8", "--new", "8", "--seconds", "0"],
            ]
        )
        == 0
    )
    assert "of the bandwidth" in capsys.readouterr().out


def test_bytes_operations_and_shares_follow_from_the_model() -> None:
    model = onward.Decoder(TINY).eval()
    found = speed.measure(model, "float32", 2, prompt=16, new=8, seconds=100, limits=LIMITS)
    length, table = 16 + 8 / 2, 64 * 32
    cache = 4 * 2 * 2 * 2 * 8 * length  # bytes per number, keys and values, layers, heads, head size
    read = 4 * (parameters(TINY) - table) + 2 * cache
    assert found.bytes_per_token == pytest.approx(read / 2)
    assert found.bandwidth_share == pytest.approx(found.decode / 2 * read / 1e10)
    operations = 2 * (parameters(TINY) - table - 5 * 32) + 4 * 2 * 32 * length  # the 5 norms have no matrix products
    assert found.intensity == pytest.approx(2 * operations / read)


def test_the_reason_for_plain_steps_is_given() -> None:
    alibi = onward.Decoder(
        onward.DecoderConfig(vocab_size=8, d_model=16, n_layers=1, n_heads=2, position=FalconAlibi())
    )
    assert onward.Engine(alibi.eval(), rows=1).compile() == "a nonlinear bias of the scores"
    assert onward.Engine(onward.Decoder(TINY).eval(), rows=1).compile() == ""
    paged = onward.BlockManager(onward.PagedKVCache(TINY, rows=1, length=32, blocks=4, quantized=True))
    assert onward.Engine(onward.Decoder(TINY).eval(), cache=paged).compile() == ""


def test_time_ends_a_run_early_with_enough_tokens() -> None:
    engine = onward.Engine(onward.Decoder(TINY).eval(), rows=1)
    found = speed.serve(engine, [onward.Request([1, 2], speed.GREEDY, 40)], limit=0)
    assert len(found.tokens[0]) == speed.LEAST + 1
    assert found.decode_speed > 0


def test_a_roofline_shows_each_case_as_a_share_of_its_roof() -> None:
    cases = [speed.Speed("float32", batch, 1, 1, 1, 0.5, 0.5, 0.5 * batch) for batch in (1, 64)]
    lines = roofline("m", cases, LIMITS).text(100).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("float32")] == ["50%", "160%"]
    assert roofline("m", cases, LIMITS).svg().count("<circle") == 2


REFUSED = {
    "--batch 0": "--batch is '0': write numbers of rows",
    "--batch 1,x": "such as 1,16",
    "--precision int3": "--precision has 'int3': did you mean int8",
    "--out roof.jpg": "Cannot write roof.jpg: choose a name that ends in .svg",
    "--prompt 0": "--prompt is 0",
    "--prompt 60": "Cannot fit prompts of 60 tokens and 16 new ones",
    "--new 7": "--new is 7",
}


@pytest.mark.parametrize("words", REFUSED)
def test_mistakes_are_one_sentence(words: str, tiny_run: Path, capsys) -> None:
    assert main(["bench", str(tiny_run), "--precision", "float32", *words.split()]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("onward: ")
    assert REFUSED[words] in message


def test_a_quantized_folder_is_measured_as_it_is_stored(tmp_path: Path, capsys) -> None:
    model = onward.Decoder(TINY).eval()
    quantize_model(model, "int4")
    onward.save(onward.LanguageModel(model, onward.train_tokenizer("byte", [])), tmp_path / "int4")
    folder = str(tmp_path / "int4")
    assert stored_precision(folder) == "int4"
    ((precision, loaded),) = models_in(["int4"], folder, torch.device("cpu"), 0)
    assert precision == "int4"
    codes = lambda decoder: {name: kept for name, kept in decoder.named_buffers() if name.endswith("codes")}
    assert all(torch.equal(kept, codes(loaded)[name]) for name, kept in codes(model).items())
    assert main(["bench", folder, "--precision", "int8"]) == 2
    assert "whose weights are stored as int4: leave out --precision" in capsys.readouterr().err


def test_a_published_release_gets_random_weights() -> None:
    ((precision, model),) = models_in(["int8"], "pythia-14m", torch.device("cpu"), 0)
    assert precision == "int8"
    assert model.config.n_layers == 6
