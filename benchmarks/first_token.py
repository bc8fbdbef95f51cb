"""Where the CPU time goes between a call and its first token, in milliseconds.

    python -m benchmarks.first_token                           fp32, a prompt of 120 tokens
    python -m benchmarks.first_token --layers 48 --width 64    a deep model
    python -m benchmarks.first_token --tiny                    a tiny model: shows that everything runs

The model has the shape of GPT-2 (12 layers, width 768), the vocabulary of `--vocabulary` and random weights. The time
of a part excludes that of nested parts and is the median of `--rounds`; `beside` is everything except the forward pass.
CPU time of the process's threads is measured, because other work on the machine affects it less than wall-clock time.

columns:
  generate, stream, chat   a call in Python
  server                   a request to /v1/completions: the server and its client are threads of this process, and the
                           client is not counted
"""

import argparse
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

WARM = 18  # turns that are not measured, in which kernels and steps of short prompts are compiled
PARTS = {  # name of a part -> its functions, as module:attribute
    "tokenize": ["onward.generation.prompts:prompt_tokens", "onward.serving.completions:tokens_of"],
    "check": [
        "onward.api.language_model:split",
        "onward.generation.prompts:requests_for",
        "onward.serving.service:requests_for",
    ],
    "engine": ["onward.api.language_model:lent", "onward.generation.engine.engine:Engine.add"],
    "cache": ["onward.generation.engine.scheduler:Scheduler.schedule", "onward.generation.runner:Runner.view"],
    "inputs": ["onward.generation.runner:Runner.inputs"],
    # not the model's own methods, since a model with replaced methods is not compiled
    "forward": [
        "onward.generation.runner:Runner.forward_rows",
        "onward.generation.runner:Runner.logits",
        "onward.compiled.program:Program.run",
    ],
    "sample": ["onward.generation.engine.sampler:Sampler.sample"],
    "decode": ["onward.generation.engine.engine:Engine.distribute"],
    "step": ["onward.generation.engine.engine:Engine.advance"],
}


class Timer:
    """Adds up the seconds of each part, without the time of the parts that it calls."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.local = threading.local()

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inside = self.local.__dict__.setdefault("inside", [0.0])
            inside.append(0.0)
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.process_time() - start
                self.seconds[part] += taken - inside.pop()
                inside[-1] += taken

        return call

    @contextmanager
    def running(self) -> Iterator[None]:
        import importlib

        with ExitStack() as stack:
            for part, places in PARTS.items():
                for module, _, path in (place.partition(":") for place in places):
                    owner: Any = importlib.import_module(module)
                    *classes, name = path.split(".")
                    for one in classes:
                        owner = getattr(owner, one)
                    stack.enter_context(patch.object(owner, name, self.around(part, getattr(owner, name))))
            yield


def request(address: str, prompt: str) -> float:
    """Request one token from the server, and return the client's CPU time in seconds."""
    host, _, port = address.removeprefix("http://").partition(":")
    body = json.dumps({"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    start = time.thread_time()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while connection.recv(1 << 16):
            pass
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=120, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)

    import torch

    import onward
    from benchmarks.decode.tables import Table
    from benchmarks.text import machine
    from onward.data import embedded
    from onward.serving import EngineOptions
    from onward.serving.models import Served, engine_for
    from onward.serving.server import serve
    from onward.serving.server_options import Listening

    torch.set_num_threads(options.threads)
    if options.tiny:
        options.layers, options.width, options.rounds = 2, 64, 3
    documents = embedded().documents
    tokenizer = onward.train_tokenizer("bpe:4096", documents[:200])
    tokenizer.templates["default"] = "{{ messages[0].content }}"
    torch.manual_seed(0)
    heads = max(1, options.width // 64)
    config = onward.DecoderConfig(
        vocab_size=options.vocabulary,
        d_model=options.width,
        n_layers=options.layers,
        n_heads=heads,
        context_length=options.context,
    )
    lm = onward.LanguageModel(onward.Decoder(config).eval(), tokenizer)
    prompt = tokenizer.decode(tokenizer.encode("".join(documents[200:210]))[: options.prompt])

    engine = engine_for(lm, EngineOptions(rows=4), None, 1 << 30)
    served, addresses, ready = Served("model", "model", lm, engine), list[str](), threading.Event()

    def note(address: str, _: object) -> None:
        addresses.append(address)
        ready.set()

    with patch("onward.serving.worker.Worker.compile_when_idle"):
        run_server = lambda: serve(Listening(port=0), lambda: [served], note)
        threading.Thread(target=run_server, daemon=True).start()
        ready.wait()

    cases: dict[str, Callable[[], Any]] = {
        "generate": lambda: lm.generate(prompt, 1, temperature=0),
        "stream": lambda: list(lm.stream(prompt, 1, temperature=0)),
        "chat": lambda: lm.chat(prompt, 1, temperature=0),
        "server": lambda: request(addresses[0], prompt),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for turn in range(WARM + options.rounds):
        for name, run in cases.items():
            timer = Timer()
            with timer.running():
                start = time.process_time()
                client = run()
                time.sleep(0.01 if name == "server" else 0)  # until the server has finished the request
                whole = time.process_time() - start - (client if name == "server" else 0.0)
            rest = whole - sum(timer.seconds.values())
            row = {**timer.seconds, "rest": rest, "beside": whole - timer.seconds["forward"], "all": whole}
            if turn >= WARM:
                found[name].append(row)
    title = f"{options.layers} layers of width {options.width}, vocabulary {options.vocabulary:,}"
    table = Table(f"To the first token after {options.prompt}, ms: {title}", ["part", *cases])
    for part in [*PARTS, "rest", "beside", "all"]:
        table.rows.append([part, *(f"{1e3 * median(row[part] for row in rows):.2f}" for rows in found.values())])
    print(machine())
    print(table.as_text(), flush=True)
    os._exit(0)  # does not wait for the server's threads


if __name__ == "__main__":
    main()
