"""AppWorld as an environment: an agent writes Python that calls the APIs of nine apps, and its
effects are scored.

    ajet env serve tutorial/example_appworld/appworld_env.py:World --name appworld --python APPWORLD/bin/python

AppWorld needs pydantic 1 and ajet pydantic 2, so AppWorld has a virtual environment of its own (see
the README).
"""

import json
import re
import uuid

SETUP = """AppWorld's package or its data are not here. Get them with these two commands:
    pip install appworld && appworld install
    appworld download data
and name the interpreter that has them: ajet env serve … --python PATH"""

PROMPT = """You do the tasks of {name} ({email}, phone {phone}) by writing Python, which is run as you write it.
Write one block of code a turn, ```python … ```, and read what it prints; variables stay from turn to turn.
The apps and what they are for: {apps}
Find an API with print(apis.api_docs.show_api_descriptions(app_name='spotify')) and its parameters with
print(apis.api_docs.show_api_doc(app_name='spotify', api_name='login')). The supervisor app has {name}'s passwords and
addresses. End with apis.supervisor.complete_task(), with answer=… where the task asks for something."""

CODE = re.compile(r"```(?:python)?\n(.*?)(?:```|\Z)", re.DOTALL)

try:
    from appworld import AppWorld, load_task_ids

    load_task_ids("train")
except Exception as error:  # noqa: BLE001  AppWorld raises a plain Exception where its data are absent
    raise ImportError(f"{SETUP}\n({type(error).__name__}: {error})") from None


class World:
    @staticmethod
    def tasks(split):
        return load_task_ids(split)

    def __init__(self, task_id):
        self.world = AppWorld(task_id=task_id, experiment_name=f"ajet/{uuid.uuid4().hex}")

    def reset(self):
        task = self.world.task
        who = task.supervisor
        apps = json.dumps(dict(task.app_descriptions))
        name = f"{who.first_name} {who.last_name}"
        system = PROMPT.format(name=name, email=who.email, phone=who.phone_number, apps=apps)
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": task.instruction},
        ]

    def step(self, action):
        found = CODE.search(action)
        said = (
            self.world.execute(found.group(1))
            if found
            else "Write your code in a block: ```python … ```"
        )
        return said, 0.0, self.world.task_completed(), {}

    def evaluate(self, params):
        """The share of the task's checks that hold; with `sparse` 1 where all do, else 0."""
        report = self.world.evaluate()
        passed, failed = len(report.passes), len(report.failures)
        return float(failed == 0) if params.get("sparse") else passed / (passed + failed)

    def close(self):
        self.world.close()
