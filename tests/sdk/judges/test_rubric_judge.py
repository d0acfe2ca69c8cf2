"""A rubric made of scored examples, by a model over real HTTP that sees one thing: whether an
answer says thanks."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.config.config import load_config
from ajet_sdk.config.objects import load_object
from ajet_sdk.errors import ConfigError, NoReward
from ajet_sdk.judges.evaluate import evaluate, labelled_row
from ajet_sdk.judges.llm import LlmJudge
from ajet_sdk.judges.load import load_judge, named_judge
from ajet_sdk.judges.rubric import RubricJudge
from ajet_sdk.types import Episode, Task
from tests.sdk.judges.test_llm_judge import answers, shown, verdict
from tests.serving import completing

POLITE = "It says thanks."
SCORED = [
    {
        "query": f"q{i}",
        "answer": ("thanks" if i % 2 else "no") + " and so on" * (10 - i),
        "score": float(i % 2),
    }
    for i in range(10)
]


def polite(request: dict[str, Any]) -> str:
    """Grades by thanks where the rubric asks for it, else by length; writes and mends rubrics."""
    text = shown(request)
    if "points" in text and "Mend the rubric" in text:
        return json.dumps({"points": [POLITE]})
    if "Find out what they scored them by" in text:
        assert re.search(r'score="1">\n<task>\nq\d\n</task>\n<answer>\nthanks', text)
        return json.dumps({"points": ["It is long."]})
    scores = [
        float("thanks" in one) if POLITE in text else min(1.0, len(one) / 100)
        for one in answers(request)
    ]
    if "verdicts" in text:
        rows = [{"answer": i, "reason": "r", "score": score} for i, score in enumerate(scores, 1)]
        return json.dumps({"verdicts": rows})
    return verdict(scores[0])


@contextmanager
def served(
    reply: Callable[[dict[str, Any]], str | int] = polite,
) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    with completing(reply) as (url, asked):
        yield {"model": "m", "base_url": url, "api_key": "k"}, asked


def judged(judge: Any, output: str) -> Any:
    task = Task(main_query="another")
    return asyncio.run(judge(output, task, Episode(task=task, output=output)))


def test_a_rubric_is_revised_by_what_it_misjudges_and_tried_on_what_it_has_not_seen(
    tmp_path: Path,
) -> None:
    with served() as (where, asked):
        judge = RubricJudge(SCORED, file=tmp_path / "rubric.md", success_threshold=0.7, **where)
        assert judged(judge, "thanks").rewards[0].value == 1.0
        assert judged(judge, "nothing of it" * 20).rewards[0].value == 0.0
        built = judge.built
        assert built is not None and built.points == (POLITE,)
        assert (built.held_out, built.agreement) == (3, 1.0) and (built.plain or 0) < 1.0
        assert built.interval is not None and built.interval[0] < 0.5, "three answers say little"
        written = [shown(request) for request in asked if "Find out" in shown(request)]
        assert len(written) == 1
        seen = re.findall(r"<task>\n(q\d)\n</task>", written[0])
        assert len(seen) == 7 and len(set(seen)) == 7, "the held-out ones are not shown"
        count = len(asked)
        again = RubricJudge(SCORED, file=tmp_path / "rubric.md", **where)
        assert judged(again, "thanks").rewards[0].name == "rubric"
        assert len(asked) == count + 1, "the rubric is kept"
        other = RubricJudge(SCORED[:8], file=tmp_path / "rubric.md", **where)
        judged(other, "thanks")
        assert len(asked) > count + 2, "made of other examples it is made anew"
    assert (tmp_path / "rubric.md").read_text() == f"1. {POLITE}\n"


def test_it_agrees_with_the_labels_better_than_the_plain_judge() -> None:
    with served() as (where, _):
        plain, judge = LlmJudge(**where), RubricJudge(SCORED, **where)
        held_out = [
            ("thanks a lot", 1.0),
            ("thanks", 1.0),
            ("so long an answer " * 9, 0.0),
            ("not at all", 0.0),
        ]
        for one, right in ((plain, False), (judge, True)):
            found = [judged(one, text).rewards[0].value for text, _ in held_out]
            assert (found == [label for _, label in held_out]) is right


def test_a_model_that_writes_no_rubric_gives_no_reward() -> None:
    with (
        served(lambda request: '{"points": []}') as (where, _),
        pytest.raises(NoReward, match="points"),
    ):
        judged(RubricJudge(SCORED, **where), "thanks")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (SCORED[:3], "at least 4"),
        (SCORED[1::2], "two different scores"),
        ([*SCORED, {"query": "q", "answer": "a", "score": 7}], "the score 7, outside 0 to 1"),
        ([{"query": "q", "score": 1}], "needs `answer`"),
    ],
)
def test_examples_that_make_no_rubric(rows: list[dict[str, Any]], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        RubricJudge(rows, model="m", base_url="http://127.0.0.1:9/v1")


def config(tmp_path: Path, url: str, **grader: Any) -> Any:
    rows = [
        {
            "main_query": row["query"],
            "final_answer": row["answer"],
            "answer": "the reference",
            "score": row["score"],
        }
        for row in SCORED
    ]
    (tmp_path / "scored.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {
        "model_name": "m", "grader_name": "Politeness", "min_score": 0, "max_score": 1, "success_threshold": 0.7,
        "input_data_type": "dataset_file", "dataset_file": {"training": {"file_path": str(tmp_path / "scored.jsonl")}},
        **grader,
    }  # fmt: skip
    task_judge = {
        "judge_type": "rubrics_auto_grader",
        "rubrics_auto_grader": section,
        "llm": {"base_url": url},
    }
    return load_config(values={"experiment_dir": str(tmp_path / "run"), "task_judge": task_judge})


def test_the_keys_of_the_rubric_grader(tmp_path: Path) -> None:
    with served() as (where, asked):
        settings = config(tmp_path, where["base_url"])
        judge = load_judge(settings)
        found = judged(judge, "thanks")
        assert (found.rewards[0].name, found.is_success) == ("Politeness", True)
        assert not judged(judge, "a" * 200).is_success
        assert "the reference" not in shown(next(r for r in asked if "Find out" in shown(r)))
        assert (tmp_path / "run" / "rubric.md").exists()
        grader = load_object("ajet.task_judge.rm_auto_grader_judge->AutoGraderJudge")(settings)
        from ajet import Task, WorkflowOutput, WorkflowTask

        task = WorkflowTask(task=Task(main_query="q"))
        output = WorkflowOutput(metadata={"final_answer": "thanks"})
        assert asyncio.run(grader.compute_reward(task, output)).rewards[0].value == 1.0


def test_listwise_it_ranks_a_group(tmp_path: Path) -> None:
    with served() as (where, _):
        judge = load_judge(config(tmp_path, where["base_url"], grader_mode="listwise"))
        assert judge.group
        group = [Episode(task=Task(main_query="q"), output=text) for text in ("no", "thanks")]
        assert [one.rewards[0].value for one in asyncio.run(judge.compute_rewards(group))] == [
            0.0,
            1.0,
        ]


def test_by_name_from_a_file_of_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scored.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in SCORED))
    with served() as (where, _):
        monkeypatch.setenv("OPENAI_BASE_URL", where["base_url"])
        settings = load_config(
            values={"experiment_dir": str(tmp_path), "task_judge": {"alien_llm_model": "m"}}
        )
        assert judged(named_judge(f"rubric:{path}", settings), "thanks").rewards[0].value == 1.0
    with pytest.raises(ConfigError, match="there is no file"):
        named_judge(f"rubric:{tmp_path / 'none.jsonl'}", settings)


def test_ranked_answers_are_examples(tmp_path: Path) -> None:
    rows = [
        {"main_query": "q", "answers": ["thanks", "no", "never"], "label_rank": [1, 2, 3]}
        for _ in range(2)
    ]
    path = tmp_path / "ranked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with served() as (where, _):
        settings = config(
            tmp_path, where["base_url"], dataset_file={"training": {"file_path": str(path)}}
        )
        judge = load_judge(settings)
        scores = sorted(one.score for one in (*judge._made_of, *judge._tried_on))
    assert scores == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1], "row 1 is not an object"),
        (
            {"answers": ["a", "b"], "label_rank": ["first", 2]},
            r"ranks .*list of numbers .got .'first'",
        ),
    ],
)
def test_rows_that_are_no_examples(tmp_path: Path, row: Any, expected: str) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(json.dumps(row) + "\n")
    settings = config(
        tmp_path, "http://127.0.0.1:9/v1", dataset_file={"training": {"file_path": str(path)}}
    )
    with pytest.raises(ConfigError, match=expected):
        load_judge(settings)


def test_what_making_a_rubric_took_is_counted() -> None:
    labelled = [
        labelled_row({**row, "output": row["answer"]}, place) for place, row in enumerate(SCORED)
    ]
    with served() as (where, asked):
        found = asyncio.run(evaluate(RubricJudge(SCORED, **where), labelled, repeats=1))
    assert found.building is not None and found.building.calls + round(
        found.calls * found.count
    ) == len(asked)
    assert found.building.calls > 10 and found.building.tokens
