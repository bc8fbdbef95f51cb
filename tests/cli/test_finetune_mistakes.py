"""Wrong fine-tuning commands and data files give one sentence, exit status 2 and no traceback, and no run is started,
unless a reward fails only during the run."""

import json
from pathlib import Path
from typing import Any

import pytest

import onward
from onward.cli import main

from support.finetuning import base_model, write_rows

TALK = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
PROMPT, PAIR = {"prompt": "2 + 3?", "answer": "5"}, {"prompt": "2?", "chosen": "3", "rejected": "4"}
TEXT, LONG = {"text": "2 + 3 is 5"}, {"text": "what is the sum of these numbers? " * 60}
JUDGED, KIND = {"prompt": "2?", "completion": "3", "label": 1}, {"text": "2", "label": "a"}
GRPO, PLAIN = "--method grpo --reward", "--template plain"
turns = lambda *pairs: {"conversations": [{"from": name, "value": value} for name, value in pairs]}
ASKED = turns(("human", "2?"), ("gpt", "3"))
Case = tuple[Any, str, str]  # a row, several rows or bytes; further options; and a part of the message

DATA: dict[str, Case] = {
    "an empty file": (b"", "", "data.jsonl is empty: name a file with text"),
    "blank lines": (b"\n\n", "", "data.jsonl is empty: name a file with text"),
    "null": (b"null\n", "", "data.jsonl line 1 is NoneType, not an object: write it as {...}"),
    "an array": (b"[1]\n", "", "data.jsonl line 1 is list, not an object"),
    "not JSON": (b'{"text": \n', "", "data.jsonl line 1 is not JSON"),
    "a number of 5,001 digits": (b'{"prompt": "a", "answer": 1' + b"0" * 5000 + b"}", "", "line 1 is not JSON"),
    "a deep array": (b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}", "", "line 1 is not JSON"),
    "not UTF-8": (
        b'{"text": "\xe9"}',
        "",
        "data.jsonl is not utf-8 at byte offset 10 (line 1): JSON is written in UTF-8",
    ),
    "a text of another type": ({"text": 5}, "", "line 1: text is 5: give a text"),
    "no text": (
        {"text": None},
        "",
        "line 1: it needs messages, prompt and completion, or text, but has no value in 'text'",
    ),
    "an empty text": ([TEXT, {"text": ""}], "", "data.jsonl line 2: the text is empty"),
    "too long": ([LONG], "", "1 of 1 examples are longer than 96 tokens (data.jsonl line 1 has"),
    "all too long": (LONG, "--too-long drop", "there is no example to train on, because all are too long"),
    "no template": ({"messages": TALK}, "", "no chat template for messages: name one, such as --template plain"),
    "no messages": ({"messages": []}, PLAIN, "line 1: there are no messages: give at least one"),
    "messages of text": ({"messages": "hi"}, PLAIN, "line 1: messages are not a list of {'role'"),
    "a message of text": ({"messages": ["hi"]}, PLAIN, "line 1: messages are not a list of {'role'"),
    "a message of a number": (
        {"messages": [{**TALK[0], "content": 5}, TALK[1]]},
        PLAIN,
        "line 1: message 1 has the content 5: give a text, or remove the record",
    ),
    "a message without content": ({"messages": [{"role": "user"}, TALK[1]]}, PLAIN, "message 1 has the content None"),
    "an answer without content": (
        {"messages": [TALK[0], {**TALK[1], "content": None}]},
        PLAIN,
        "message 2 has the content None",
    ),
    "a role of another type": (
        {"messages": [{**TALK[0], "role": ["user"]}, TALK[1]]},
        PLAIN,
        "line 1: messages are not a list",
    ),
    "an unknown role": (
        {"messages": [TALK[0], {**TALK[1], "role": "bot"}]},
        PLAIN,
        "because it has no answer to train",
    ),
    "a user alone": (
        {"messages": TALK[:1]},
        PLAIN,
        "line 1: Cannot train on this conversation, because it has no answer to train",
    ),
    "tools of text": ({"messages": TALK, "tools": "x"}, PLAIN, "line 1: tools are 'x': give a list of JSON schemas"),
    "an image": (
        {"messages": [{**TALK[0], "content": [{"type": "image_url", "image_url": "x"}]}, TALK[1]]},
        PLAIN,
        "cannot train on message 1, because its part of type 'image_url' is not text",
    ),
    "a turn that never ends": (
        {"messages": TALK},
        "--template open.jinja",
        "never closes the assistant's turn with a control token",
    ),
    "a template that raises": ({"messages": TALK}, "--template raises.jinja", "cannot be used for these messages: no"),
    "a template without messages": (
        {"messages": TALK},
        "--template same.jinja",
        "message 1 has no effect, because the chat",
    ),
    "a broken template": ({"messages": TALK}, "--template broken.jinja", "cannot be used for these messages (line 1)"),
    "no turns": (turns(), PLAIN, "conversations are []: write a list"),
    "an unknown speaker": (turns(("humn", "2?")), PLAIN, "a turn is from 'humn': did you mean human"),
    "a speaker of another type": (turns((["human"], "2?")), PLAIN, "a turn is from ['human']: did you mean human"),
    "a turn of a number": (turns(("human", 5), ("gpt", "3")), PLAIN, "message 1 has the content 5"),
    "a system prompt of a number": ({**ASKED, "system": 5}, PLAIN, "line 1: system is 5: give a text"),
    "a tag of text": ({**ASKED, "kto_tag": "yes"}, f"{PLAIN} --method kto", "label is 'yes': give 1 or true"),
    "an instruction of a list": (
        {"instruction": ["a"], "output": "b"},
        PLAIN,
        "line 1: instruction is ['a']: give a text",
    ),
    "an output of a number": ({"instruction": "a", "output": 5}, PLAIN, "line 1: a turn is 5"),
    "a history of numbers": ({"instruction": "a", "output": "b", "history": [[1, 2]]}, PLAIN, "a turn is 1: write it"),
    "no texts or messages": ({"prompt": 2, "completion": 3}, "", "prompt and answer are int and int: give"),
    "messages and a text": ({"prompt": TALK[:1], "completion": "b"}, PLAIN, "prompt and answer are list and str"),
    "a completion by the user": (
        {"prompt": TALK[:1], "completion": TALK[:1]},
        PLAIN,
        "because it has no answer to train",
    ),
    "equal answers": ({**PAIR, "rejected": "3"}, "--method dpo", "chosen and rejected are equal"),
    "equal conversations": ({"chosen": "abc", "rejected": "abc"}, "--method dpo", "chosen and rejected are equal"),
    "an empty answer": ({**PAIR, "rejected": ""}, "--method dpo", "data.jsonl line 1: the answer is empty"),
    "no chosen answer": (
        {**PAIR, "chosen": None},
        "--method dpo",
        "it needs chosen and rejected, with a prompt, but has 'prompt'",
    ),
    "a chosen number": ({**PAIR, "chosen": 5}, "--method dpo", "prompt and answer are str and int"),
    "a margin of text": ({**PAIR, "margin": "big"}, "--method reward", "margin is 'big': give a finite number"),
    "an infinite margin": (json.dumps({**PAIR, "margin": float("inf")}).encode(), "--method reward", "margin is inf"),
    "a margin of truth": ({**PAIR, "margin": True}, "--method reward", "margin is True: give a finite number"),
    "a huge margin": ({**PAIR, "margin": 10**400}, "--method reward", "line 1: margin is 1000"),
    "prompts for pairs": (PROMPT, "--method dpo", "it needs chosen and rejected, with a prompt, but has 'prompt'"),
    "no label": (TEXT, "--method classify", "needs text and label"),
    "a label of another type": ({**KIND, "label": 1.5}, "--method classify", "needs text and label"),
    "an empty pair": ([KIND, {**KIND, "pair": ""}], "--method classify", "line 2: the text or pair is empty"),
    "one class": (KIND, "--method classify", "tell labels apart from 4 examples with the same label"),
    "one label": (
        [JUDGED, {**JUDGED, "prompt": "4?"}],
        "--method kto",
        "tell labels apart from 2 examples with the same label",
    ),
    "a strength as label": ([JUDGED, {**JUDGED, "label": 5}], "--method kto", "line 2: label is 5: give 1 or true"),
    "one prompt": ([JUDGED, {**JUDGED, "label": 0}], "--method kto", "because all examples have the same prompt"),
    "mixed rows": (
        [JUDGED, {**JUDGED, "prompt": "4?"}, {**JUDGED, "completion": TALK[1:]}],
        "--method kto",
        "data.jsonl line 3: prompt and answer are str and list",
    ),
    "an empty prompt": ({"prompt": ""}, f"{GRPO} length(characters=5)", "line 1: the prompt is empty"),
    "a prompt of another type": (
        {"prompt": 5},
        "--method rloo --reward length(characters=5)",
        "line 1: prompt is 5: give a text",
    ),
    "no answer": ([PROMPT, {**PROMPT, "answer": None}], f"{GRPO} exact", "line 2: it has no answer"),
    "an answer of another type": (
        {"prompt": "2?", "answer": [5]},
        "--method ppo --reward exact",
        "answer is [5]: give",
    ),
    "an answer of truth": (
        {"prompt": "2?", "answer": True},
        f"{GRPO} exact",
        "answer is True: give a text or a number",
    ),
    "large columns": ({**PROMPT, "x": "y" * 70_000}, f"{GRPO} exact", "because they take 70,"),
    "texts for rewards": (TEXT, "--method online_dpo --reward length(characters=5)", "needs prompt, and answer if"),
}
METHODS: dict[str, Case] = {
    "an unknown method": (
        TEXT,
        "--method spo",
        "--method is 'spo', which is not a known kind of Method: did you mean sppo",
    ),
    "two methods": (TEXT, "--method (sft,dpo)", "choose from apo, bco"),
    "a method that does not end": (PAIR, "--method dpo(", "--method is 'dpo(': write it as name"),
    "a field that it lacks": (PAIR, "--method dpo(bet=1)", "method.dpo.bet is not a known option: did you mean beta"),
    "a value without a name": (PAIR, "--method dpo(0.1)", "--method is 'dpo(0.1)': write it as name"),
    "code": (PAIR, "--method dpo(beta=__import__('os').getpid())", "write it as name, name(field=value)"),
    "a field twice": (PAIR, "--method dpo(beta=1) --beta 2", "--beta is given both as an option and inside the method"),
    "a sum of unlike losses": (PAIR, "--method dpo+kto", "--method has the term kto, which is not a loss of pairs"),
    "a sum with an online method": (
        PAIR,
        "--method online_dpo+sft",
        "the term online_dpo, which is not a loss of pairs",
    ),
    "a term twice": (PAIR, "--method sft+2*hinge-2*hinge", "--method has the term hinge twice"),
    "a sum without pairs": (
        PAIR,
        "--method 3*sft+sft(z_loss=1)",
        "no term that compares answers, such as dpo",
    ),
    "an infinite weight": (PAIR, "--method 1e999*dpo", "a weight of method is 0 or not finite"),
    "no weight": (PAIR, "--method dpo+0*ipo", "a weight of method is 0 or not finite"),
    "beta 0": (PAIR, "--method ipo --beta 0", "--beta is 0.0: it must be a number from 1e-06"),
    "beta of text": (PAIR, "--method dpo --beta big", "--beta is 'big': it takes a number"),
    "beta NaN": (PAIR, "--method dpo --beta nan", "--beta is nan: it must be a number from 1e-06"),
    "all pairs swapped": (PAIR, "--method dpo --label-smoothing 1", "--label-smoothing is 1.0: it must be a number"),
    "half of the pairs swapped": (
        PAIR,
        "--method robust --label-smoothing 0.5",
        "--label-smoothing is 0.5: it must be",
    ),
    "tail 2": (PAIR, "--method dpo --tail 2", "--tail is 2.0: it must be a number from 0 to 1"),
    "an unknown variant": (PAIR, "--method apo --variant up", "--variant is 'up': choose from down, zero"),
    "an unknown reference": (PAIR, "--method dpo --reference ofline", "did you mean online"),
    "a reference that never moves": (PAIR, "--method dpo --reference synced(every=0)", "synced.every is 0: it must be"),
    "an adapter's reference": (PAIR, "--method dpo --reference synced --lora 4", "leave out lora, or synced"),
    "a reward for sft": (
        PROMPT,
        "--reward exact",
        "--reward is not an option of sft, but of cispo, grpo, gspo, online_",
    ),
    "no reward": (PROMPT, "--method ppo", "ppo needs a reward"),
    "no judge": (PROMPT, "--method online_dpo", "online_dpo needs a reward"),
    "one sample": (
        PROMPT,
        "--method online_dpo --reward exact --samples 1",
        "--samples is 1: it must be a whole number",
    ),
    "a kept reference": (PROMPT, "--method online_dpo --reward exact --reference kept", "not an option of online_dpo"),
    "temperature 0": (PROMPT, f"{GRPO} exact --temperature 0", "--temperature is 0.0: it must be a number"),
    "clip low 2": (PROMPT, f"{GRPO} exact --clip-low 2", "--clip-low is 2.0: it must be a number from 0 to 1"),
    "no completion": (PROMPT, f"{GRPO} exact --completion-length 0", "--completion-length is 0: it must be"),
    "an unknown mean": (PROMPT, f"{GRPO} exact --reduction mean", "--reduction is 'mean': choose from bnpo"),
    "an unknown environment": (PROMPT, f"{GRPO} exact --environment shell", "choose from calculator, function"),
    "no turns of the model": (PROMPT, f"{GRPO} exact --environment calculator(turns=0)", "turns is 0: it must be"),
    "no file of an environment": (PROMPT, f"{GRPO} exact --environment none.py:f", "there is no file none.py"),
    "a role without a template": (PROMPT, f"{GRPO} exact --environment calculator(role=tool)", "environment.role is"),
    "no teacher": (TEXT, "--method distill", "distill needs a teacher"),
    "another vocabulary": (TEXT, "--method distill --teacher other", "the vocabulary of the teacher"),
    "an adapter as teacher": (
        TEXT,
        "--method distill --teacher adapter",
        "because it holds an adapter: make a model of it with",
    ),
    "mix 2": (TEXT, "--method distill --teacher other --mix 2", "--mix is 2.0: it must be a number from 0 to 1"),
}
REWARDS: dict[str, Case] = {
    "a reward that raises": (PROMPT, f"{GRPO} mine.py:raises", "ZeroDivisionError"),
    "a reward of NaN": (PROMPT, "--method rloo --reward mine.py:nan", "the reward nan returned nan"),
    "a reward of too few": (PROMPT, "--method ppo --reward mine.py:few", "returned 1 values for"),
    "an unknown reward": (
        PROMPT,
        f"{GRPO} exakt",
        "--reward is 'exakt', which is not a known kind of Reward: did you mean",
    ),
    "a reward that does not end": (PROMPT, f"{GRPO} exact+", "--reward is 'exact+': write it as name"),
    "an infinite weight of a reward": (PROMPT, f"{GRPO} 1e999*exact", "a weight of reward is not a finite number"),
    "a number as reward": (PROMPT, f"{GRPO} 5", "--reward is 5: choose from "),
    "an option after a colon": (PROMPT, f"{GRPO} length:5", "options are in parentheses"),
    "a length below 0": (PROMPT, f"{GRPO} length(characters=-1)", "length.characters is -1: it must be"),
    "no tests": (PROMPT, f"{GRPO} code", "line 1: it has no tests, which the reward code needs"),
    "a malformed pattern": (PROMPT, f"{GRPO} regex(pattern='(')", "not a regular expression: missing )"),
    "a pattern without end": (PROMPT, GRPO + " regex(pattern='a{9999999}')", "repeats a part more than 1,000,000"),
    "a template without a gap": (PROMPT, f"{GRPO} format(template='a')", "write {} in the place of the text"),
    "no schema": (PROMPT, f"{GRPO} json_schema(file='schema.json')", "there is no file schema.json: give"),
    "a reward's file that does not exist": (
        PROMPT,
        f"{GRPO} none.py:f",
        "there is no file none.py: give FILE.py:FUNCTION",
    ),
    "a reward function that its file lacks": (
        PROMPT,
        f"{GRPO} mine.py:raise",
        "mine.py has no function 'raise': did you mean raises",
    ),
    "a model without rewards": (PROMPT, GRPO + " {base}", "no reward head"),
    "an address without http": (PROMPT, f"{GRPO} pairwise(url='localhost',model=m)", "give an address such as http"),
    "a prompt without answers": (PROMPT, f"{GRPO} pairwise(url='http://a',model=m,prompt='?')", "write {first} where"),
}
OTHERS: dict[str, Case] = {
    "no such target": (TEXT, "--lora lora(rank=2,targets=('attn.qq',))", "did you mean attn.q?"),
    "an unknown beginning": (TEXT, "--lora lora(init=pisa)", "not a known kind of Initialization: did you mean pissa?"),
    "weights that move backwards": (TEXT, "--weights ramp(begin=0.9,end=0.1)", "begin is 0.9 and end is 0.1: begin must"),
    "rank 0": (TEXT, "--lora 0", "rank is 0: it must be a whole number from 1"),
    "a rank of text": (TEXT, "--lora big", "--lora is 'big', which is not a known kind of Adapters"),
    "alpha NaN": (TEXT, "--lora lora(alpha=nan)", "alpha is nan: it must be a number"),
    "all dropped": (TEXT, "--lora lora(dropout=1)", "dropout is 1.0: it must be a number from 0"),
    "dropout with pairs": (PAIR, "--method dpo --lora lora(dropout=0.1)", "dpo, which uses no dropout"),
    "a quantized base": (TEXT, "", "int8: train adapters on it with onward finetune --lora 16"),
    "quantized without adapters": (
        TEXT,
        "--quantize int8",
        "--quantize is 'int8' without adapters to train: give lora",
    ),
    "three bits": (TEXT, "--lora 4 --quantize int3", "--quantize is 'int3': did you mean int8"),
    "a first adapter that does not exist": (TEXT, "--lora 4 --first frozen", "base is not an adapter: leave it out"),
    "a first adapter alone": (TEXT, "--first merged", "without adapters on top of it: give lora, or leave it out"),
    "a length below 0 tokens": (TEXT, "--length -1", "--length is -1: it must be a whole number"),
    "a length beyond the context": (
        TEXT,
        "--length 5000",
        "--length is 5000, more than the 96 tokens of the model's context",
    ),
    "an unknown cut": (TEXT, "--too-long crop", "--too-long is 'crop': did you mean drop"),
    "an unknown template": (TEXT, "--template chatlm", "--template is 'chatlm': did you mean chatml"),
    "two weights": (TEXT, "--weights 1 --weights 2", "there are 2 weights for 1 sources: give one for each"),
    "a weight below 0": (TEXT, "--weights -1", "--weights is (-1.0,)"),
    "a share above 1": (TEXT, "--validation 1.5", "validation is 1.5: give a file, a share above 0 and below 1"),
    "no file to validate on": (TEXT, "--validation none.jsonl", "none.jsonl does not exist"),
    "steps and epochs": (TEXT, "--epochs 3", "--steps and --epochs are given together: choose one of"),
    "a learning rate of NaN": (TEXT, "--learning-rate nan", "--learning-rate is nan: it must be a number"),
    "an unknown optimizer": (TEXT, "--optimizer adamm", "--optimizer is 'adamm': choose adamw, muon"),
    "no column": (TEXT, "--columns text=txt", "line 1: it has no column 'txt': did you mean text"),
    "a column twice": (TEXT, "--columns text=text,text=id", "columns names two columns for text: name one"),
    "an option of onward train": (TEXT, "--config fine.toml", "encoding is not an option of runs on examples"),
    "a field of another method in a file": (TEXT, "--config method.toml", "method.sft.beta is not a known option"),
    "no module": (TEXT, "--import none_such", "there is no module none_such: --import takes the name"),
    "show and json": (TEXT, "--show 1 --json", "prints examples and exits, with --json"),
    "show nothing": (TEXT, "--show 0", "--show is 0: give the number of examples to print, at least 1"),
    "the folder of a model": (TEXT, "--out {base}", "base contains a model, which a run would overwrite: choose"),
    "a file as folder": (TEXT, "--out data.jsonl", "cannot write data.jsonl: File exists; choose another --out"),
    "no further data": (TEXT, "none.jsonl", "none.jsonl does not exist: name a file"),
    "a further picture": (TEXT, "open.jinja", "open.jinja is not a table: give .jsonl, .json, .csv, .parquet"),
}
MISTAKES = {**DATA, **METHODS, **REWARDS, **OTHERS}
assert len(MISTAKES) == sum(map(len, (DATA, METHODS, REWARDS, OTHERS))) > 100


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def place(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the files that the commands name."""
    monkeypatch.chdir(tmp_path)
    Path("fine.toml").write_text('encoding = "latin-1"')
    Path("method.toml").write_text('[method]\nkind = "sft"\nbeta = 1')
    Path("open.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    Path("raises.jinja").write_text("{{ raise_exception('no') }}")
    Path("same.jinja").write_text("hello")
    Path("broken.jinja").write_text("{% for m in messages %}{{ m.content }}")
    Path("mine.py").write_text(
        "def raises(p, c, a): return [1 / 0]\ndef few(p, c, a): return [1.0]\n"
        "def nan(p, c, a): return [float('nan')] * len(c)\n"
    )
    return tmp_path


def times_of_files(*folders: Path) -> dict[Path, int]:
    """The modification time of each file, except Python's bytecode caches."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in files if path.parent.name != "__pycache__"}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence_and_no_run_is_begun(
    case: str, base: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, options, sentence = MISTAKES[case]
    if isinstance(record, bytes):
        Path("data.jsonl").write_bytes(record)
    else:
        write_rows(Path("data.jsonl"), record if isinstance(record, list) else [record] * 4)
    if case == "another vocabulary":
        onward.train_tokenizer("byte", []).save(Path("other"))
    if case == "an adapter as teacher":
        onward.load(base).tokenizer.save(Path("adapter"))
        Path("adapter/adapter_config.json").write_text("{}")
    if case == "a quantized base":
        plain = base_model(place / "plain", d_model=32, d_ff=64)
        onward.save(onward.load(plain, quantize="int8"), base := place / "int8")
    words = f"--steps 1 --validation none --precision fp32 --device cpu {options}".replace("{base}", str(base))
    if "--reward" in options and "sft" not in case:
        words += " --samples 2" * ("--samples" not in options) + " --completion-length 2" * ("-length" not in options)
    argv = ["finetune", str(base), "data.jsonl", *([] if "--out" in options else ["--out", "run"]), *words.split()]
    before = times_of_files(Path(), base)
    assert main(argv) == 2
    said = capsys.readouterr()
    last = said.err.splitlines()[-1]
    assert last.startswith("onward: ")
    assert sentence in last
    assert "Traceback" not in said.err
    # rewards that are called only during the run
    if case in ("a reward that raises", "a reward of NaN", "a reward of too few"):
        assert not Path("run/result.json").exists()
        return
    assert said.err.count("\n") == 1
    assert said.out == ""
    after = times_of_files(Path(), base)
    assert {path for path in after if before.get(path) != after[path]} <= {base / "train.lock"}
    assert not Path("run").exists()


@pytest.mark.parametrize("option", ["--columns prompt=question", "--ignore notes"])
def test_options_of_examples_are_refused_for_texts(
    option: str, base: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("what is the sum")
    assert main(["evaluate", str(base), "text.txt", *option.split()]) == 2
    name = option.partition(" ")[0].removeprefix("--")
    assert f"{name} applies to examples, but {base} is evaluated on texts" in capsys.readouterr().err
