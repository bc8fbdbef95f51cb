"""Clients that people use, on a model whose answers are scripted: texts, streams, three steps with tools, objects."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from support.scripted import CALLS, FINAL, HELLO, scripted_server
from support.server import Running

CLIENTS = Path(__file__).parent / "clients"
INSTALLED = Path(__file__).parents[2] / "build" / "clients"  # installed by `make clients`
STEPS = [f"{name}: {', '.join(f'{key}={given[key]}' for key in sorted(given))}" for name, given in CALLS]
Run = Callable[[str], dict[str, Any]]
TRIPS = [{"city": city, "days": days} for city in ("Oslo", "Rome") for days in (1, 2, 3)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with scripted_server(tmp_path_factory.mktemp("models")) as running:
        yield running
        assert running.idle()


@pytest.fixture
def run(server: Running, tmp_path: Path) -> Run:
    """Returns a function that runs a script in `clients` and returns its output; skips the test if its packages are
    missing."""

    def run(script: str) -> dict[str, Any]:
        program = INSTALLED / "bin/python" if script.endswith(".py") else shutil.which("node")
        packages = INSTALLED / ("bin/python" if script.endswith(".py") else "node_modules")
        if not (INSTALLED / ".installed").exists() or not packages.exists() or program is None:
            pytest.skip("needs the clients that `make clients` installs")
        folder = shutil.copytree(CLIENTS, tmp_path / "scripts")
        (folder / "node_modules").symlink_to(INSTALLED / "node_modules")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        command = [str(program), str(folder / script), f"{server.url}/v1"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    return run


def test_litellm_takes_three_steps_and_knows_a_full_context(run: Run) -> None:
    assert run("with_litellm.py") == {
        "text": HELLO,
        "streamed": HELLO,
        "steps": STEPS,
        "final": FINAL,
        "streamed call": json.dumps(CALLS[0][1]),
        "too long": "ContextWindowExceededError",
    }


def test_instructor_makes_objects_and_asks_again(run: Run) -> None:
    found = run("with_instructor.py")
    assert len(found["trips"]) == len(found["failed"]) == 3
    assert all({"city": trip["city"], "days": trip["days"]} in TRIPS for trip in found["trips"].values())


def test_agents_of_openai_s_sdk_take_three_steps(run: Run) -> None:
    found = run("with_agents.py")
    assert len(found) == 4
    assert all(one == {"steps": STEPS, "final": FINAL} for one in found.values()), found


@pytest.mark.parametrize("script", ["with_openai.mjs", "with_ai_sdk.mjs"])
def test_clients_in_javascript_take_three_steps(script: str, run: Run) -> None:
    found = run(script)
    assert (found["text"], found["streamed"]) == (HELLO, HELLO)
    assert (found["steps"], found["final"]) == (STEPS, FINAL)
    assert (found["streamed steps"], found["streamed final"]) == (STEPS, FINAL)
    assert found["trip"] in TRIPS
    assert found.get("code", "context_length_exceeded") == "context_length_exceeded"


@tool
def cities(country: str) -> str:
    """Cities of a country."""
    return f"cities: country={country}"


@tool
def weather(city: str, days: int) -> str:
    """The weather in a city."""
    return f"weather: city={city}, days={days}"


@tool
def book(city: str) -> str:
    """Book a train."""
    return f"book: city={city}"


class Trip(pydantic.BaseModel):
    """A trip."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


def langchain(server: Running, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{server.url}/v1", api_key=lambda: "none", model="caller", max_retries=0, **options)


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("streaming", [False, True])
def test_langchain_takes_three_steps(responses: bool, streaming: bool, server: Running) -> None:
    tools = {one.name: one for one in (cities, weather, book)}
    model = langchain(server, use_responses_api=responses, streaming=streaming).bind_tools([*tools.values()])
    messages: list[Any] = [HumanMessage("Where shall I go?")]
    while (answer := model.invoke(messages)).tool_calls:
        results = [tools[call["name"]].invoke(call) for call in answer.tool_calls]
        messages += [answer, *results]
    assert [message.content for message in messages if isinstance(message, ToolMessage)] == STEPS
    assert answer.text == FINAL


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_makes_objects(method: Any, server: Running) -> None:
    model = langchain(server, max_completion_tokens=1500).with_structured_output(Trip, method=method)
    trip = model.invoke("Where?")
    assert isinstance(trip, Trip)


def test_openai_s_client_reads_why_a_request_was_refused(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048") as caught:
        client.responses.create(model="caller", input="x" * 5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="caller", messages=[{"role": "user", "content": "a"}], max_tokens=-5)
    assert caught.value.param == "max_tokens"
