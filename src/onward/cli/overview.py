"""The commands, and their descriptions in `onward --help`."""

GROUPS = {
    "begin": {
        "quickstart": "train a small decoder on the built-in text and watch it learn",
        "learn": "the course: from next tokens to alignment, chapter by chapter",
        "help": "a term in one sentence, with its chapter and its name in the code",
    },
    "texts and tokens": {
        "data": "tokenize texts of any size, once for all runs; list or download well-known corpora",
        "tokenizer": "learn a tokenizer from text, compare tokenizers, show the pieces of a text",
    },
    "train and compare": {
        "train": "text -> tokens -> windows -> logits -> loss -> weights",
        "finetune": "examples of answers -> an assistant",
        "assistant": "documents -> examples -> an adapter -> its evaluation against the base",
        "compare": "variants of a run side by side, and whether they differ by more than noise",
        "sweep": "a run for each value of an option, and the curve of their losses",
        "runs": "the runs in a folder, with their figures",
        "report": "curves, samples, attention and next tokens of a run or a model on one page",
    },
    "use a model": {
        "generate": "prompt -> logits -> next token -> text",
        "chat": "a conversation, turn by turn",
        "serve": "models behind the API of OpenAI",
        "evaluate": "loss, perplexity and bits per byte of a model on a text; its scores on tasks",
        "prompt": "how examples in a prompt change the probabilities of answers",
    },
    "look inside": {
        "inspect": "attention, next tokens, lens, heads and more of a model that reads a text",
        "explain": "the forward pass step by step, with the numbers of a model",
        "draw": "pictures of the ideas: masks, positions, windows, samplers, the cache, a block",
    },
    "check": {
        "doctor": "common mistakes in any decoder, such as your own or a tutorial's",
        "verify": "ways to run a model, each compared with a plain forward pass",
    },
    "sizes and speed": {
        "plan": "estimated memory, operations, speed and cost of a decoder, each with its formula",
        "scaling": "the best model size and number of tokens for a compute budget; laws of your runs",
        "models": "published decoders: their parts, and the changes from one to the next",
        "bench": "tokens per second of a model, and its share of the machine's limits",
    },
    "smaller, merged, published": {
        "quantize": "a model's linear layers as int8 or int4: smaller, faster, slightly less exact",
        "merge": "an adapter (LoRA) and its base as one model",
        "convert": "a model as GGUF for llama.cpp and ollama, or as a Hugging Face folder",
        "card": "the model card of a model or a run: README.md for the hub",
        "push": "a model and its card to the Hugging Face hub",
    },
    "the shell": {
        "completion": "a script that lets the shell complete commands and options",
    },
}
COMMANDS = {name: what for group in GROUPS.values() for name, what in group.items()}
IN_PROCESSES = "quickstart", "train", "finetune", "evaluate", "compare", "sweep"  # commands that torchrun may start
SYNONYMS = {  # names of commands in other programs -> Onward's
    **dict.fromkeys(("talk", "ask", "repl"), "chat"),
    **dict.fromkeys(("server", "api", "host"), "serve"),
    **dict.fromkeys(("export", "save", "gguf"), "convert"),
    **dict.fromkeys(("sample", "infer", "inference", "predict", "complete"), "generate"),
    **dict.fromkeys(("eval", "perplexity", "score"), "evaluate"),
    **dict.fromkeys(("pretrain", "fit", "resume"), "train"),
    **dict.fromkeys(("sft", "dpo", "lora", "tune", "grpo"), "finetune"),
    **dict.fromkeys(("prepare", "download", "dataset"), "data"),
    **dict.fromkeys(("tokenize", "encode"), "tokenizer"),
    **dict.fromkeys(("upload", "publish"), "push"),
    **dict.fromkeys(("benchmark", "speed"), "bench"),
    **dict.fromkeys(("check", "test", "lint"), "doctor"),
    **dict.fromkeys(("list", "ls", "status"), "runs"),
    **dict.fromkeys(("plot", "show", "visualize"), "draw"),
    **dict.fromkeys(("memory", "estimate", "cost"), "plan"),
    **dict.fromkeys(("course", "tutorial", "lesson", "chapter"), "learn"),
    **dict.fromkeys(("glossary", "define", "term"), "help"),
}

DATA_FLOW = """\
How data flows, and the command for each step:

  text -> tokens                                               onward data prepare notes/ --out prepared
                                      which tokenizer?         onward tokenizer compare byte char
  text -> tokens -> windows -> logits -> loss -> weights       onward train mybook.txt --out runs/mybook
                                       what has it learned?    onward report runs/mybook
                                      which runs are there?    onward runs
                                             what is better?   onward compare a.toml b.toml --time 60s --seeds 3
                                            how good is it?    onward evaluate runs/mybook other.txt
                               does it learn from examples?    onward prompt runs/mybook "great → good; huge →"
                                             look inside       onward inspect runs/mybook "Once upon a time" lens
                                            is it exact?       onward verify runs/mybook
  examples of answers -> an assistant                          onward finetune runs/mybook answers.jsonl --lora 16
                                       from documents alone    onward assistant docs/ --base runs/mybook
                                       smaller and faster      onward quantize runs/mybook runs/small
                                            how fast is it?    onward bench runs/mybook
                                            will it fit?       onward plan llama-3.1-8b
  prompt -> logits -> next token -> text                       onward generate runs/mybook "Once upon"
                                          turn by turn         onward chat runs/mybook
                                    for other programs         onward serve runs/mybook
  weights -> another program                                   onward convert runs/mybook mybook.gguf
                                      for everybody to use     onward push runs/mybook me/mybook --license mit

A first model, on text that comes with Python:                 onward quickstart
Well-known texts to train on:                                  onward data list
Published decoders and their differences:                      onward models
The ideas behind them in pictures:                             onward draw mask
A course that teaches them, and its glossary:                  onward learn, onward help nucleus

onward COMMAND --help explains each command, with examples. The commands:"""


def show() -> None:
    print(DATA_FLOW)
    for group, commands in GROUPS.items():
        print(f"\n{group}")
        for name, what in commands.items():
            print(f"  {name:12}{what}")
