"""Documents, records and examples as tokens to train on."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.data.corpora import embedded
    from onward.data.encoding import encode
    from onward.data.examples import Encoder, Example
    from onward.data.packing import ExampleBatch
    from onward.data.questions import answers, conversations, preferences
    from onward.data.records import Record, read_records
    from onward.data.sources import documents
    from onward.data.tokens import load_tokens
    from onward.data.windows import IGNORE_INDEX
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = [
    "IGNORE_INDEX",
    "Encoder",
    "Example",
    "ExampleBatch",
    "Record",
    "answers",
    "conversations",
    "documents",
    "embedded",
    "encode",
    "load_tokens",
    "preferences",
    "read_records",
]
