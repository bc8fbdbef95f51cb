"""Generation side by side: Onward, transformers and llama.cpp on the same weights, in turns, medians.

    python -m benchmarks.decode                                  all sections
    python -m benchmarks.decode decode prefill --precisions f32  some of them
    python -m benchmarks.decode --tiny                           a tiny model: shows that everything runs

The model has the shape of a Llama, 124,668,672 parameters (12 layers, width 768, 12 heads, 4 key/value heads, d_ff
2,048, vocabulary 32,000) and random weights. transformers is measured where it is installed, llama.cpp where
llama-cpp-python and gguf are; before the sections decode, prefill, batch, requests and context, their logits are
compared with Onward's.

sections:
  decode       tokens/s at batch 1, bytes read per token, and the fraction of the memory bandwidth that decoding uses
  prefill      prompt tokens/s of one request, and of four at once
  parts        the time of each part of the model and the engine during prefill
  batch        16 rows compared with one
  rows         1 to 64 rows in each precision
  requests     64 requests: batched by Onward; by transformers one by one, and with continuous batching
  slots        a few tokens in a cache of many slots
  families     decoding of families that transformers also implements, at 75 to 126 M parameters
  context      decoding after 8,000 tokens
  stories      stories260K, a trained model of 260,032 parameters
  variants     decoding with adapters and with quantized caches, in compiled and in plain steps
  memory       peak memory in a fresh process
  uncached     generation with and without a cache, by length
  speculation  a draft of 2 layers, whose tokens a target of 48 layers accepts at a rate of 0.8
"""

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="sections to run; default: all")
    parser.add_argument("--precisions", nargs="+", metavar="P", help="some of f32, bf16, int8, int4; default: all")
    parser.add_argument("--families", nargs="+", metavar="F", help="families of the section `families`; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each case; the median is reported")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="write the pictures of the sections that have them")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and the tables on standard error")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch and other libraries are imported

    import torch

    from benchmarks.decode import families, memory, parts, serving, speculation, speed, stories, uncached, variants
    from benchmarks.decode.bench import Bench
    from benchmarks.decode.models import PRECISIONS, SIZES
    from benchmarks.decode.peers import missing
    from benchmarks.text import machine

    compared = speed.decode, speed.prefill, speed.batch, serving.requests, serving.context
    others = parts.parts, serving.slots, stories.stories, memory.memory, uncached.uncached, speculation.speculation
    alone = (speed.rows, *others, families.families, variants.variants)
    sections = {function.__name__: function for function in (*compared, *alone)}
    chosen, precisions = options.sections or list(sections), options.precisions or list(PRECISIONS)
    for names, known in ((chosen, sections), (precisions, PRECISIONS)):
        if unknown := set(names) - set(known):
            parser.error(f"{min(unknown)} is unknown: choose from {', '.join(known)}")
    if unknown := set(options.families or ()) - families.FAMILIES.keys():
        parser.error(f"{min(unknown)} is unknown: choose from {', '.join(families.FAMILIES)}")
    torch.set_num_threads(options.threads)
    out = sys.stderr if options.json else sys.stdout
    with TemporaryDirectory() as root:
        sizes = SIZES["tiny" if options.tiny else "full"]
        bench = Bench(sizes, precisions, options.rounds, Path(root), missing(), options.families)
        print(machine(), flush=True, file=out)
        for name, reason in bench.absent.items():
            print(f"{name} is left out: {reason}", file=out)
        tables = []
        functions = [sections[name] for name in chosen]
        for section in ([speed.agreement] if set(functions) & set(compared) else []) + functions:
            tables.append(section(bench))
            print(f"\n{tables[-1].as_text()}", flush=True, file=out)
            if options.draw and tables[-1].picture:
                tables[-1].picture.write(options.draw / f"{section.__name__}.svg")
    if options.json:
        result = {"machine": machine(), "absent": bench.absent, "tables": [table.as_json() for table in tables]}
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
