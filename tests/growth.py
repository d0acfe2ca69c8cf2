"""What grew: Python tokens by room against an earlier commit, and how densely the code is written.

    python -m tests.growth [COMMIT]

Printed by CI, which refuses nothing for it. COMMIT: by default the 20th before this one, or the
first that is here. A token is a name, operator, number or string; comments are not counted.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("ajet", "ajet_sdk", "ajet_tools")
ROOMS = (*PRODUCT, "tutorial", "tests")
LONG = 400
"""Lines that a reader takes in in a few minutes."""
COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def sources(commit: str) -> dict[str, str]:
    """The text of each Python file of a commit."""
    present = git("ls-tree", "--name-only", commit).decode().split()
    rooms = [room for room in ROOMS if room in present]
    archived = io.BytesIO(git("archive", commit, "--", *rooms))
    texts: dict[str, str] = {}
    with tarfile.open(fileobj=archived) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None and member.name.endswith(".py"):
                texts[member.name] = file.read().decode()
    return texts


def token_count(text: str) -> int:
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type in COUNTED for token in found)


def tokens_by_room(texts: dict[str, str]) -> Counter[str]:
    """Tokens of each room, such as `ajet_sdk/trace`."""
    counts: Counter[str] = Counter()
    for path, text in texts.items():
        room, *inner = Path(path).parts
        depth = 1 if room.startswith("ajet_") else 0
        counts["/".join([room, *inner[:-1][:depth]])] += token_count(text)
    return counts


def product_total(counts: Counter[str]) -> int:
    return sum(count for room, count in counts.items() if room.split("/")[0] in PRODUCT)


def style(texts: dict[str, str]) -> dict[str, float]:
    """Counts of packed code, each in a thousand lines that are not blank."""
    counts: Counter[str] = Counter()
    lines = 0
    for text in texts.values():
        filled = [line for line in text.splitlines() if line.strip()]
        lines += len(filled)
        counts["over 100 columns"] += sum(len(line) > 100 for line in filled)
        counts["comments"] += sum("# " in line for line in filled)
        for node in ast.walk(ast.parse(text)):
            counts["conditional expressions"] += isinstance(node, ast.IfExp)
            counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
            counts["tuple assignments"] += (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Tuple)
                and isinstance(node.value, ast.Tuple)
            )
    return {name: 1000 * count / lines for name, count in counts.items()}


def main(commit: str | None = None) -> None:
    before = commit or git("rev-list", "--first-parent", "-n", "21", "HEAD").decode().split()[-1]
    texts = sources("HEAD")
    now = tokens_by_room(texts)
    then = tokens_by_room(sources(before))
    dated = git("log", "-1", "--format=%h, %cs", before).decode().strip()
    print(f"Python tokens, and what grew since {dated}")
    for room in sorted(now | then):
        if now[room] != then[room]:
            print(f"  {room:28} {now[room]:9,} {now[room] - then[room]:+8,}")
    total = product_total(now)
    product = {path: text for path, text in texts.items() if path.split("/")[0] in PRODUCT}
    lines = sum(bool(line.strip()) for text in product.values() for line in text.splitlines())
    print(f"{'product':30} {total:9,} {total - product_total(then):+8,}")
    print(f"  {total / lines:.2f} tokens a line; in a thousand lines:")
    for name, count in style(product).items():
        print(f"    {name:26} {count:5.1f}")
    for path, text in sorted(product.items(), key=lambda item: -item[1].count("\n")):
        if text.count("\n") > LONG:
            print(f"  over {LONG} lines: {path} {text.count(chr(10)):,}")


if __name__ == "__main__":
    main(*sys.argv[1:])
