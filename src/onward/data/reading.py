"""Options for reading documents from sources. Imports nothing heavy."""

from dataclasses import dataclass

from onward.base.errors import UserError


@dataclass(frozen=True)
class Reading:
    """The options of the commands that read documents."""

    field: str = "text"  # field of .jsonl, .parquet and hf:// records that contains the text
    encoding: str = "utf-8"  # encoding of the text files
    raw: bool = False  # keep the markup of HTML, XML, Markdown and notebooks
    repeated_lines: float = 0.3  # leave out lines in at least this fraction of a source's extracted files; 0: keep all

    def __post_init__(self) -> None:
        if not 0 <= self.repeated_lines <= 1:
            raise UserError(f"repeated_lines is {self.repeated_lines}: give a share from 0 (keep all lines) to 1")


READING = Reading()
