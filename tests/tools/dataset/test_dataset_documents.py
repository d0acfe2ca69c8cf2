"""Documents of every kind as blocks and chunks, and what is said of those that cannot be read."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from ajet_sdk.errors import ConfigError, MissingExtra, TaskError
from ajet_tools.dataset.documents.chunks import chunks_of
from ajet_tools.dataset.documents.corpus import prepare
from ajet_tools.dataset.documents.read import (
    Unreadable,
    find_documents,
    read_document,
    read_documents,
)
from ajet_tools.dataset.generate.quotation import Searchable, long_enough
from tests.tools.dataset.written import lock, write_docx, write_pdf

PUMP = [
    "The Kestrel 4 pump moves 45 litres a minute at a pressure of three bar. It is",
    "started with the green lever, which is pulled down un-",
    "til it clicks.",
    "",
    "Filters are changed every 200 hours of use.",
]


def said(path: Path) -> str:
    with pytest.raises(TaskError) as failed:
        read_document(path)
    assert path.name in str(failed.value), "the message names the file"
    return str(failed.value)


def test_a_pdf_is_paragraphs_with_their_pages_and_the_titles_of_the_outline(tmp_path: Path) -> None:
    path = write_pdf(
        tmp_path / "pump.pdf",
        [PUMP, ["Grease the bearing with type B grease."]],
        {1: "Start", 2: "Upkeep"},
    )
    first, second, third = read_document(path).blocks
    assert first.text.endswith(
        "It is started with the green lever, which is pulled down until it clicks."
    )
    assert (second.page, second.heading) == (1, "Start")
    assert (third.text, third.page, third.heading) == (
        "Grease the bearing with type B grease.",
        2,
        "Upkeep",
    )


def test_running_heads_and_page_numbers_of_a_pdf_are_left_out(tmp_path: Path) -> None:
    pages = [
        ["Kestrel handbook", f"Rule {n} is that lamp {n} is lit.", f"- {n} -"] for n in range(1, 7)
    ]
    texts = [block.text for block in read_document(write_pdf(tmp_path / "a.pdf", pages)).blocks]
    assert texts == [f"Rule {n} is that lamp {n} is lit." for n in range(1, 7)]


def test_large_type_in_a_pdf_without_an_outline_is_a_heading(tmp_path: Path) -> None:
    page = [
        (18, "Pump handbook"),
        "",
        *PUMP,
        "",
        (14, "Upkeep"),
        "Grease the bearing with type B grease.",
    ]
    blocks = read_document(write_pdf(tmp_path / "a.pdf", [page])).blocks
    assert [block.text for block in blocks if block.kind == "heading"] == [
        "Pump handbook",
        "Upkeep",
    ]
    assert blocks[-1].heading == "Pump handbook > Upkeep"
    assert blocks[-1].text == "Grease the bearing with type B grease."


def test_a_docx_keeps_headings_lists_and_tables(tmp_path: Path) -> None:
    table = [["Model", "Flow"], ["K4", "45 | 50 l"], ["K5", "60 l"]]
    parts = [
        ("h1", "Pumps"),
        ("p", "All are green."),
        ("h2", "Sizes"),
        ("li", "small"),
        ("table", table),
        ("h1", "End"),
    ]
    blocks = read_document(write_docx(tmp_path / "a.docx", parts)).blocks
    assert [(b.kind, b.heading) for b in blocks] == [
        ("heading", "Pumps"), ("text", "Pumps"), ("heading", "Pumps > Sizes"), ("text", "Pumps > Sizes"),
        ("table", "Pumps > Sizes"), ("heading", "End"),
    ]  # fmt: skip
    assert blocks[3].text == "- small"
    assert blocks[4].text.splitlines()[2] == "| K4 | 45 \\| 50 l |"


def test_a_docx_has_all_that_a_reader_sees(tmp_path: Path) -> None:
    import docx
    from docx.opc.packuri import PackURI
    from docx.opc.part import Part
    from docx.oxml import parse_xml

    document = docx.Document()
    document.sections[0].header.paragraphs[0].text = "Kestrel handbook, valid from May"
    document.sections[0].footer.paragraphs[0].text = "Page 1 of 3"
    document.add_section().footer.is_linked_to_previous = False
    document.sections[1].footer.paragraphs[0].text = "Answers to safety@example.org"
    document.add_heading("Pumps", 1)
    outer = document.add_table(1, 2)
    outer.cell(0, 0).text = "The K4 has these parts:"
    inner = outer.cell(0, 1).add_table(2, 2)
    for cell, text in zip(
        (one for row in inner.rows for one in row.cells),
        ("Part", "Price", "lever", "9 euro"),
        strict=True,
    ):
        cell.text = text
    word = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'

    def run(text: str, kind: str = "t", mark: str = "") -> str:
        return f"<w:r><w:rPr>{mark}</w:rPr><w:{kind}>{text}</w:{kind}></w:r>"

    lines = f"<w:ins>{run('It was added. ')}</w:ins><w:del>{run('Gone.', 'delText')}</w:del>"
    lines += (
        run("Secret.", mark="<w:vanish/>")
        + f"<w:sdt><w:sdtContent>{run('Chosen.')}</w:sdtContent></w:sdt>"
    )
    box = (
        f"<w:r><w:pict><w:txbxContent><w:p>{run('In a box.')}</w:p></w:txbxContent></w:pict></w:r>"
    )
    control = (
        f"<w:sdt {word}><w:sdtContent><w:p>{run('In a control.')}</w:p></w:sdtContent></w:sdt>"
    )
    last = document.element.body[-1]
    for xml in (f"<w:p {word}>{lines}{box}</w:p>", control):
        last.addprevious(parse_xml(xml))
    for kind in ("footnote", "endnote"):
        notes = (
            f'<w:{kind} w:type="separator"'
            f' w:id="-1"><w:p><w:r><w:separator/></w:r></w:p></w:{kind}>'
        )
        notes += (
            f"<w:{kind}"
            f' w:id="1"><w:p><w:r><w:{kind}Ref/></w:r>{run(f" As {kind} 1 says.")}</w:p></w:{kind}>'
        )
        content = f"<w:{kind}s {word}>{notes}</w:{kind}s>".encode()
        types = f"application/vnd.openxmlformats-officedocument.wordprocessingml.{kind}s+xml"
        part = Part(PackURI(f"/word/{kind}s.xml"), types, content, document.part.package)
        document.part.relate_to(
            part, f"http://schemas.openxmlformats.org/officeDocument/2006/relationships/{kind}s"
        )
    document.save(str(tmp_path / "a.docx"))
    blocks = read_document(tmp_path / "a.docx").blocks
    assert [block.text for block in blocks] == [
        "Kestrel handbook, valid from May", "Pumps", "The K4 has these parts:",
        "| Part | Price |\n| --- | --- |\n| lever | 9 euro |", "It was added. Chosen.", "In a box.", "In a control.",
        "As footnote 1 says.", "As endnote 1 says.", "Answers to safety@example.org",
    ]  # fmt: skip
    assert {block.heading for block in blocks[1:]} == {"Pumps"}


def test_hidden_parts_of_a_page_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text(
        """<html><head><style>/* .seen {display: none} */ .gone, #gone {color: red; display:none}
        @media print { .seen {display: none} } a:hover::before {display: none} body {visibility: hidden}</style></head>
        <body><p>Seen.</p><p hidden>No 1</p><div style="color: red; Display : none !important"><p>No 2</p></div>
        <p class="gone">No 3</p><p id="gone">No 4</p><p class="seen">Also seen.</p><dialog>No 5</dialog>
        <p style="visibility:hidden">No 6</p><p style="display: block">Here <span hidden>no 7</span>too.</p>
        <details><summary>More</summary><p>Opened by a click.</p></details></body></html>"""
    )
    texts = [block.text for block in read_document(path).blocks]
    assert texts == ["Seen.", "Also seen.", "Here too.", "More", "Opened by a click."]


def test_html_is_what_a_reader_sees_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text(
        """<html><head><title>no</title><style>p {}</style></head><body><nav><a>Menu</a></nav><script>x()</script>
        <h1>Pumps <em>and</em> more</h1>Loose words.<!-- hidden --><div><p>One <b>bold</b>
        paragraph.</p><ul><li>first</li><li>second <p>inner</p></li></ul></div>
        <table><tr><th>Model</th><th>Flow</th></tr><tr><td>K4</td><td>45</td></tr></table><pre>a  =  1
b = 2</pre></body></html>"""
    )
    blocks = read_document(path).blocks
    assert [b.text for b in blocks] == [
        "Pumps and more", "Loose words.", "One bold paragraph.", "- first", "second", "inner",
        "| Model | Flow |\n| --- | --- |\n| K4 | 45 |", "a  =  1\nb = 2",
    ]  # fmt: skip
    assert {b.heading for b in blocks} == {"Pumps and more"}


def test_html_in_another_encoding_is_read_as_it_declares(tmp_path: Path) -> None:
    path = tmp_path / "a.htm"
    path.write_bytes(
        '<meta charset="iso-8859-1"><p>Ein schöner Tag für alle.</p>'.encode("latin-1")
    )
    assert read_document(path).blocks[0].text == "Ein schöner Tag für alle."
    path.write_bytes("<p>Ein schöner Tag.</p>".encode("latin-1"))
    assert "--with encoding" in said(path)


def test_markdown_is_cut_by_its_structure(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text(
        "---\ntitle: x\n---\nTop\n===\n\nA paragraph\nof two lines.\n<!-- gone\n\nstill -->\n##"
        " Part #\n```py\n# no heading\n\nx = 1\n```\n| a | b |\n|---|---|\n| 1 | 2 |\n\nLast, a | b"
        " is no table.\n"
    )
    assert [(b.kind, b.text, b.heading) for b in read_document(path).blocks] == [
        ("heading", "Top", "Top"),
        ("text", "A paragraph\nof two lines.", "Top"),
        ("heading", "Part", "Top > Part"),
        ("code", "```py\n# no heading\n\nx = 1\n```", "Top > Part"),
        ("table", "| a | b |\n|---|---|\n| 1 | 2 |", "Top > Part"),
        ("text", "Last, a | b is no table.", "Top > Part"),
    ]


def test_a_scanned_pdf_is_told_as_such(tmp_path: Path) -> None:
    assert (
        "2 pages have no text" in (text := said(write_pdf(tmp_path / "scan.pdf", [[], [""]])))
        and "OCR" in text
    )


def test_a_pdf_with_a_password_is_told_and_one_with_an_empty_one_is_read(tmp_path: Path) -> None:
    assert "is password-protected" in said(
        lock(write_pdf(tmp_path / "locked.pdf", [PUMP]), "secret")
    )
    assert (
        read_document(lock(write_pdf(tmp_path / "noprint.pdf", [PUMP]), ""))
        .blocks[1]
        .text.startswith("Filters")
    )


@pytest.mark.parametrize("cut", [0.1, 0.5])
def test_a_broken_pdf_is_told_and_its_parser_stays_quiet(
    tmp_path: Path, cut: float, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_pdf(tmp_path / "half.pdf", [PUMP] * 3)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    said(path)
    path.write_bytes(b"no pdf at all")
    assert "cannot be read as PDF" in said(path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["a.pdf", "a.docx", "a.html"])
def test_a_file_with_broken_bytes_is_read_or_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.pdf":
        write_pdf(path, [PUMP] * 2, {1: "Start"})
    elif name == "a.docx":
        write_docx(
            path, [("h1", "Pumps"), ("p", "All are green."), ("table", [["a", "b"], ["c", "d"]])]
        )
    else:
        path.write_text(
            "<h1>Pumps</h1><p>All are <b>green.</b></p><table><tr><td>K4</td></tr></table>"
        )
    sound, chance = path.read_bytes(), random.Random(4)
    for _ in range(60):
        broken = bytearray(sound)
        for _ in range(chance.choice([1, 3, 20])):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        path.write_bytes(broken)
        try:
            text = "\n".join(block.text for block in read_document(path).blocks)
        except TaskError as error:
            assert name in str(error) and len(str(error)) < 1000
        else:
            assert text.strip(), "a document without text is told"


@pytest.mark.parametrize(
    ("name", "module"), [("a.pdf", "pypdf"), ("a.docx", "docx"), ("a.html", "bs4")]
)
def test_a_reader_that_is_not_installed_is_named_with_the_line_that_installs_it(
    tmp_path: Path, name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text("x")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=r'pip install "ajet\[documents\]"'):
        read_document(tmp_path / name)


def test_other_bad_files_are_told(tmp_path: Path) -> None:
    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    assert "is empty" in said(file("a.txt", b""))
    assert "contains no text" in said(file("b.txt", b" \n\n "))
    assert "contains no text but headings" in said(file("c.md", b"# Only\n\n# Titles\n"))
    assert "line 2 is not UTF-8 (byte 0xe9)" in said(file("d.txt", b"one\ncaf\xe9\n"))
    assert "zero bytes" in said(file("e.txt", b"\x7fELF\x00\x00\x01"))
    assert "cannot be read as DOCX" in said(file("f.docx", b"PK\x03\x04 broken"))
    assert "password" in said(file("g.docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\x00" * 600))
    assert read_document(tmp_path / "d.txt", encoding="latin-1").blocks[0].text == "one\ncafé"
    assert (
        read_document(file("h.txt", "naïve text".encode("utf-16"))).blocks[0].text == "naïve text"
    )


def test_a_directory_is_read_at_any_depth_by_suffix(tmp_path: Path) -> None:
    for name in ("b/two.txt", "a.md", "b/.hidden.md", ".git/c.md", "b/code.py", "b/TWO.TXT"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"Text of {name} is here.")
    assert [name for name, _ in find_documents([tmp_path])] == ["a.md", "b/TWO.TXT", "b/two.txt"]
    assert len(find_documents([tmp_path, tmp_path / "a.md"])) == 3, (
        "a document named twice is there once"
    )
    with pytest.raises(ConfigError, match="not a supported document"):
        find_documents([tmp_path / "b" / "code.py"])
    with pytest.raises(ConfigError, match="there is no file or directory"):
        find_documents([tmp_path / "nowhere"])


def test_what_cannot_be_read_does_not_keep_the_others_from_being_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("This is fine and long enough.")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    read = [one for one, _, _ in read_documents([tmp_path])]
    assert [type(one) is Unreadable for one in read] == [False, True]


def test_chunks_keep_to_the_size_and_to_headings_and_are_all_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    parts = [
        f"# Part {n}\n\n" + " ".join(f"Sentence {n}.{i} is here to be read." for i in range(30))
        for n in range(4)
    ]
    path.write_text("\n\n".join(parts))
    chunks = list(chunks_of(read_document(path), 600))
    assert all(len(chunk.text) <= 600 for chunk in chunks)
    whole = " ".join(" ".join(chunk.text.split()) for chunk in chunks)
    assert all(
        f"Sentence {n}.{i} is here to be read." in whole for n in range(4) for i in range(30)
    )
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        parts_in = {line for line in chunk.text.splitlines() if line.startswith("# ")}
        assert len(parts_in) <= 1, "a heading begins a chunk"
        place = chunk.text.index("Sentence")
        assert chunk.block_at(place).heading == f"Part {chunk.text[place + 9]}"


def test_a_table_stays_whole_and_a_huge_one_keeps_its_head(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    rows = [f"| item {n} | {n * 3} |" for n in range(60)]
    path.write_text(
        "Before the table.\n\n| name | price |\n|---|---|\n"
        + "\n".join(rows)
        + "\n\nAfter the table."
    )
    assert any(
        all(row in chunk.text for row in rows) for chunk in chunks_of(read_document(path), 400)
    )
    cut = [chunk.text for chunk in chunks_of(read_document(path), 200) if "| item" in chunk.text]
    assert len(cut) > 1 and all("| name | price |\n|---|---|" in text for text in cut)
    assert all(sum(row in text.splitlines() for text in cut) == 1 for row in rows)


def test_a_text_of_10_mb_on_one_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("word " * 2_000_000)
    [one] = prepare([read_document(path)], size=5120).held
    assert one.document.characters == 10_000_000 - 1
    assert all(len(chunk.text) <= 5120 for chunk in one.chunks)


def test_copies_are_left_out_and_relatives_stay_on_one_side(tmp_path: Path) -> None:
    texts = [
        "\n\n".join(
            f"The matter {i} of volume {n} is told at some length, and in one sentence."
            for i in range(20)
        )
        for n in range(6)
    ]
    for n, text in enumerate(texts):
        (tmp_path / f"{n}.txt").write_text(text)
    (tmp_path / "copy.md").write_text(texts[0].replace("\n", "\r\n"))
    (tmp_path / "version 2.txt").write_text(
        texts[1] + "\n\nThis paragraph is new in the second version of the volume."
    )
    for seed in range(8):
        read = (one for one, _, _ in read_documents([tmp_path]))
        corpus = prepare(read, size=500, seed=seed, validation=0.3)
        assert corpus.copies == (("copy.md", "0.txt"),)
        side = {one.document.name: one.side for one in corpus.held}
        assert side["1.txt"] == side["version 2.txt"]
        assert {"train", "validation"} == set(side.values())
        chunks = [chunk.text for one in corpus.held for chunk in one.chunks]
        assert len(set(chunks)) == len(chunks), "what stands in two documents is there once"


def test_one_report_in_two_formats_stays_on_one_side(tmp_path: Path) -> None:
    def report(n: int) -> list[str]:
        return [
            f"In the year {1900 + n}{i} the mill number {n} ground {i} tons of wheat a week."
            for i in range(10)
        ]

    for n in range(4):
        write_pdf(tmp_path / f"{n}.pdf", [report(n)[:5], report(n)[5:]])
        items = "".join(f"<p>{line}</p>" for line in report(n))
        (tmp_path / f"{n}.html").write_text(f"<h1>Mill {n}</h1>{items}")
    for seed in range(6):
        held = prepare(
            (one for one, _, _ in read_documents([tmp_path])), size=500, seed=seed, validation=0.3
        ).held
        side = {one.document.name: one.side for one in held}
        assert all(side[f"{n}.pdf"] == side[f"{n}.html"] for n in range(4))
        assert set(side.values()) == {"train", "validation"}


def test_the_side_of_a_document_does_not_hang_on_its_name_or_order(tmp_path: Path) -> None:
    read = []
    for n in range(12):
        path = tmp_path / f"{n}.txt"
        path.write_text(f"Volume {n} says that {n} comes after {n - 1} and before {n + 1}.")
        read.append(read_document(path))
    one = {held.document.digest: held.side for held in prepare(read, size=500).held}
    other = {held.document.digest: held.side for held in prepare(reversed(read), size=500).held}
    assert one == other and set(one.values()) == {"train", "validation"}


def test_a_single_document_gives_no_validation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("It says one thing.")
    read = [read_document(tmp_path / "a.txt")]
    assert [held.side for held in prepare(read, size=500).held] == ["train"]
    with pytest.raises(ConfigError, match="document is on both sides"):
        prepare(read, size=500, validation=0.2)


@pytest.mark.parametrize(
    ("text", "quote"),
    [
        ("He said “no” — twice.", 'He said "no" - twice.'),
        ("It runs\n   for  thirty months.", "“It runs for thirty months.”"),
        ("an of\ufb01ce on two \ufb02oors", "an office on two floors"),
        ("a co\u00adoperative, 10\u00a0km away", "a cooperative, 10 km away"),
        ("the rest… is silence", "...rest... is"),
        ("Zoe\u0308 came", "Zoë came"),
    ],
)
def test_a_quotation_is_found_whatever_its_dress(tmp_path: Path, text: str, quote: str) -> None:
    (tmp_path / "a.txt").write_text(f"Before. {text} After.", encoding="utf-8")
    source = read_document(tmp_path / "a.txt").blocks[0].text
    span = Searchable(source).find(quote)
    assert span is not None and span.text == source[span.start : span.end]
    assert span.text.strip("“”")[:3] in source[8:16]


@pytest.mark.parametrize(
    "quote", ["It runs for forty months.", "it runs for thirty months", "x2 is large", "", '""']
)
def test_another_quotation_is_not_found(quote: str) -> None:
    assert Searchable("It runs for thirty months. x² is large.").find(quote) is None


def test_a_word_is_no_evidence() -> None:
    assert not long_enough("3 bar") and long_enough("| cover | 12 Nm |")
    assert not long_enough("thirty") and long_enough("for thirty months")
    assert not long_enough("三十个") and long_enough("保修期为三十个月")
