"""instructor: objects in each of its modes, and a second try after an answer that the object's validator refuses."""

import json
import sys
from typing import Any, Literal

import instructor
import openai
import pydantic

FAILED = list[str]()  # modes whose first answer was refused


class Trip(pydantic.BaseModel, extra="forbid"):
    """A trip."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]
    by_train: bool


def main() -> None:
    client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    found: dict[str, Any] = {}
    for mode in instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT:

        class Checked(Trip):
            @pydantic.model_validator(mode="after")
            def refuse_first(self) -> Any:
                if mode.value not in FAILED:  # noqa: B023
                    FAILED.append(mode.value)  # noqa: B023
                    raise ValueError("another city, please")
                return self

        create = instructor.from_openai(client, mode=mode).chat.completions.create
        messages: list[Any] = [{"role": "user", "content": "Where?"}]
        trip = create(model="caller", response_model=Checked, messages=messages, max_retries=2, max_tokens=700)
        found[mode.value] = trip.model_dump()
    print(json.dumps({"trips": found, "failed": FAILED}))


main()
