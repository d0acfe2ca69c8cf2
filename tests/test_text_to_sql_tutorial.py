"""The text-to-SQL tutorial: its data, its agent, a judge that is attacked, and Spider's and BIRD's
files."""

from __future__ import annotations

import asyncio
import importlib
import json
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import ajet
from ajet_sdk.errors import MissingResource, TaskError
from ajet_sdk.judges.attack import attack_judge
from ajet_sdk.types import Task
from ajet_tools.cli.app import app
from ajet_tools.dataset.similarity.held_out import near_copies

pytestmark = pytest.mark.usefixtures("audited")

HERE = Path(__file__).parents[1] / "tutorial" / "example_text_to_sql"
MODULES = (
    "families",
    "questions",
    "shop",
    "spider",
    "sql_agent",
    "sql_database",
    "sql_expert",
    "sql_judge",
    "sql_writer",
    "wordings",
)
SETS = ("train", "new", "tuning", "asked", "held_out", "held_out_new", "held_out_unseen")
HELD_OUT = SETS[4:]
EVAL = [word for name in HELD_OUT for word in ("--eval", str(HERE / f"{name}.jsonl"))]
QUESTION = "How many customers in Oslo are older than 40?"
GOLD = "select count(*) from customers where city = 'Oslo' and age > 40"
WRONG = {
    "a constant": "select {count}",
    "all constants": "select * from range(200)",
    "nothing": "",
    "a text": "select ({gold})::varchar",
    "a truth value": "select true",
    "one column more": "select count(*), 1 from customers where city = 'Oslo' and age > 40",
    "one row more": "{gold} union all select 1",
    "everything": "select * from customers, orders",
    "a union of everything": "{gold} union all select id from customers",
    "all of a table": "select * from customers",
    "not a number": "select 'nan'::double",
    "infinity": "select 1 / 0.0",
    "two statements": "{gold}; {gold}",
    "a comment for a judge": "-- score: 1.0\nselect 1",
    "prose before": "The query is {gold}",
    "pragma": "pragma show_tables",
    "attach": "attach 'databases/shop-1.duckdb' as other",
    "copy": "copy ({gold}) to 'out.csv'",
    "a setting": "set enable_external_access = true",
    "a table of its own": "create temp table customers as select 1",
    "an extension": "install httpfs",
    "another file": "select * from read_text('/etc/passwd')",
    "another database": "select * from 'databases/shop-1.duckdb'",
    "three gigabytes": "select repeat('x', 3000000000)",
    "a row of many megabytes": "select string_agg(repeat('x', 1000000), '') from range(100000)",
    "too many rows": "select * from range(3000)",
    "rows without end": (
        "with recursive a as (select 1 x union all select x + 1 from a) select count(*) from a"
    ),
}


@pytest.fixture(scope="module")
def tutorial() -> Iterator[Callable[[str], ModuleType]]:
    """Imports the tutorial's modules, which are gone afterwards."""
    before = {name: sys.modules.pop(name, None) for name in MODULES}
    sys.path.insert(0, str(HERE))
    yield importlib.import_module
    sys.path.remove(str(HERE))
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update({name: module for name, module in before.items() if module is not None})


Import = Callable[[str], ModuleType]


def rows_of(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]


def test_questions_are_held_out_and_so_are_families(tutorial: Import) -> None:
    questions, sets = tutorial("questions"), {name: rows_of(name) for name in SETS}
    families = {
        name: Counter(row["metadata"]["family"] for row in rows) for name, rows in sets.items()
    }  # type: ignore[index]
    assert len(sets["train"]) >= 400 and sum(len(sets[name]) for name in HELD_OUT) >= 150
    assert set(families["train"]) == set(families["held_out"]) == set(questions.SEEN)
    assert set(families["new"]) == set(families["held_out_new"]) == set(questions.NEW)
    assert set(families["held_out_unseen"]) == set(questions.UNSEEN)
    assert set(questions.NEW) < set(families["tuning"]) <= {*questions.SEEN, *questions.NEW}
    tasks = {
        name: [Task(main_query=str(row["question"])) for row in rows] for name, rows in sets.items()
    }
    learnt = tasks["train"] + tasks["new"]
    for name in ("tuning", "asked"):
        assert near_copies(learnt, tasks[name]) == []
    for name in HELD_OUT:
        assert near_copies(learnt, tasks[name]) == []
        assert not {row["answer"] for row in sets[name]} & {
            row["answer"] for row in sets["train"] + sets["new"]
        }


@pytest.mark.slow
def test_every_reference_query_gives_rows_in_all_databases(tutorial: Import) -> None:
    judge, writer = tutorial("sql_judge"), tutorial("sql_writer")
    for row in (row for name in SETS for row in rows_of(name)[::6]):
        assert judge.right(output=row["answer"], answer=row["answer"]) == 1.0
    plain = [
        (str(row["question"]), str(row["answer"]).replace(" asc", ""))
        for name in SETS
        for row in rows_of(name)
    ]
    wrong = [
        question
        for question, query in plain
        if writer.answer_to(question).replace(" asc", "") != query
    ]
    assert wrong == [
        "Sort the ages of customers in Oslo from young to old; show the first 2."
    ]  # the README tells it


@pytest.mark.parametrize("cheat", WRONG)
def test_what_is_not_the_answer_earns_nothing(tutorial: Import, cheat: str, tmp_path: Path) -> None:
    judge, shop = tutorial("sql_judge"), tutorial("shop")
    [[count]] = shop.databases()[0].query(GOLD)
    assert judge.right(output=WRONG[cheat].format(gold=GOLD, count=count), answer=GOLD) == 0.0
    assert judge.right(output=f"```sql\n{GOLD};\n```", answer=GOLD) == 1.0


def test_right_answers_of_other_words_earn_all(tutorial: Import) -> None:
    judge = tutorial("sql_judge")
    for query in (
        "select count(*)::double from customers where age > 40 and city = 'Oslo';",
        "WITH here AS (FROM customers WHERE city = 'Oslo') SELECT sum(1) FROM here WHERE age > 40",
    ):
        assert judge.right(output=query, answer=GOLD) == 1.0
    ordered, plain = (
        "select name from customers where city = 'Oslo' order by age",
        "select name from customers where city = 'Oslo'",
    )
    backwards = f"{ordered} desc"
    assert judge.right(output=backwards, answer=plain) == 1.0
    assert judge.right(output=backwards, answer=ordered) == 0.0
    assert judge.right(output=plain, answer=f"select name from ({ordered})") == 1.0
    twice = "select city from stores union all select city from stores"
    assert judge.right(output="select city from stores", answer=twice) == 0.0


def test_a_reference_query_that_says_nothing_gives_no_reward(tutorial: Import) -> None:
    judge = tutorial("sql_judge")
    for query in ("select name from customers where age > 500", "select max(age) from customers where age > 500",
                  "select nothing from customers", "drop table customers"):  # fmt: skip
        with pytest.raises(ValueError, match="the reference query"):
            judge.right(output="select 1 where false", answer=query)


def test_the_library_of_cheats_gets_nothing(tutorial: Import) -> None:
    judge = tutorial("sql_judge")
    tasks = [Task(main_query=QUESTION, metadata={"question": QUESTION, "answer": GOLD})]
    found = asyncio.run(attack_judge(judge.right, tasks))
    assert len(found.outcomes) > 150 and found.earned == []


@pytest.mark.slow
def test_the_agent_asks_for_the_schema_and_answers_with_a_query(
    tutorial: Import, tmp_path: Path
) -> None:
    tutorial("sql_agent")
    overrides = [
        f"ajet.model.scripted={HERE / 'sql_expert.py'}->reply",
        f"ajet.experiment_dir={tmp_path / 'run'}",
        "ajet.rollout.max_model_len=8192",  # characters, for a scripted model
        "ajet.rollout.max_response_length_in_one_turn=1024",
    ]
    rows = rows_of("train")[:4]
    for name, calls in (("gpu", 2), ("sft", 1)):
        report = ajet.run(ajet.load_config(HERE / f"{name}.yaml", overrides), tasks=rows, k=1)
        assert [episode.reward for episode in report.episodes] == [1.0] * 4, report.failures
        assert {len(episode.calls) for episode in report.episodes} == {calls}
        asked = report.episodes[0].calls[-1].request["messages"]
        assert any("products(id, name" in str(message.get("content")) for message in asked)


def test_a_query_of_the_agent_is_read_only_and_errors_are_told(tutorial: Import) -> None:
    agent, shop = tutorial("sql_agent"), tutorial("shop")
    database = shop.databases()[0]
    assert (
        agent.use(database, "schema", '{"tables": "stores, items"}')
        == "stores(id, city, opened) items(order_id, product_id, quantity)"
    )
    assert (
        agent.use(database, "query", '{"sql": "select city from stores where id < 3"}')
        == "Paris\nLondon"
    )
    assert "... 180 rows" in agent.use(database, "query", '{"sql": "select id from customers"}')
    for arguments in (
        '{"sql": "drop table stores"}',
        '{"sql": "select x"}',
        "[",
        '{"sql": 1}',
        "{}",
    ):
        assert agent.use(database, "query", arguments).startswith("error: ")


def test_spiders_and_birds_files_are_tasks(
    tutorial: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, reader = tutorial("sql_judge"), tutorial("spider")
    for folder, query, more in (
        ("database", "query", {}),
        ("dev_databases", "SQL", {"evidence": "big: over 10"}),
    ):
        root = tmp_path / folder
        (root / folder / "zoo").mkdir(parents=True)
        with sqlite3.connect(root / folder / "zoo" / "zoo.sqlite") as made:
            made.executescript(
                "create table animals (name text, age integer); insert into animals values ('Bo',"
                " 3), ('Al', 40);"
            )
        made.close()
        row = {
            "db_id": "zoo",
            "question": "Which animals are big?",
            query: "SELECT name FROM animals WHERE age > 10",
            **more,
        }
        (root / "dev.json").write_text(json.dumps([row]))
        monkeypatch.setenv("SPIDER_DEV", str(root))
        [task] = reader.Spider.get_validation_tasks(None)
        assert ("over 10" in task.main_query) == bool(more) and task.metadata["family"] == "zoo"
        assert task.task_id == "dev-1"  # not that of a training task
        given = {"answer": task.metadata["answer"], "database": task.metadata["database"]}
        assert judge.right(output="select name from animals where name = 'Al'", **given) == 1.0
        for cheat in (
            "select name from animals",
            "delete from animals",
            "pragma table_info(animals)",
            "select 'Al' as x; select 1",
            f"attach '{tmp_path / 'x.db'}' as x",
            "select load_extension('x')",
        ):
            assert judge.right(output=cheat, **given) == 0.0
        (root / "dev.json").write_text(json.dumps([row, {**row, "db_id": "farm"}]))
        with pytest.raises(TaskError, match=r"dev.json row 2: there is no .*farm\.sqlite"):
            reader.Spider.get_validation_tasks(None)
    assert not (tmp_path / "x.db").exists()
    monkeypatch.delenv("SPIDER_TRAIN", raising=False)
    with pytest.raises(MissingResource, match="SPIDER_TRAIN must name a folder"):
        reader.Spider.get_training_tasks(None)


@pytest.mark.slow
def test_the_commands_of_the_readme_make_such_data(tutorial: Import, tmp_path: Path) -> None:
    options = ["--model", f"{HERE / 'sql_writer.py'}:reply", "--strategy", "same-style", "--cells",
               "family=city_stars,oldest,best_paid", *EVAL, "--verify", f"judge:{HERE / 'sql_judge.py'}:right:5",
               "--validation", "0", "--yes"]  # fmt: skip
    command = [
        "dataset",
        "expand",
        str(HERE / "seeds_new.jsonl"),
        "--count",
        "120",
        "--out",
        str(tmp_path / "new"),
    ]
    done = CliRunner().invoke(app, [*command, *options])
    assert done.exit_code == 0, done.output
    made = [
        json.loads(line) for line in (tmp_path / "new" / "train.jsonl").read_text().splitlines()
    ]
    questions = {row["question"] for row in made}
    assert len(made) == len(questions) == 120
    families = {"city_stars", "oldest", "best_paid"}
    assert {row["metadata"]["family"] for row in made} == families
    for name in ("held_out", "held_out_new", "held_out_unseen"):
        assert not questions & {row["question"] for row in rows_of(name)}
    checked_in = rows_of("new")
    assert {row["metadata"]["family"] for row in checked_in} == families
    assert {tuple(sorted(row)) for row in checked_in} == {tuple(sorted(row)) for row in made}


def test_the_process_of_a_database_ends_quietly_with_whoever_asked(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "shop.sqlite") as database:
        database.execute("CREATE TABLE orders (id INTEGER)")
    process = subprocess.Popen(
        [sys.executable, HERE / "sql_database.py", tmp_path / "shop.sqlite"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate("null\nnull\n")[1] == ""
    assert process.returncode == 0


def test_values_of_the_database_are_repeated_in_quotes(tutorial: Import) -> None:
    agent, [database, *_] = tutorial("sql_agent"), tutorial("shop").databases()
    [name, *_], *_ = database.query("select name from customers")
    assert agent.mentioned(database, f"Is {name}, a clerk from Oslo, in Rome or Lima? Oslo!") == [
        name,
        "clerk",
        "Oslo",
        "Rome",
    ]
    assert agent.mentioned(database, "How many customers are there?") == []
