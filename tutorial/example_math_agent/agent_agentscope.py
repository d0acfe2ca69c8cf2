"""The agent of AgentScope 2 with the calculator as its tool (pip install "ajet[agentscope]").

ajet --conf tutorial/example_math_agent/math_agent.yaml
ajet.rollout.user_workflow=agent_agentscope.py:solve
"""

from agent import SYSTEM
from agent import calc as evaluate
from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

import ajet

ALLOWED = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="it only counts")
model = OpenAIChatModel(credential=OpenAICredential(api_key="none"), model="gpt-4o-mini")


def calc(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression (str): a+b, a-b or a*b.
    """
    return evaluate(expression)


@ajet.workflow
async def solve(question: str) -> str:
    toolkit = Toolkit(tools=[FunctionTool(calc, permission=ALLOWED)])
    agent = Agent(name="calculator", system_prompt=SYSTEM, model=model, toolkit=toolkit)
    return (await agent.reply(UserMsg("user", question))).get_text_content() or ""
