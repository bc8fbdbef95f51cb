"""A model is found by its name on the hub; no partial file is mistaken for a complete one, and the access token is sent
to no other host."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward.cli import main
from onward.hub.folder import locate
from onward.hub.names import HubName

from support.decoders import DECODERS, decoder
from support.hub import CUT, Hub, Lookups, Repo, put_in_cache
from support.llama_cpp import logprobs

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 400,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
}
OTHERS = {"pytorch_model.bin": b"a pickle", "modeling.py": b"import os", "original/model.safetensors": b"again"}
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
SHARDS = {
    "config.json": b"{}",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    **dict.fromkeys(INDEX["weight_map"].values(), b"a shard"),
    "consolidated.safetensors": b"the weights again",
}
SEES = {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", "num_hidden_layers": 2}}
PREDICTS = {"model_type": "deepseek_v3", "num_hidden_layers": 2}
WEIGHTS = {  # config, a tensor that is read, and a tensor of an encoder or of a multi-token prediction layer
    "sees": (SEES, "model.language_model.layers.1.mlp.up_proj.weight", "model.visual.blocks.7.attn.qkv.weight"),
    "predicts": (PREDICTS, "model.layers.1.mlp.up_proj.weight", "model.layers.2.eh_proj.weight"),
}


def sharded(config: object, *tensors: str) -> dict[str, bytes]:
    """A model with each tensor in a separate file."""
    weight_map = {tensor: f"model-0000{i}-of-00002.safetensors" for i, tensor in enumerate(tensors, 1)}
    files = {"config.json": config, "model.safetensors.index.json": {"weight_map": weight_map}}
    return {
        **{name: json.dumps(file).encode() for name, file in files.items()},
        **dict.fromkeys(weight_map.values(), b"s"),
    }


BROKEN = {**FILES, "model.safetensors": bytes(CUT + 5000)}
REPOS = {
    "org/plain": Repo(FILES | OTHERS),
    "gpt2": Repo(FILES),
    "org/shards": Repo(SHARDS),
    **{f"org/{name}": Repo(sharded(*own)) for name, own in WEIGHTS.items()},
    "org/branch": Repo(FILES, revisions=("main", "v1.0")),
    "org/partly": Repo(FILES),
    "org/large": Repo(FILES),
    "org/kept": Repo(FILES),
    "org/breaks": Repo(BROKEN, trouble="breaks"),
    "org/wrong": Repo(FILES, trouble="wrong"),
    "org/hangs": Repo(FILES, trouble="hangs"),
    "org/odd": Repo(FILES, answer=b'{"id": "x/y", "sha": 7}'),
    "org/page": Repo(FILES, answer=b"<html>"),
    "org/private": Repo(FILES, trouble="private"),
    "org/gated": Repo(FILES, trouble="gated"),
    "org/busy": Repo(FILES, trouble=429),
    "org/down": Repo(FILES, trouble=500),
    "org/pickle": Repo({"config.json": b"{}", "pytorch_model.bin": b"a pickle"}),
    "org/adapter": Repo({"adapter_config.json": b"{}"}),
    "org/ggufs": Repo({"model-Q8_0.gguf": b"GGUF"}),
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub({}).running() as storage, Hub(REPOS, storage).running() as hub:
        storage.repos = REPOS
        yield hub


@pytest.fixture(scope="module")
def start(hub: Hub, tmp_path_factory) -> Iterator[Callable[..., Lookups]]:
    """A function that starts a process that looks up names; all of these processes share one cache."""
    home, started = tmp_path_factory.mktemp("user") / "home", []

    def begin(endpoint: str = hub.url, room: int = 0, **environment: str) -> Lookups:
        started.append(Lookups(endpoint, home, room, **environment))
        return started[-1]

    yield begin
    for lookups in started:
        lookups.close()


@pytest.fixture(scope="module")
def look_up(start) -> Lookups:
    return start()


@pytest.fixture(scope="module")
def writer(start) -> Lookups:
    return start(HF_TOKEN="hf_right")


def contents(found: dict[str, Any]) -> dict[str, bytes]:
    folder = Path(found["folder"])
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_downloaded_without_code_pickles_and_copies(look_up: Lookups) -> None:
    found = look_up("org/plain")
    assert contents(found) == FILES
    assert "downloading org/plain from the hub: 4 files, 102 kB" in found["said"][0]


def test_a_second_start_asks_one_question_and_by_commit_none(look_up: Lookups, hub: Hub) -> None:
    look_up("gpt2")
    hub.taken()
    assert look_up("gpt2")["said"] == []
    assert [request.path for request in hub.taken()] == ["/api/models/gpt2/revision/main"]
    look_up("gpt2", revision="a" * 40)
    look_up("hf://gpt2@" + "a" * 40)
    assert hub.taken() == []


def test_only_the_shards_of_the_index_are_downloaded(look_up: Lookups) -> None:
    assert contents(look_up("hf://org/shards")).keys() == SHARDS.keys() - {"consolidated.safetensors"}


@pytest.mark.parametrize("name", WEIGHTS)
def test_shards_of_what_is_left_out_are_not_downloaded(name: str, look_up: Lookups) -> None:
    whole = sharded(*WEIGHTS[name]).keys()
    assert contents(look_up(f"org/{name}")).keys() == whole - {"model-00002-of-00002.safetensors"}


def test_config_alone_can_be_fetched_and_the_rest_later(look_up: Lookups) -> None:
    name = "https://huggingface.co/org/branch/tree/v1.0"
    assert contents(look_up(name, only="config")).keys() == {"config.json"}
    assert contents(look_up("org/branch@v1.0")) == FILES


def test_pickles_are_downloaded_only_where_they_are_asked_for(look_up: Lookups) -> None:
    assert contents(look_up("org/pickle", only="pickles")).keys() == {"config.json", "pytorch_model.bin"}


def test_a_broken_connection_is_resumed_where_it_broke(look_up: Lookups, hub: Hub) -> None:
    hub.storage.taken()
    assert contents(look_up("org/breaks")) == BROKEN
    ranges = [r.range for r in hub.storage.taken() if r.method == "GET"]
    assert ranges == ["", f"bytes={10 << 20}-"]


def test_files_with_other_content_than_announced_are_discarded(look_up: Lookups) -> None:
    first = look_up("org/wrong")["refused"]
    for name in FILES:
        assert name in first
    assert "does not match the content that the hub announces, and was discarded: try again" in first
    assert contents(look_up("org/wrong")) == FILES


def test_files_of_an_interrupted_download_are_compared_later(look_up: Lookups, hub: Hub) -> None:
    folder = Path(look_up("org/kept")["folder"])
    weights, note = folder / "model.safetensors", folder.parents[1] / f"unverified-{'a' * 40}.json"
    assert not note.exists()
    weights.resolve().write_bytes(b"x" + FILES["model.safetensors"][1:])
    assert contents(look_up("org/kept")) != FILES, "a file is compared once"
    note.write_text(json.dumps(["model.safetensors"]))
    assert contents(look_up("org/kept")) == FILES
    assert not note.exists()


def test_an_answer_that_never_comes_is_not_waited_for(start) -> None:
    impatient = start(HF_HUB_ETAG_TIMEOUT="1", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert "org/hangs cannot be downloaded (" in impatient("org/hangs")["refused"]


def test_a_full_disk_is_said_and_leaves_nothing_that_looks_whole(start, look_up: Lookups) -> None:
    crowded = start(room=50_000)
    refusal = crowded("org/large")["refused"]
    assert "org/large cannot be written to the cache (" in refusal
    assert "make room or set HF_HOME to another folder" in refusal
    assert contents(look_up("org/large")) == FILES


def test_a_token_is_sent_to_the_hub_alone(writer: Lookups, hub: Hub) -> None:
    hub.taken(), hub.storage.taken()
    assert contents(writer("org/private")) == FILES
    assert {request.authorization for request in hub.taken()} == {"Bearer hf_right"}
    assert {request.authorization for request in hub.storage.taken()} == {""}


REFUSED = {
    "org/private": "there is no folder org/private, and the hub has no model of that name, or a private one",
    "org/plane": "did you mean org/plain, which is in the cache?",
    "org/plain@gone": "org/plain on the hub has no branch, tag or commit gone",
    "org/plain@" + "b" * 40: "has no branch, tag or commit bbbb",
    "org/gated": "org/gated is gated: accept its terms at http",
    "org/busy": "the hub answers 429",
    "org/down": "the hub answers 500",
    "org/odd": "is not that of a hub (",
    "org/page": "is not that of a hub (JSONDecodeError",
    "org/pickle": "if one has safetensors files, or make them with onward convert org/pickle OUT --from-bin",
    "org/adapter": "has no config.json but an adapter",
    "org/ggufs": "has no config.json but GGUF files",
    "hf://nothing": "hf://nothing, and the hub has no model of that name",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_to_be_had_is_refused_in_a_sentence(name: str, look_up: Lookups) -> None:
    look_up("org/plain")
    refusal = look_up(name)["refused"]
    assert REFUSED[name] in refusal
    assert "\n" not in refusal


def folder_of(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


RUN = {"run.json": b"{}", "checkpoints/step-1/optimizer.safetensors": b"state", "metrics.jsonl": b"", ".env": b"secret"}


def test_a_model_is_uploaded_without_the_rest_of_its_folder(writer: Lookups, hub: Hub, tmp_path: Path) -> None:
    folder = folder_of(FILES | RUN | {"loss.svg": b"<svg/>"}, tmp_path)
    hub.taken(), hub.storage.taken()
    done = writer("me/new", upload=str(folder))
    assert done == {"commit": f"{hub.url}/me/new/commit/{'a' * 40}", "said": []}
    assert REPOS["me/new"].files == FILES | {"loss.svg": b"<svg/>", "README.md": b"# A card"}
    assert {request.authorization for request in hub.taken()} == {"Bearer hf_right"}
    assert {request.authorization for request in hub.storage.taken()} == {""}
    assert contents(writer("hf://me/new")) == FILES


def test_a_second_upload_replaces_weights_and_keeps_a_card(writer: Lookups, tmp_path: Path) -> None:
    REPOS["me/again"] = Repo({**FILES, "README.md": b"theirs", "model-00003-of-00003.safetensors": b"old"})
    sharded = folder_of(SHARDS, tmp_path / "shards")
    [said] = writer("me/again", upload=str(sharded))["said"]
    assert "me/again has a card, which is kept" in said
    kept = {name: FILES[name] for name in FILES.keys() - SHARDS.keys() - {"model.safetensors"}}
    new = {name: content for name, content in SHARDS.items() if name != "consolidated.safetensors"}
    assert REPOS["me/again"].files == kept | new | {"README.md": b"theirs"}
    writer("me/again", upload=str(folder_of({**FILES, "README.md": b"mine"}, tmp_path / "single")))
    assert REPOS["me/again"].files == FILES | {"README.md": b"mine"}


def test_an_upload_that_fails_says_why_and_changes_nothing(start, writer: Lookups, look_up: Lookups, tmp_path) -> None:
    folder = str(folder_of(FILES, tmp_path))
    REPOS["me/full"] = Repo({}, trouble="full")
    reader = start(HF_TOKEN="hf_reader")
    assert "you write to me/x: log in with hf auth login" in look_up("me/x", upload=folder)["refused"]
    assert "you write to me/x: give another token" in reader("me/x", upload=folder)["refused"]
    assert "no branch, tag or commit gone" in writer("me/full@gone", upload=folder)["refused"]
    assert "(the hub answers 507" in (refusal := writer("me/full", upload=folder)["refused"])
    assert "is unchanged" in refusal
    assert "me/x" not in REPOS
    assert REPOS["me/full"].files == {}


def test_without_a_network_the_cache_is_used_and_that_is_said(start, hub: Hub, look_up: Lookups) -> None:
    folder = look_up("org/plain")["folder"]
    unplugged = start("http://127.0.0.1:9")
    found = unplugged("org/plain")
    assert found["folder"] == folder
    assert "the hub cannot be reached" in found["said"][0]
    assert "cannot be downloaded" in unplugged("org/new")["refused"]
    assert "me/x cannot be uploaded (" in unplugged("me/x", upload=folder)["refused"]


def test_offline_mode_sends_nothing(start, hub: Hub, look_up: Lookups) -> None:
    folder = look_up("org/plain")["folder"]
    look_up("org/partly", only="config")
    hub.taken()
    offline = start(HF_HUB_OFFLINE="1")
    assert offline("org/plain") == {"folder": folder, "said": []}
    assert (
        "Cannot load org/partly, because the cache lacks chat_template.jinja, model.safetensors"
        in offline("org/partly")["refused"]
    )
    assert "HF_HUB_OFFLINE is set" in offline("org/new")["refused"]
    assert "HF_HUB_OFFLINE is set" in offline("me/x", upload=folder)["refused"]
    assert hub.taken() == []


def test_a_path_wins_over_a_name_and_is_said_where_both_are(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = list[str]()
    Path("org/mine").mkdir(parents=True)
    assert locate("org/mine", say=said.append) == Path("org/mine")
    assert said == []
    cache = put_in_cache("org/mine", Path("org/mine"))
    assert locate("org/mine", say=said.append) == Path("org/mine")
    assert "org/mine is a local path, which is used" in said[0]
    cache.joinpath("snapshots", "c" * 40, "config.json").write_text("{}")
    assert cache in locate("hf://org/mine").parents


@pytest.mark.parametrize(
    "text", ["", "/", "a/b/c", "./a", "../a", "a b", "a--b", "a..b", "a" * 97, "-", "a/", "\0", "a@", "a.git", "a/.b"]
)
def test_texts_that_cannot_be_names_never_reach_the_hub(text: str) -> None:
    assert HubName.of(text) in (None, HubName("a", "main"))
    with pytest.raises(onward.UserError, match="there is no folder"):
        locate("x/x/" + text)


def test_a_cached_model_generates_and_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm = onward.LanguageModel(decoder(DECODERS["llama"]), onward.train_tokenizer("byte", []))
    onward.save(lm, tmp_path / "saved")
    put_in_cache("org/tiny", tmp_path / "saved")
    assert onward.load("org/tiny").model.config == onward.load(tmp_path / "saved").model.config
    assert main(["models", "cached", "--json"]) == 0
    [tiny] = [model for model in json.loads(capsys.readouterr().out) if model["name"] == "org/tiny"]
    assert (tiny["revision"], tiny["files"]) == ("main", 4)


def run_onward(words: list[str], folder: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "onward", *words], cwd=folder, env=os.environ | environment, capture_output=True
    )
    assert done.returncode == 0, (words, done.stderr.decode())


@pytest.mark.long
def test_the_page_takes_a_model_of_the_hub_to_llama_cpp_and_back(hub: Hub, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = onward.DecoderConfig(257, d_model=32, n_layers=2, n_heads=2, context_length=64)
    onward.save(onward.LanguageModel(onward.Decoder(config), onward.train_tokenizer("byte", [])), tmp_path / "saved")
    REPOS["gpt2"] = Repo({path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}, "b" * 40)
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_right"}
    own |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    page = (Path(__file__).parents[1] / "docs/interchange.md").read_text(encoding="utf-8")
    section = page.split("## From a published model")[1].split("\n## ")[0]
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        if kind == "python":
            exec(block, {"onward": onward})
        for line in block.splitlines() if kind == "sh" else ():
            command, *words = shlex.split(line.replace("--epochs 3", "--steps 3"))
            if command == "onward":
                run_onward(words, tmp_path, **own)
    run_onward(["push", "sums-again", "me/sums", "--license", "mit"], tmp_path, **own)
    run_onward(["generate", "me/sums", "Once", "--max-new-tokens", "2"], tmp_path, **own)
    assert REPOS["me/sums"].files["model.safetensors"] == (tmp_path / "sums-again/model.safetensors").read_bytes()
    ours = onward.load("sums.gguf")
    tokens = ours.tokenizer.encode("2 + 3?")
    wanted = ours.model.logits(ours.model.hidden(torch.tensor([tokens])))[0].log_softmax(-1)
    assert (logprobs(tmp_path / "sums.gguf", tokens) - wanted).abs().max() < 1e-4
