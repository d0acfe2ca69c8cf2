"""`dataset expand` beside distilabel and Data Designer: what share of the rows is wrong, a
duplicate, a leak, and what a policy learns from them.

One scripted endpoint writes tasks, solves them and judges answers, for all three, over HTTP. A row
costs a reply, and so does a check; each tool gets the same number of replies. On each of three
tasks the writer has another fault most. Its checks err in a tenth of the cases. Each tool is used
as its documentation says: distilabel with MinHashDedup and a judge, Data Designer with a judge,
ajet with `--verify agreement:3` and `--eval`. On the rows of the first task the policy of
tutorial/example_math_agent is trained, by equal numbers of rows and by all, with equal numbers of
steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import mean
from typing import Any

from ajet_sdk.trace.reader import open_trace
from tests.bench import Figure

REPLIES = 400
"""Of the endpoint, for each tool and task."""
WRONG_CHECK = 0.1
TRAINING_SEEDS = (0, 1, 2)
MATH = Path(__file__).parents[2] / "tutorial" / "example_math_agent"
PEERS = {
    "distilabel": (
        "_dataset_distilabel.py",
        ["requests", "pillow", "datasketch==1.6.5", "nltk", "distilabel[openai]==1.5.3"],
    ),
    "data-designer": ("_dataset_data_designer.py", ["data-designer==0.9.6"]),
}


@dataclass(frozen=True)
class Task:
    """Questions whose answer can be computed from what they are about, and how often the writer
    errs, and how."""

    name: str
    form: str
    pattern: str
    draw: Callable[[random.Random], str]
    answer: Callable[[str], str]
    wrong: float
    repeated: float
    leaked: float

    def question(self, about: str) -> str:
        return self.form.format(about)

    def about(self, text: str) -> str | None:
        """What the last question of a text asks about."""
        found = re.findall(self.pattern, text, re.IGNORECASE)
        return found[-1].lower().replace(" ", "") if found else None


def _word(chance: random.Random) -> str:
    return "".join(
        chance.choice("bdfgklmnprst") + chance.choice("aeiou") for _ in range(chance.randint(3, 6))
    )


def _value(about: str) -> str:
    a, operator, b = re.split("([-+*])", about)
    return str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator])


TASKS = (
    Task(
        "calculator, wrong answers",
        "What is {}?",
        r"what is (\d+ ?[-+*] ?\d+)",
        lambda chance: f"{chance.randint(10, 99)}{chance.choice('+-*')}{chance.randint(10, 99)}",
        _value,
        0.3,
        0.05,
        0.03,
    ),
    Task(
        "letters, duplicates",
        "How many letters has the word {}?",
        r"letters has the word (\w+)",
        _word,
        lambda about: str(len(about)),
        0.05,
        0.4,
        0.03,
    ),
    Task(
        "backwards, leaks",
        "Write the word {} backwards.",
        r"write the word (\w+) backwards",
        _word,
        lambda about: about[::-1],
        0.05,
        0.05,
        0.3,
    ),
)


class Teacher:
    """The scripted model: what it says is drawn from the task, the request's words and its
    number."""

    def __init__(self, task: Task) -> None:
        self.task, self.replies, self._lock = task, 0, threading.Lock()
        chance = random.Random(task.name)
        abouts = list(dict.fromkeys(task.draw(chance) for _ in range(60)))
        self.seeds, self.held_out = abouts[:8], abouts[8:38]
        self._written = list(self.seeds)

    def row(self, about: str) -> dict[str, str]:
        return {"question": self.task.question(about), "answer": self.task.answer(about)}

    def reply(self, prompt: str) -> str:
        with self._lock:
            self.replies += 1
            number = self.replies
            chance = random.Random(hashlib.blake2b(f"{number} {prompt}".encode()).digest())
            if "Is this answer correct?" in prompt:
                right = self._right(
                    prompt, prompt.partition("Given answer:")[2].split("\n")[0].strip()
                )
                verdict = {
                    "correct": {
                        "reasoning": "worked out",
                        "score": int(right ^ (chance.random() < WRONG_CHECK)),
                    }
                }
                return f"```json\n{json.dumps(verdict)}\n```"
            if "example" in prompt.lower() or "new task" in prompt:
                row = self._write(chance)
                if "JSON array" in prompt:
                    return json.dumps([row])
                return (
                    f"```json\n{json.dumps(row)}\n```"
                    if "response_schema" in prompt
                    else json.dumps(row)
                )
            about = self.task.about(prompt)
            answer = self.task.answer(about) if about is not None else "?"
            return f"ANSWER: {self._spoil(answer) if chance.random() < WRONG_CHECK else answer}"

    def _write(self, chance: random.Random) -> dict[str, str]:
        task, kind = self.task, chance.random()
        if kind < task.leaked:
            about, source = chance.choice(self.held_out), "other words"
        elif kind < task.leaked + task.repeated:
            about, source = chance.choice(self._written), "other words"
        else:
            about, source = task.draw(chance), ""
        self._written.append(about)
        row = self.row(about)
        if source and chance.random() < 0.5:  # the same in capitals, or with a word before it
            row["question"] = chance.choice(
                [row["question"].upper(), f"Tell me: {row['question']}"]
            )
        if chance.random() < task.wrong:
            row["answer"] = self._spoil(row["answer"])
        return row

    @staticmethod
    def _spoil(answer: str) -> str:
        return (
            str(int(answer) + 1) if answer.lstrip("-").isdigit() else answer[1:] + answer[0] + "x"
        )

    def _right(self, text: str, answer: str) -> bool:
        about = self.task.about(text)
        return about is not None and self.task.answer(about) == answer

    def faults(self, rows: list[dict[str, Any]]) -> dict[str, int]:
        """How many rows are wrong, duplicates of a seed or an earlier row, and of the evaluation
        set."""
        found, seen = {"wrong": 0, "duplicate": 0, "leaking": 0}, set(self.seeds)
        for row in rows:
            about = self.task.about(row["question"])
            found["wrong"] += not self._right(row["question"], str(row["answer"]))
            found["duplicate"] += about in seen
            found["leaking"] += about in self.held_out
            seen.add(str(about))
        return found


@contextmanager
def served(teacher: Teacher) -> Iterator[str]:
    """The teacher as an OpenAI-compatible endpoint; past its replies it answers 402."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            spent = teacher.replies >= REPLIES
            self._send(
                402 if spent else 200,
                {"error": {"message": "spent"}} if spent else _completion(teacher, body),
            )

        def _send(self, status: int, value: Mapping[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def _completion(teacher: Teacher, body: Mapping[str, Any]) -> dict[str, Any]:
    said = body["messages"][-1]["content"]
    prompt = said if isinstance(said, str) else "".join(part["text"] for part in said)
    choices = [
        {
            "index": index,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": teacher.reply(prompt)},
        }
        for index in range(body.get("n") or 1)
    ]
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "writer",
        "choices": choices,
        "usage": usage,
    }


def main(venvs: Path | None = None) -> list[Figure]:
    """`venvs` keeps the environments of the others for the next time."""
    figures = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pythons = {name: _python(name, venvs or folder / "venvs") for name in PEERS}
        calculator: dict[str, list[dict[str, Any]]] = {}
        for task in TASKS:
            for tool in ("ajet", *PEERS):
                teacher, place = Teacher(task), folder / f"{task.name.partition(',')[0]}-{tool}"
                place.mkdir()
                files = {name: place / f"{name}.jsonl" for name in ("seeds", "eval")}
                for file, abouts in zip(
                    files.values(), (teacher.seeds, teacher.held_out), strict=True
                ):
                    _write(file, [teacher.row(about) for about in abouts])
                with served(teacher) as url:
                    rows = (
                        _ajet(url, files, place)
                        if tool == "ajet"
                        else _peer(tool, pythons[tool], url, files, place)
                    )
                if task is TASKS[0]:
                    calculator |= {"the seeds alone": _rows(files["seeds"]), tool: rows}
                faults = teacher.faults(rows)
                shares = ", ".join(
                    f"{name} {100 * count / max(1, len(rows)):.1f}"
                    for name, count in faults.items()
                )
                bad = 100 * sum(faults.values()) / max(1, len(rows))
                figures.append(
                    Figure(
                        f"{task.name}: {tool}, {len(rows)} rows of {REPLIES} replies",
                        bad,
                        f"% ({shares})",
                    )
                )
        figures += _rewards(calculator, folder)
    return figures


def _rewards(rows: Mapping[str, list[dict[str, Any]]], folder: Path) -> list[Figure]:
    """Held-out reward after training on as many rows of each, drawn at random, and on all rows that
    equal cost gave.

    No held-out problem is in any row.
    """
    seen = {" ".join(row["question"].lower().split()) for found in rows.values() for row in found}
    held_out = [
        row
        for row in _rows(MATH / "val.jsonl")
        if not any(row["question"].lower() in one for one in seen)
    ]
    least = min(len(found) for name, found in rows.items() if name in ("ajet", *PEERS))
    sets = [(name, found, min(least, len(found))) for name, found in rows.items()]
    sets += [
        (f"all of {name}", found, len(found)) for name, found in rows.items() if len(found) > least
    ]
    validation, figures = folder / "held_out.jsonl", []
    _write(validation, held_out)
    for name, found, count in sets:
        runs = []
        for seed in TRAINING_SEEDS:
            file = folder / f"{name}-{seed}.jsonl"
            _write(file, random.Random(seed).sample(found, count))
            runs.append(_train(file, validation, seed, folder))
        before, after = zip(*runs, strict=True)
        text = (
            f"held-out reward (before {mean(before):.3f}; each"
            f" {', '.join(f'{one:.3f}' for one in after)})"
        )
        figures.append(Figure(f"calculator trained on {name}, {count} rows", mean(after), text))
    return figures


def _train(rows: Path, validation: Path, seed: int, folder: Path) -> tuple[float, float]:
    """Held-out reward before and after training; runs of one seed begin with the same model."""
    name, place = rows.stem.replace(" ", "-"), folder / f"seed-{seed}"
    place.mkdir(exist_ok=True)
    overrides = {
        "trainer_common.seed": seed,
        "experiment_name": name,
        "task_reader.jsonl_dataset_file.training.file_path": rows,
        "task_reader.jsonl_dataset_file.validation.file_path": validation,
    }
    command = [sys.executable, "-m", "ajet", "train", "--conf", str(MATH / "math_agent.yaml")]
    command += [f"ajet.{key}={value}" for key, value in overrides.items()]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"the training on {rows.name} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    with closing(open_trace(place / "launcher_record" / name)) as trace:
        curve = trace.query(
            "SELECT value FROM metrics WHERE name = 'val/reward' ORDER BY step"
        ).to_pylist()
    return curve[0]["value"], curve[-1]["value"]


def _python(name: str, venvs: Path) -> Path:
    """The Python of the peer's environment, which is made where there is none."""
    python = venvs.resolve() / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venvs / name)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", *PEERS[name][1]], check=True
        )
    return python


def _ajet(url: str, files: Mapping[str, Path], place: Path) -> list[dict[str, Any]]:
    command = ["dataset", "expand", files["seeds"], "--count", str(REPLIES), "--out", place / "out", "--model",
               f"writer@{url}", "--strategy", "same-style", "--with", "per_call=1", "--validation", "0",
               "--eval", files["eval"], "--yes"]  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "ajet", *map(str, command)], capture_output=True, check=False
    )
    return _rows(
        place / "out" / "train.jsonl"
    )  # it ends with an error: the replies are spent before the count


def _peer(
    tool: str, python: Path, url: str, files: Mapping[str, Path], place: Path
) -> list[dict[str, Any]]:
    script, out = Path(__file__).with_name(PEERS[tool][0]), place / "rows.jsonl"
    command = [str(python), str(script), url, str(files["seeds"]), str(REPLIES // 2), str(out)]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HOME": str(place)
    }
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, env=own, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return _rows(out)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
