"""The server compared with its own engine, and with other servers of the same model, alternately.

    python -m benchmarks.serving                                      the overhead of HTTP
    python -m benchmarks.serving --against vllm=http://127.0.0.1:8100 another running server
    python -m benchmarks.serving --tiny                               a tiny model: shows that everything runs

The model has the shape of a Llama, 124,668,672 parameters, random weights and a tokenizer of 4,096 entries; `--keep
FOLDER` keeps it, so that another server can be started on it. Drafts are off, because the answers of random weights are
repetitive. Each client streams one answer to 128 random token ids, and starts the next request when the answer has
ended. The table also shows the CPU usage of the clients.

tables:
  speed   tokens/s of the engine alone and of each server, time to the first token and between tokens
  shared  users of one system prompt of 400 tokens, all at once
  stall   the time between tokens of two answers during the prefill of a prompt of almost the whole context
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

USERS, SYSTEM = 32, 400  # number of users, and tokens of the system prompt that they share
TABLES = "speed", "shared", "stall"


@dataclass
class Load:
    """The measurements of the clients in one round."""

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token of each answer
    between: list[float] = field(default_factory=list)  # seconds between events
    client: float = 0.0  # CPU usage of the clients, as a fraction of one core

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


async def answer(url: str, prompt: Sequence[int] | str, new: int, load: Load, model: str) -> None:
    """Stream one answer. Read lines from the connection directly, because an HTTP library would take CPU time from the
    servers."""
    host, _, port = url.removeprefix("http://").partition(":")
    body: dict[str, object] = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True}
    if not isinstance(prompt, str):
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    start, last = time.perf_counter(), 0.0
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        status = await reader.readline()
        assert b" 200 " in status, status + await reader.read()
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event: dict[str, Any] = json.loads(line[6:]) if b'"usage"' in line else {"choices": [0]}
            if event.get("usage"):
                load.tokens += event["usage"]["completion_tokens"]
            if event["choices"]:
                now = time.perf_counter()
                (load.between if last else load.first).append(now - (last or start))
                last = now
    finally:
        writer.close()


async def measure(url: str, prompts: Sequence[Sequence[int] | str], new: int, at_a_time: int, model: str) -> Load:
    """Request answers to all prompts, `at_a_time` at once."""
    load, waiting = Load(), list(prompts)

    async def one() -> None:
        while waiting:
            await answer(url, waiting.pop(), new, load, model)

    start, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one() for _ in range(at_a_time)))
    load.seconds = time.perf_counter() - start
    load.client = (time.process_time() - used) / load.seconds
    return load


async def stall(url: str, prompt: Sequence[int], whole: Sequence[int], model: str) -> tuple[float, float]:
    """Return the median seconds between tokens of two answers, before and during the prefill of the prompt `whole`."""
    before, during = Load(), Load()
    one = lambda new, load: answer(url, prompt, new, load, model)
    await asyncio.gather(one(128, before), one(128, before))
    others = [asyncio.ensure_future(one(1500, during)) for _ in range(2)]
    while len(during.between) < 60:
        await asyncio.sleep(0.01)
    skipped = len(during.between)
    await answer(url, whole, 1, Load(), model)
    for other in others:
        other.cancel()
    return median(before.between), median(during.between[skipped:])


def ready(process: subprocess.Popen[str]) -> str:
    for line in process.stderr or ():
        if line.startswith("the page: "):
            return line.split()[2].rstrip("/")
    raise SystemExit("onward serve did not start: run it by itself to see its error")


def percentiles(seconds: Sequence[float]) -> str:
    """Median and 99th percentile, in milliseconds."""
    return f"{1000 * median(seconds):.1f} / {1000 * quantiles(seconds, n=100)[-1]:.1f}"


def times_of(loads: Sequence[Load]) -> list[str]:
    """Table cells: times to the first token and between tokens, and the clients' CPU usage."""
    if not loads[0].first:  # the engine alone, without a server
        return ["", "", ""]
    first, between = ([one for load in loads for one in getattr(load, kind)] for kind in ("first", "between"))
    return [percentiles(first), percentiles(between), f"{median(load.client for load in loads):.0%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", action="append", default=[], metavar="NAME=URL", help="a running server")
    parser.add_argument(
        "--text", action="append", default=[], metavar="NAME=URL", help="a server that accepts only text prompts"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--quantize", choices=["int8", "int4"])
    parser.add_argument("--tables", choices=TABLES, nargs="+", default=TABLES)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the median is reported")
    parser.add_argument("--threads", type=int, default=2, help="threads of the engine and of onward serve")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the model in FOLDER")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)

    import torch

    import onward
    from benchmarks.decode.models import SIZES, prompt, random_model
    from benchmarks.decode.tables import Table
    from onward.data import embedded
    from onward.measuring.generation import GREEDY
    from onward.serving import EngineOptions
    from onward.serving.models import engine_for, row_counts

    torch.set_num_threads(options.threads)
    sizes = SIZES["tiny" if options.tiny else "full"]
    vocabulary = 4096 if not options.tiny else 300
    config = replace(sizes.config, vocab_size=max(sizes.config.vocab_size, vocabulary), context_length=2048)
    rows = max(options.concurrency)
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(TemporaryDirectory())) / "model"
        if not folder.exists():
            tokenizer = onward.train_tokenizer(f"bpe:{vocabulary}", embedded().documents[:200])
            model = random_model(config).to(getattr(torch, options.dtype))
            onward.save(onward.LanguageModel(model, tokenizer), folder)
        quantize = ["--quantize", options.quantize] if options.quantize else []
        words = ["serve", str(folder), "--port", "0", "--rows", str(rows), "--lookup", "0", "--compile", *quantize]
        command = [sys.executable, "-m", "onward", *words]
        process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        stack.callback(process.terminate)
        urls = {"onward serve": ready(process)} | dict(one.split("=", 1) for one in options.against)

        lm = onward.load(folder, quantize=options.quantize)
        engine = engine_for(lm, EngineOptions(rows=rows, lookup=0), None, 4 << 30)
        for count in row_counts(engine):
            engine.compile(count)
        table = Table(
            f"{config.n_layers} layers of width {config.d_model}, {options.quantize or options.dtype}: prompts of "
            f"{sizes.prompt} tokens, {sizes.new} new ones",
            ["server", "at a time", "tokens/s", "of the engine", "first token, ms", "between tokens, ms", "client"],
        )
        seed = 0

        def prompts(count: int, length: int = sizes.prompt) -> list[list[int]]:
            nonlocal seed
            seed += count
            random = replace(config, vocab_size=vocabulary)
            return [prompt(random, length, seed - i) for i in range(count)]

        def alone(asked: Sequence[Sequence[int]], new: int, at_a_time: int) -> Load:
            requests = [onward.Request([*one], GREEDY, new) for one in asked]
            start, waiting = time.perf_counter(), requests[at_a_time:]
            for request in requests[:at_a_time]:
                engine.add(request)
            for request, _ in engine.run():
                if request.done and waiting:
                    engine.add(waiting.pop())
            return Load(time.perf_counter() - start, sum(len(request.tokens) for request in requests))

        def over_http(url: str, as_text: bool = False) -> Callable[[Sequence[Sequence[int]], int, int], Load]:
            return lambda asked, new, at_a_time: asyncio.run(
                measure(url, list(map(lm.text().decode, asked)) if as_text else asked, new, at_a_time, folder.name)
            )

        cases = {"engine": alone} | {name: over_http(url) for name, url in urls.items()}
        cases |= {name: over_http(url, as_text=True) for name, url in (one.split("=", 1) for one in options.text)}
        for run in cases.values():
            run(prompts(2 * rows), 8, rows)  # to warm up
        for at_a_time in options.concurrency if "speed" in options.tables else []:
            found: dict[str, list[Load]] = {name: [] for name in cases}
            for _ in range(options.rounds):
                for name, run in cases.items():
                    found[name].append(run(prompts(2 * at_a_time), sizes.new, at_a_time))
            own = median(load.speed for load in found["engine"])
            for name, loads in found.items():
                speed = median(load.speed for load in loads)
                table.rows.append([name, at_a_time, speed, speed / own, *times_of(loads)])
                print(*table.rows[-1], file=sys.stderr, flush=True)
        if table.rows:
            print(table.as_text(), flush=True)
        new = max(2, sizes.new // 4)
        shared = Table(
            f"{USERS} users at once, {SYSTEM} shared and {sizes.prompt // 8} own prompt tokens each, {new} new ones",
            ["server", "tokens/s", "first token, ms", "between tokens, ms", "client"],
        )
        system = prompts(1, SYSTEM)[0]
        for name, run in cases.items() if "shared" in options.tables else []:
            loads = [
                run([system + one for one in prompts(USERS, sizes.prompt // 8)], new, USERS)
                for _ in range(options.rounds)
            ]
            shared.rows.append([name, median(load.speed for load in loads), *times_of(loads)])
        if shared.rows:
            print(shared.as_text(), flush=True)
        second = Table(
            "A prompt of 1,900 tokens during two answers: median time between their tokens",
            ["server", "before, ms", "meanwhile, ms", "factor"],
        )
        for name, url in urls.items() if "stall" in options.tables else []:
            whole = prompt(replace(config, vocab_size=vocabulary), 1900, 7 + seed)
            pair = [asyncio.run(stall(url, prompts(1)[0], whole[i:], folder.name)) for i in range(options.rounds)]
            before, during = (1000 * median(times) for times in zip(*pair))
            second.rows.append([name, before, during, during / before])
        if second.rows:
            print(second.as_text())


if __name__ == "__main__":
    main()
