"""Onward, transformers and llama.cpp behind one interface: greedy generation from token ids, each token with its time.

A peer is made for one model, precision and number of threads; it can be called many times, and starts with an empty
cache each time.
"""

import importlib
import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import numpy as np
import torch

import onward
from benchmarks.decode.models import PRECISIONS, Files
from onward.measuring.generation import GREEDY, Generation, read_bytes, serve, weights
from onward.planning import cache_bytes_per_token

CHUNK = 64  # maximum number of tokens in one call, for a cache of a fixed size
PAGE = 64  # tokens per block of the cache of transformers' continuous batching
Prompts = Sequence[Sequence[int]]


class Peer(ABC):
    """A model in one library and precision."""

    name: str
    all_bytes: int  # bytes of the weights
    weight_bytes: int  # bytes of weights that a decoding step reads: all except an embedding that is not also the head
    cache_bytes: int  # bytes of the cache per token

    @abstractmethod
    def generate(self, prompts: Prompts, new: int) -> Generation:
        """Continue each prompt by exactly `new` tokens."""

    def first(self, prompts: Prompts) -> float:
        """Seconds from the call until each prompt has its first new token."""
        return self.generate(prompts, 1).first

    @abstractmethod
    def logits(self, prompt: Sequence[int]) -> np.ndarray:
        """The logits (V,) after the last token of a prompt."""

    def bytes_per_token(self, length: float) -> float:
        """The bytes that decoding a token reads with this many tokens in the cache."""
        return self.weight_bytes + self.cache_bytes * length


class Onward(Peer):
    name = "onward"

    def __init__(self, files: Files, precision: str, *, rows: int = 16, slots: int = 0) -> None:
        """`slots`: size of a cache that is allocated at once; 0: the default cache, which grows."""
        kind = PRECISIONS[precision]
        self.lm = onward.load(files.folder(kind.dtype), kind.dtype, quantize=kind.quantize)
        self.lm.tokenizer = onward.train_tokenizer("char", ["any text"])  # decodes the answers of `first`
        self.model = self.lm.model
        cache = None
        if slots:
            store = onward.KVCache(self.model.config, rows, slots, CHUNK, dtype=self.model.dtype)
            cache = onward.CacheManager(store)
        self.engine = onward.Engine(self.model, rows=rows, cache=cache)
        self.all_bytes = sum(tensor.nbytes for tensor in weights(self.model))
        self.weight_bytes = read_bytes(self.model, self.model.embed)
        self.cache_bytes = cache_bytes_per_token(files.config, self.model.dtype.itemsize)

    def generate(self, prompts: Prompts, new: int) -> Generation:
        return self.serve(prompts, [new] * len(prompts))

    def first(self, prompts: Prompts) -> float:
        start = perf_counter()
        self.lm.complete(list(map(list, prompts)), 1, temperature=0)
        return perf_counter() - start

    def serve(self, prompts: Prompts, new: Sequence[int]) -> Generation:
        """Continue prompt i by new[i] tokens."""
        return serve(self.engine, [onward.Request(list(p), GREEDY, most) for p, most in zip(prompts, new)])

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int]) -> np.ndarray:
        return self.model(torch.tensor([prompt]))[0, -1].float().numpy()


class Clock:
    """A streamer of transformers that records the time of each step."""

    def __init__(self) -> None:
        self.start, self.seconds = perf_counter(), list[float]()

    def put(self, tokens: torch.Tensor) -> None:
        self.seconds.append(perf_counter() - self.start)

    def end(self) -> None:
        pass


class Transformers(Peer):
    name = "transformers"

    def __init__(self, files: Files, precision: str) -> None:
        kind = PRECISIONS[precision]
        library = importlib.import_module("transformers")
        library.utils.logging.disable_progress_bar()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # it warns that psutil is missing
        self.model = library.AutoModelForCausalLM.from_pretrained(files.folder(kind.dtype), dtype=kind.dtype).eval()
        self.model.generation_config.eos_token_id = None
        self.all_bytes = sum(tensor.nbytes for tensor in weights(self.model))
        self.weight_bytes = read_bytes(self.model, self.model.get_input_embeddings())
        self.cache_bytes = cache_bytes_per_token(files.config, kind.dtype.itemsize)

    @torch.inference_mode()
    def generate(self, prompts: Prompts, new: int) -> Generation:
        clock, tokens = Clock(), torch.tensor(prompts)
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0, "streamer": clock}
        done = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        seconds = clock.seconds[1:]  # the first call passes the prompt
        return Generation(done[:, tokens.size(1) :].tolist(), [seconds] * len(prompts))

    def serve(self, prompts: Prompts, new: Sequence[int]) -> float:
        """The seconds that continuous batching takes to continue prompt i by new[i] tokens, for all prompts."""
        library = importlib.import_module("transformers")
        pages = sum(-(-(len(prompt) + most) // PAGE) for prompt, most in zip(prompts, new))
        config = library.ContinuousBatchingConfig(page_size=PAGE, num_blocks=pages, max_batch_tokens=512)
        options = library.GenerationConfig(do_sample=False, max_new_tokens=max(new), pad_token_id=0, eos_token_id=-1)
        with self.model.continuous_batching_context_manager(
            generation_config=options, continuous_batching_config=config
        ) as manager:
            start, expected = perf_counter(), dict[str, int]()
            for prompt, most in zip(prompts, new):
                expected[manager.add_request(list(prompt), max_new_tokens=most)] = most
            while expected:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the thread of continuous batching ended")
                if result is None or not result.is_finished():
                    continue
                if len(result.generated_tokens) != expected.pop(result.request_id):
                    raise RuntimeError(result.error or "an answer has the wrong length")
            return perf_counter() - start

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int]) -> np.ndarray:
        return self.model(torch.tensor([prompt])).logits[0, -1].float().numpy()


class LlamaCpp(Peer):
    """llama.cpp, called in a thread of its own: it sets the tile configuration of AMX once per thread, and
    PyTorch's matmuls release it."""

    name = "llama.cpp"

    def __init__(self, files: Files, precision: str, *, length: int = 2560, exact: bool = False) -> None:
        """`length`: maximum number of tokens of prompt and answer; `exact`: keys and values in fp32 instead of the
        default, fp16."""
        path = files.gguf(PRECISIONS[precision].gguf)
        self.library, self.thread = importlib.import_module("llama_cpp"), ThreadPoolExecutor(1)
        kv = {"type_k": self.library.GGML_TYPE_F32, "type_v": self.library.GGML_TYPE_F32} if exact else {}
        threads = torch.get_num_threads()
        self.model = self.library.Llama(
            str(path),
            n_ctx=min(length, files.config.context_length),
            n_batch=512,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            **kv,
        )
        self.sampler = self.library.llama_sampler_init_greedy()
        tensors = importlib.import_module("gguf").GGUFReader(path).tensors
        tied = not any(tensor.name == "output.weight" for tensor in tensors)
        self.all_bytes = sum(int(t.n_bytes) for t in tensors)
        self.weight_bytes = sum(int(t.n_bytes) for t in tensors if tied or t.name != "token_embd.weight")
        self.cache_bytes = cache_bytes_per_token(files.config, 4 if exact else 2)

    def generate(self, prompts: Prompts, new: int) -> Generation:
        """Continue the prompts one after the other: prefilling several prompts in one call is no faster."""
        return self.thread.submit(self.generated, prompts, new).result()

    def generated(self, prompts: Prompts, new: int) -> Generation:
        start, tokens, seconds = perf_counter(), [list[int]() for _ in prompts], [list[float]() for _ in prompts]
        for prompt, answer, times in zip(prompts, tokens, seconds):
            self.model.reset()
            self.model.eval(prompt)
            while len(answer) < new:
                if answer:
                    self.model.eval(answer[-1:])
                answer.append(self.library.llama_sampler_sample(self.sampler, self.model.ctx, -1))
                times.append(perf_counter() - start)
        return Generation(tokens, seconds)

    def logits(self, prompt: Sequence[int]) -> np.ndarray:
        self.model.reset()
        self.thread.submit(self.model.eval, prompt).result()
        found = self.library.llama_get_logits_ith(self.model.ctx, -1)
        return np.ctypeslib.as_array(found, (self.model.n_vocab(),)).copy()


def same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), len(ours))


def missing() -> dict[str, str]:
    """The libraries that cannot be measured here, each with the reason."""
    needs = {"transformers": ["transformers"], "llama.cpp": ["llama_cpp", "gguf"]}
    lacking = {
        peer: [module for module in modules if importlib.util.find_spec(module) is None]
        for peer, modules in needs.items()
    }
    return {peer: f"no module {' and '.join(modules)}" for peer, modules in lacking.items() if modules}


PEERS: dict[str, Callable[..., Peer]] = {"onward": Onward, "transformers": Transformers, "llama.cpp": LlamaCpp}
