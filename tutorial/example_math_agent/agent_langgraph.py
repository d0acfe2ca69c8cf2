"""The agent as a graph of LangGraph: a node asks the model, another runs the tool.

pip install langgraph langchain-openai

    ajet --conf tutorial/example_math_agent/math_agent.yaml ajet.rollout.user_workflow=agent_langgraph.py:solve
"""

import json

from agent import SYSTEM, TOOLS, use_tool
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

import ajet

model = ChatOpenAI(model="gpt-4o-mini", max_tokens=512).bind_tools(TOOLS)


async def ask(state: MessagesState) -> dict[str, list]:
    return {"messages": [await model.ainvoke(state["messages"])]}


def calculate(state: MessagesState) -> dict[str, list]:
    calls = state["messages"][-1].tool_calls
    return {
        "messages": [
            ToolMessage(use_tool(json.dumps(call["args"])), tool_call_id=call["id"])
            for call in calls
        ]
    }


def wants_tool(state: MessagesState) -> str:
    return "calculate" if state["messages"][-1].tool_calls and len(state["messages"]) < 7 else END


graph = StateGraph(MessagesState)
graph.add_node("ask", ask)
graph.add_node("calculate", calculate)
graph.add_edge(START, "ask")
graph.add_conditional_edges("ask", wants_tool)
graph.add_edge("calculate", "ask")
agent = graph.compile()


@ajet.workflow
async def solve(question: str) -> str:
    result = await agent.ainvoke({"messages": [SystemMessage(SYSTEM), HumanMessage(question)]})
    return str(result["messages"][-1].content)
