"""The frameworks, and the versions that the matrix is checked with."""

from __future__ import annotations

from dataclasses import dataclass

DIALECTS = {
    "chat": "Chat completions",
    "responses": "Responses",
    "messages": "Messages",
    "gemini": "Gemini",
}
CASES = ("plain", "stream", "tools", "typed", "parallel")


@dataclass(frozen=True)
class Framework:
    """What is installed for a module of `agents/`."""

    title: str
    newest: tuple[str, ...]
    oldest: tuple[str, ...]
    before: str
    """The day by which the oldest version's own dependencies are resolved: a package of that time
    wants theirs."""


FRAMEWORKS = {
    "openai_sdk": Framework("OpenAI SDK", ("openai==3.54.0",), ("openai==1.92.0",), "2025-07-15"),
    "anthropic_sdk": Framework(
        "Anthropic SDK", ("anthropic==2.12.0",), ("anthropic==0.57.1",), "2025-08-01"
    ),
    "google_genai": Framework(
        "google-genai", ("google-genai==3.4.0",), ("google-genai==1.24.0",), "2025-08-01"
    ),
    "transports": Framework(
        "requests, httpx, aiohttp, urllib3, urllib",
        ("requests==2.34.2", "httpx==0.28.1", "aiohttp==3.14.5", "urllib3==2.8.0"),
        ("requests==2.31.0", "httpx==0.28.0", "aiohttp==3.11.0", "urllib3==1.26.20"),
        "2025-08-01",
    ),
    "litellm": Framework(
        "LiteLLM", ("litellm==1.106.2", "mcp"), ("litellm==1.74.0",), "2025-08-01"
    ),
    "langgraph": Framework(
        "LangChain and LangGraph",
        ("langgraph==1.2.22", "langchain==1.4.7", "langchain-openai==1.7.3"),
        ("langgraph==1.0.1", "langchain==1.0.2", "langchain-openai==1.0.1"),
        "2025-11-15",
    ),
    "openai_agents": Framework(
        "OpenAI Agents SDK",
        ("openai-agents==0.24.0",),
        ("openai-agents==0.2.4",),
        before="2025-08-15",
    ),
    "pydantic_ai": Framework(
        "pydantic-ai",
        ("pydantic-ai-slim[openai,anthropic,google]==2.68.0",),
        ("pydantic-ai-slim[openai,anthropic,google]==1.0.1",),
        "2025-09-15",
    ),
    "autogen": Framework(
        "AutoGen",
        ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"),
        ("autogen-agentchat==0.5.7", "autogen-ext[openai]==0.5.7"),
        "2025-08-01",
    ),
    "crewai": Framework("CrewAI", ("crewai==1.15.30",), ("crewai==1.0.0",), "2025-11-01"),
    "llamaindex": Framework(
        "LlamaIndex",
        ("llama-index-core==0.14.25", "llama-index-llms-openai==0.8.3"),
        ("llama-index-core==0.13.0", "llama-index-llms-openai==0.5.0"),
        "2025-08-15",
    ),
    "dspy": Framework("DSPy", ("dspy==3.4.1",), ("dspy==3.0.1",), "2025-09-01"),
    "smolagents": Framework(
        "smolagents",
        ("smolagents[openai]==1.26.0",),
        ("smolagents[openai]==1.20.0",),
        before="2025-08-01",
    ),
    "strands": Framework(
        "Strands",
        ("strands-agents[openai,anthropic]==1.62.0",),
        ("strands-agents[openai,anthropic]==1.0.0",),
        "2025-08-15",
    ),
    "google_adk": Framework(
        "Google ADK",
        ("google-adk==2.13.0", "litellm", "mcp"),
        ("google-adk==1.8.0", "litellm==1.74.0"),
        "2025-08-15",
    ),
    "agno": Framework(
        "Agno", ("agno==3.1.10", "openai"), ("agno==1.7.5", "openai==1.97.0"), "2025-08-15"
    ),
    "instructor": Framework(
        "Instructor", ("instructor==1.17.0",), ("instructor==1.9.2",), "2025-08-01"
    ),
    "agentscope1": Framework(
        "AgentScope 1.x",
        ("agentscope==1.0.21", "openai<3", "mcp<2", "greenlet", "tqdm"),
        ("agentscope==1.0.9", "tqdm", "packaging"),
        "2026-01-15",
    ),
    "agentscope2": Framework(
        "AgentScope 2.x", ("agentscope==2.0.10",), ("agentscope==2.0.5",), "2026-11-22"
    ),
}
