"""Files written for tests: a PDF by hand, a Word file and what a teacher says about them; an agent;
rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

AGENT = """
from openai import AsyncOpenAI
import ajet

client = AsyncOpenAI()

@ajet.workflow
async def solve(question: str) -> str:
    reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}])
    return reply.choices[0].message.content or ""

@ajet.judge
def exact(output: str, answer: str) -> float:
    return float(output.strip() == answer)
"""

PASSAGE = re.compile(r"<passage>\n(.*)\n</passage>", re.DOTALL)


def write_rows(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def write_pdf(
    path: Path,
    pages: Sequence[Sequence[str | tuple[int, str]]],
    titles: Mapping[int, str] | None = None,
) -> Path:
    """A PDF of pages of lines; a line with a number before it is of that size. `titles` are its
    outline, by page."""
    fonts = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
    objects, kids = [fonts, b"", b""], []
    for lines in pages:
        drawn, y = b"BT ", 800
        for line in lines:
            size, text = line if isinstance(line, tuple) else (11, line)
            spelt = re.sub(rb"([\\()])", rb"\\\1", text.encode("cp1252"))
            drawn += b"/F1 %d Tf 1 0 0 1 60 %d Tm (%s) Tj " % (size, y, spelt) if text else b""
            y -= 14
        drawn += b"ET"
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn))
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Resources << /Font << /F1 1 0 R"
            b" >> >> /Contents %d 0 R >>" % len(objects)
        )
        kids.append(len(objects))
    places = " ".join(f"{kid} 0 R" for kid in kids).encode()
    objects[1] = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(kids), places)
    objects[2] = b"<< /Type /Catalog /Pages 2 0 R >>"
    made, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    trailer = b"trailer << /Size %d /Root 3 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1,
        len(made),
    )
    path.write_bytes(
        made + b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1) + table + trailer
    )
    if titles:
        from pypdf import PdfWriter

        writer = PdfWriter(clone_from=path)
        for page, title in titles.items():
            writer.add_outline_item(title=title, page_number=page - 1)
        writer.write(path)
    return path


def lock(path: Path, password: str) -> Path:
    """The same PDF, encrypted; an empty password forbids printing, and nothing else."""
    from pypdf import PdfWriter

    writer = PdfWriter(clone_from=path)
    writer.encrypt(user_password=password, owner_password="owner", algorithm="AES-256")
    writer.write(path)
    return path


def write_docx(path: Path, parts: Sequence[tuple[str, Any]]) -> Path:
    """A Word file of `("h1", text)`, `("p", text)`, `("li", text)`, `("table", rows)`."""
    import docx

    document = docx.Document()
    for kind, content in parts:
        if kind.startswith("h"):
            document.add_heading(content, int(kind[1]))
        elif kind == "table":
            table = document.add_table(len(content), len(content[0]))
            for row, cells in zip(table.rows, content, strict=True):
                for cell, text in zip(row.cells, cells, strict=True):
                    cell.text = text
        else:
            document.add_paragraph(content, style="List Bullet" if kind == "li" else None)
    document.save(str(path))
    return path


def teach(body: Mapping[str, Any], most: int = 4) -> str:
    """What a good teacher replies: of the passage's sentences, a question each, answered by its
    last word."""
    asked = str(body["messages"][-1]["content"])
    found = PASSAGE.search(asked)
    if found is None:  # a grader is asked
        return json.dumps({"score": 1, "reason": "the excerpt says so"})
    lines = [line for line in found[1].splitlines() if not line.startswith(("#", "|"))]
    sentences = re.findall(r"[^.!?]{20,}[.!?]", " ".join(lines))
    rows = []
    for sentence in (one.strip() for one in sentences):
        *words, last = sentence.split()
        question = f"Complete what is known: {' '.join(words[:12])} ... which word comes last?"
        if question not in asked:
            rows.append({"question": question, "answer": last.strip("."), "quote": sentence})
    return json.dumps(rows[:most], ensure_ascii=False)
