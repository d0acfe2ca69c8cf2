"""A stand-in for AppWorld that speaks as it does: three apps, six tasks, code in a turn, checks of
what was changed.

ajet env serve tutorial/example_appworld/shop_env.py:Shop --name appworld
"""

import contextlib
import io
import re
import traceback
from types import SimpleNamespace

CODE = re.compile(r"```(?:python)?\n(.*?)(?:```|\Z)", re.DOTALL)
GOODS = {"tea": 4, "cake": 7, "lamp": 30}
TASKS = {f"{'order' if n % 2 else 'price'}_{thing}": thing for n in (0, 1) for thing in GOODS}
DOCS = {
    "shop": {"show_price(thing, token)": "The price of a thing.", "buy(thing, token)": "Buy it."},
    "supervisor": {
        "show_password()": "The password of the shop.",
        "complete_task(answer=None)": "End the task.",
    },
    "api_docs": {"show_api_descriptions(app_name)": "The APIs of an app."},
}


class Shop:
    @staticmethod
    def tasks(split):
        return [name for name, thing in TASKS.items() if (thing == "lamp") == (split == "dev")]

    def __init__(self, task_id):
        self.task_id, self.thing = task_id, TASKS[task_id]
        self.bought, self.answer, self.completed = [], None, False
        self.names = {"apis": self._apis()}

    def _apis(self):
        def login(password):
            return "token" if password == "sesame" else "the password is wrong"

        def checked(token):
            if token != "token":
                raise PermissionError("the token is wrong; get one with apis.shop.login(password)")

        def show_price(thing, token):
            checked(token)
            return GOODS[thing]

        def buy(thing, token):
            checked(token)
            self.bought.append(thing)

        def complete_task(answer=None):
            self.answer, self.completed = answer, True

        return SimpleNamespace(
            api_docs=SimpleNamespace(show_api_descriptions=lambda app_name: DOCS[app_name]),
            supervisor=SimpleNamespace(show_password=lambda: "sesame", complete_task=complete_task),
            shop=SimpleNamespace(login=login, show_price=show_price, buy=buy),
        )

    def reset(self):
        wanted = (
            f"Buy a {self.thing}."
            if self.task_id.startswith("order")
            else f"What does a {self.thing} cost?"
        )
        system = (
            "Do the task by writing Python, one block a turn; `apis` has the apps"
            f" {', '.join(DOCS)}."
        )
        return [{"role": "system", "content": system}, {"role": "user", "content": wanted}]

    def step(self, action):
        found = CODE.search(action)
        if not found:
            return "Write your code in a block: ```python … ```", 0.0, False, {}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(found.group(1), self.names)
            except Exception:  # noqa: BLE001  the agent reads what its code raised
                traceback.print_exc(limit=0, file=printed)
        return printed.getvalue() or "Execution successful.", 0.0, self.completed, {}

    def evaluate(self, params):
        order = self.task_id.startswith("order")
        checks = [
            self.completed,
            self.bought == ([self.thing] if order else []),
            self.answer == (None if order else GOODS[self.thing]),
        ]
        return float(all(checks)) if params.get("sparse") else sum(checks) / len(checks)
