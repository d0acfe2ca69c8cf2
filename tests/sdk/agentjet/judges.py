"""Judges in the manner of programs for AgentJet."""

import re
from typing import Any

from ajet.task_judge.base_judge import BaseJudge
from ajet.workflow import WorkflowOutput, WorkflowTask


class BoxedAnswer(BaseJudge):
    def __init__(self, config: Any) -> None:
        self.config = config
        self.fmt_penalty = -0.5

    def compute_reward(
        self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput
    ) -> tuple[float, bool]:
        found = re.search(r"\\boxed\{([^}]*)\}", str(workflow_output.metadata["final_answer"]))
        if found is None:
            return self.fmt_penalty, False
        right = found.group(1).strip() == str(workflow_task.task.metadata["answer"])
        return float(right), right


class CountdownJudge(BaseJudge):
    def compute_reward(
        self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput
    ) -> tuple[float, bool]:
        equation = str(workflow_output.metadata["final_answer"]).replace(" ", "")
        numbers = sorted(int(number) for number in re.findall(r"\d+", equation))
        right = numbers == sorted(workflow_output.metadata["nums"]) and "+" in equation
        return float(right and sum(numbers) == workflow_output.metadata["target"]), right
