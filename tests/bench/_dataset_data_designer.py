"""Runs in the environment of Data Designer: `URL SEEDS RECORDS OUT`. A task a record, graded by an
LLM judge."""

import json
import sys
import tempfile
from pathlib import Path

import data_designer.config as dd
import pandas
from data_designer.interface import DataDesigner
from pydantic import BaseModel

url, seeds, records, out = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])


class Task(BaseModel):
    question: str
    answer: str


model = dd.ModelConfig(
    alias="writer",
    model="writer",
    provider="bench",
    skip_health_check=True,
    inference_parameters=dd.ChatCompletionInferenceParams(
        temperature=1.0, max_parallel_requests=16
    ),
)
builder = dd.DataDesignerConfigBuilder(model_configs=[model])
rows = pandas.DataFrame({"example": seeds.read_text().splitlines()})
builder.with_seed_dataset(
    dd.DataFrameSeedSource(df=rows), sampling_strategy=dd.SamplingStrategy.SHUFFLE
)
builder.add_column(
    dd.LLMStructuredColumnConfig(
        name="task",
        model_alias="writer",
        output_format=Task,
        prompt="Write a new task like this one:\n{{ example }}",
    )
)
builder.add_column(
    dd.LLMJudgeColumnConfig(
        name="judge",
        model_alias="writer",
        prompt=(
            "Is this answer correct?\nQuestion: {{ task.question }}\nGiven answer: {{"
            " task.answer }}"
        ),
        scores=[
            dd.Score(
                name="correct",
                description="The answer is correct",
                options={1: "correct", 0: "wrong"},
            )
        ],
    )
)
with tempfile.TemporaryDirectory() as folder:
    provider = dd.ModelProvider(name="bench", endpoint=url, provider_type="openai", api_key="none")
    designer = DataDesigner(artifact_path=folder, model_providers=[provider])
    made = designer.create(builder, num_records=records).load_dataset().to_dict("records")
kept = [row["task"] for row in made if row["judge"]["correct"]["score"] == 1]
out.write_text("".join(json.dumps(dict(row)) + "\n" for row in kept))
