"""Questions about Python, made from its documentation."""

import ast
import inspect

from onward.data import Encoder, Record, conversations, preferences
from onward.data.forms import preferred, supervised
from onward.data.questions import described, functions
from onward.text import with_template

from support.finetuning import tokenizer

SOURCE = '''
def load(path):
    """Return the content of a file. It is closed."""
class Box:
    def put(self, thing):
        """Put a thing into the box.

        It must fit.
        """
    def _hidden(self):
        """Do what nobody asks for."""
    def silent(self): ...
    def spoken(self):
        """no sentence at all"""
'''
KNOWN = {"box.load": "Return the content of a file.", "Box.put": "Put a thing into the box."}


def test_answers_are_the_first_sentences_of_public_functions() -> None:
    assert dict(functions(ast.parse(SOURCE), "box")) == KNOWN
    (said,) = described("str.split", inspect.getdoc(str.split))
    assert said[1].startswith("Return a list of the")
    assert said[1].count(".") == 1


def test_questions_and_pairs_are_read_by_the_methods() -> None:
    encoder = Encoder(with_template(tokenizer(), "plain"))
    for form, rows in ((supervised, conversations(KNOWN)), (preferred, preferences(KNOWN))):
        examples = list(form(encoder, [Record(row, "") for row in rows]))
        assert len(examples) == 2
        first = examples[0].sequences[0]
        asked = [t for t, own in zip(first.tokens, first.trained) if not own]
        assert "What does box.load do?" in encoder.tokenizer.decode(asked)
    right, wrong = (e["content"] for key in ("chosen", "rejected") for e in preferences(KNOWN)[0][key])
    assert [right, wrong] == [*KNOWN.values()]
