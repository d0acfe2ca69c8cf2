"""An agent that answers questions to a database with SQL, as its author wrote it against the OpenAI
SDK."""

import json
import re
from functools import lru_cache

from openai import OpenAI
from shop import databases
from sql_database import Database, QueryError, opened

import ajet

SYSTEM = "Answer with one SQL query. Tables: {tables}."
TURNS = 4
SHOWN = 5
WORDS = 3


def tool(name: str, parameter: str) -> dict:
    schema = {
        "type": "object",
        "properties": {parameter: {"type": "string"}},
        "required": [parameter],
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("schema", "tables"), tool("query", "sql")]


def schema(database: Database, tables: str) -> str:
    """`orders(id, year) items(order_id, quantity)`, of the tables named."""
    known = database.tables()
    named = [name.strip() for name in tables.split(",")]
    return (
        " ".join(f"{name}({', '.join(known[name])})" for name in named if name in known)
        or "no such table"
    )


def query(database: Database, sql: str) -> str:
    """The first rows, a line each."""
    try:
        rows = database.query(sql)
    except QueryError as error:
        return f"error: {str(error)[:200]}"
    more = [f"... {len(rows)} rows"] if len(rows) > SHOWN else []
    return (
        "\n".join([*(", ".join(str(value)[:80] for value in row) for row in rows[:SHOWN]), *more])
        or "no rows"
    )


@lru_cache(maxsize=64)
def texts(database: Database) -> set[str]:
    """The texts in columns with few values."""
    values: set[str] = set()
    for table, columns in database.tables().items():
        for column in columns:
            try:
                rows = database.query(f'select distinct "{column}" from "{table}"')
            except QueryError:  # too many values
                continue
            values.update(value for [value] in rows if isinstance(value, str))
    return values


def mentioned(database: Database, question: str) -> list[str]:
    """Texts of the database that a question has, of at most `WORDS` words."""
    words = re.findall(r"\w+", question)
    spans = [" ".join(words[i : i + n]) for i in range(len(words)) for n in range(WORDS, 0, -1)]
    return [text for text in dict.fromkeys(spans) if text in texts(database)]


def use(database: Database, name: str, arguments: str) -> str:
    try:
        given = json.loads(arguments)
        if name == "schema":
            return schema(database, str(given["tables"]))
        return query(database, str(given["sql"])) if name == "query" else "no such tool"
    except (ValueError, KeyError, TypeError):
        return "error: the arguments are wrong"


@ajet.workflow
def answer(question: str, database: str = "") -> str:
    """The query that answers a question; `database` is a file, by default the shop."""
    client = OpenAI()
    data = opened(database) if database else databases()[0]
    messages = [
        {"role": "system", "content": SYSTEM.format(tables=", ".join(data.tables()))},
        {"role": "user", "content": question},
    ]
    for _ in range(TURNS):
        reply = client.chat.completions.create(model="gpt-4o-mini", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = use(data, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


@ajet.workflow
def answer_at_once(question: str, database: str = "") -> str:
    """As `answer`, for a model too small for tools: all tables are in the prompt, and the first
    reply is the query.

    Values that the question has are repeated as a query has them: `'Dublin'` is two tokens,
    ` Dublin` another.
    """
    data = opened(database) if database else databases()[0]
    tables = schema(data, ", ".join(data.tables()))
    messages = [{"role": "system", "content": f"Answer with one SQL query. Tables: {tables}"}]
    values = ", ".join(f"'{text}'" for text in mentioned(data, question))
    messages.append(
        {"role": "user", "content": f"{question}\nValues: {values}" if values else question}
    )
    reply = OpenAI().chat.completions.create(model="gpt-4o-mini", messages=messages)
    return reply.choices[0].message.content or ""
