"""Runs in the environment of distilabel: `URL SEEDS RECORDS OUT`. Text generation, its MinHash
step, and a judge."""

import itertools
import json
import sys
from pathlib import Path

from distilabel.models import OpenAILLM
from distilabel.pipeline import Pipeline
from distilabel.steps import LoadDataFromDicts, MinHashDedup, StepInput, step
from distilabel.steps.tasks import TextGeneration


@step(inputs=["generation"], outputs=["question", "answer", "text"])
def parse(rows: StepInput):
    """The tasks of the replies; prose is left out."""
    found = []
    for row in rows:
        try:
            task = json.loads(row["generation"])
        except (TypeError, ValueError):
            continue
        found.append(
            {"question": task["question"], "answer": task["answer"], "text": task["question"]}
        )
    yield found


@step(inputs=["keep_row_after_minhash_filtering"], outputs=["instruction"])
def ask_judge(rows: StepInput):
    """What is no near duplicate, as a question to the judge."""
    yield [
        {"question": row["question"], "answer": row["answer"],
         "instruction": f"Is this answer correct?\nQuestion: {row['question']}\nGiven answer: {row['answer']}"}
        for row in rows if row["keep_row_after_minhash_filtering"]
    ]  # fmt: skip


def main(url: str, seeds: Path, records: int, out: Path) -> None:
    llm = OpenAILLM(
        model="writer", base_url=url, api_key="none", generation_kwargs={"temperature": 1.0}
    )
    examples = itertools.islice(itertools.cycle(seeds.read_text().splitlines()), records)
    prompts = [
        {"instruction": f"Write a new task like this one:\n{example}\n(task {number})"}
        for number, example in enumerate(examples)
    ]
    with Pipeline("bench") as pipeline:
        (
            LoadDataFromDicts(data=prompts)
            >> TextGeneration(name="write", llm=llm)
            >> parse()
            >> MinHashDedup(tokenizer="ngrams", threshold=0.8, storage="dict")
            >> ask_judge()
            >> TextGeneration(name="judge", llm=llm, output_mappings={"generation": "verdict"})
        )
    made = pipeline.run(use_cache=False)["default"]["train"]
    kept = [
        {"question": row["question"], "answer": row["answer"]}
        for row in made
        if '"score": 1' in row["verdict"]
    ]
    out.write_text("".join(json.dumps(row) + "\n" for row in kept))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
