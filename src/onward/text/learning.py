"""Training of byte-level BPE, by `ffbpe` if it is installed, else by `tokenizers`, which finds the same merges and
takes several times as long. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import tokenizers
from tokenizers import models, pre_tokenizers, trainers


def learn_bpe(texts: Iterable[str], size: int, control: str) -> models.BPE:
    """Train byte-level BPE on texts, which are iterated once and split by GPT-2's pattern (Radford et al. 2019).

    The vocabulary has at most `size` ids: the control token, the 256 bytes, and a token for each merge, the most
    frequent pair first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    try:
        import ffbpe
    except ImportError:  # it has no wheel for some machines
        return by_tokenizers(texts, size, control, alphabet)
    counter = ffbpe.PreTokenizer([]).word_counter()
    counter.add_source(texts)
    trainer = ffbpe.BpeTrainer([control], initial_alphabet="byte_level", tie_break="smallest_pair_id")
    trainer.add_word_counter(counter)
    interruptible(lambda: trainer.train(size))
    with TemporaryDirectory() as folder:
        trainer.validate_model().save_merges_txt(file := Path(folder) / "merges.txt")
        lines = file.read_text(encoding="utf-8").splitlines()  # such as: t he => 1234
    merges = [(left, right) for left, right, *_ in (line.split(" ") for line in lines)]
    tokens = dict.fromkeys([control, *alphabet, *map("".join, merges)])
    return models.BPE({token: i for i, token in enumerate(tokens)}, merges)


def by_tokenizers(texts: Iterable[str], size: int, control: str, alphabet: list[str]) -> models.BPE:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[control], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return inner.model


def interruptible(work: Callable[[], object]) -> None:
    """Run, in a thread, a function that ignores signals, so that Ctrl-C takes effect at once."""
    done = Future[None]()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    done.result()
