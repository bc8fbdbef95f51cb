"""A task from the user's own questions; another model grades the written answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from onward.base.arguments import Range
from onward.config.ranges import Size
from onward.evaluation.kept import Kept
from onward.evaluation.tasks.files import rows
from onward.evaluation.tasks.task import Question, Task
from onward.generation.options import GenerationOptions

PROMPT = (
    "Grade the answer to the question, from 0 (wrong or useless) to 10 (perfect).\n\n"
    "Question:\n{question}\n\nReference:\n{reference}\n\nAnswer:\n{answer}\n\nReply with the number alone."
)


@dataclass(frozen=True)
class Judged(Task, kind="judged"):
    """Rows with a question and, optionally, a reference answer. A judge, a model on an OpenAI-compatible server,
    grades the answers that the evaluated model writes, from 0 to 10; the score is the mean grade divided by 10."""

    file: str  # .jsonl, .json or .csv with question and, optionally, answer
    url: str  # address of the judge up to /v1, such as http://localhost:8000/v1
    model: str  # name of the judge's model on the server
    prompt: str = PROMPT  # template, with fields {question}, {reference} and {answer}
    key_env: str = "OPENAI_API_KEY"  # environment variable that holds the API key; if it is not set, no key is sent
    seconds: Annotated[float, Range(1e-3, 1e6)] = 60.0  # time limit for a request
    concurrency: Annotated[int, Range(1, 1024)] = 8  # maximum number of concurrent requests
    tokens: Size = 256  # maximum number of tokens in an answer

    separator = "\n\n"

    def writing(self) -> GenerationOptions:
        return GenerationOptions(temperature=0.0, max_new_tokens=self.tokens, stop=("\n\n",))

    def __post_init__(self) -> None:
        from onward.evaluation.judging import check_judge

        super().__post_init__()
        check_judge("task.judged", self.url, self.prompt, self.key_env, "answer")

    def questions(self, count: int) -> list[Question]:
        located = rows(self.file, self.kind, ("question",))
        return [Question(str(row["question"]).strip(), expected=str(row.get("answer", ""))) for _, row in located][
            :count
        ]

    def grades(self, answers: Sequence[Sequence[str]], questions: Sequence[Question], kept: Kept) -> list[float]:
        from onward.evaluation.judging import JudgeServer, filled

        server = JudgeServer(self.url, self.model, self.key_env, self.seconds, self.concurrency)
        texts = [
            filled(self.prompt, {"question": one.context, "reference": one.expected, "answer": samples[0].strip()})
            for one, samples in zip(questions, answers)
        ]
        requests = [("grade", self.url, self.model, text) for text in texts]
        grades = [kept.get(*request) for request in requests]
        missing = [i for i, grade in enumerate(grades) if not isinstance(grade, float)]
        keep = lambda j, grade: kept.add([(requests[missing[j]], grade)])
        for i, grade in zip(missing, server.grades([texts[i] for i in missing], keep)):
            grades[i] = grade
        return grades
