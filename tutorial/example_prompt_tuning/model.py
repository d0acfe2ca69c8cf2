"""A STAND-IN for two models, over real HTTP: what they say is computed, the same each time.

    python tutorial/example_prompt_tuning/model.py [--port 8123]

`clerk` writes dates as its system prompt tells it, as far as it knows the words. `writer` is what
reflects: it reads the examples that went wrong and adds a sentence to the prompt. Real models take
their place by --model and --reflect-with.
"""

import argparse
import re
from collections.abc import Iterator

import uvicorn
from dates import MONTHS
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

RULES = {
    "words": "Write the date alone, as ISO 8601.",
    "dots": "Dates with dots have the day first.",
    "short": "A year of two digits is of this century.",
}
"""What has to be said for each form that a date may have."""


def clerk(system: str, question: str) -> str:
    words = re.search(r"(\d+) ([A-Z]\w+) (\d{4})", question)
    dots = re.search(r"(\d+)\.(\d+)\.(\d+)", question)
    if RULES["words"] not in system or not (words or dots):
        return question.removeprefix("Which day is ").removesuffix("?")
    if words:
        return f"{words[3]}-{MONTHS.index(words[2]) + 1:02}-{int(words[1]):02}"
    first, second, year = map(int, dots.groups())
    day, month = (first, second) if RULES["dots"] in system else (second, first)
    year += 2000 if year < 100 and RULES["short"] in system else 0
    return f"{year:04}-{month:02}-{day:02}"


def failures(examples: str) -> Iterator[str]:
    """The form of each date that went wrong."""
    for example in examples.split("# Example")[1:]:
        if "Reward 0." in example:
            asked = re.search(r"Which day is (\S+)", example)
            form = asked[1].rstrip("?") if asked else ""
            yield (
                "words"
                if "." not in form
                else "dots"
                if len(form.rpartition(".")[2]) == 4
                else "short"
            )


def writer(text: str) -> str:
    prompt = text.split("```")[1].strip()
    missing = [
        RULES[form] for form in RULES if form in set(failures(text)) and RULES[form] not in prompt
    ]
    # The first thing to say is the form of the answer; nothing else shows before.
    missing = [RULES["words"]] if missing and RULES["words"] not in prompt else missing[:1]
    return f"What they got wrong, the prompt should say.\n```\n{' '.join([prompt, *missing])}\n```"


async def complete(request: Request) -> JSONResponse:
    body = await request.json()
    messages = body["messages"]
    said = (
        writer(messages[-1]["content"])
        if body["model"] == "writer"
        else clerk(messages[0]["content"], messages[-1]["content"])
    )
    message = {"role": "assistant", "content": said}
    return JSONResponse({"id": "1", "object": "chat.completion", "created": 0, "model": body["model"],
                         "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})  # fmt: skip


app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8123)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")


if __name__ == "__main__":
    main()
