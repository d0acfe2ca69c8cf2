"""The plain LLM judge and a judge whose rubric is made of ten scored replies: which agrees better with 60 others?

By default on the program in `judge_model.py`. `--base-url URL --model NAME` takes a real model, with its key in
OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from judge_model import served

import ajet
from ajet_sdk.judges.evaluate import Evaluation, evaluate, labelled_row

HERE = Path(__file__).parent


async def compare(base_url: str, model: str) -> tuple[Evaluation, Evaluation, ajet.RubricJudge]:
    """The plain judge's evaluation, the rubric judge's, and the latter."""
    lines = (HERE / "held_out.jsonl").read_text().splitlines()
    labelled = [labelled_row(json.loads(line), place) for place, line in enumerate(lines)]
    plain = ajet.LlmJudge(model=model, base_url=base_url)
    rubric = ajet.RubricJudge(HERE / "scored.jsonl", model=model, base_url=base_url)
    return await evaluate(plain, labelled, repeats=1), await evaluate(rubric, labelled, repeats=1), rubric


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url")
    parser.add_argument("--model", default="judge")
    given = parser.parse_args()
    with served() as url:
        plain, rubric, judge = asyncio.run(compare(given.base_url or url, given.model))
    for name, found in (("plain LLM judge", plain), ("rubric from ten examples", rubric)):
        agreement, length = found.agreement, found.length_beyond_labels
        assert agreement is not None
        alone = "-" if length is None else f"{length:+.2f}"
        print(f"{name:26} agreement {agreement.value:.3f} [{agreement.low:.3f}, {agreement.high:.3f}]  "
              f"length alone {alone}  {found.tokens:.0f} tokens a verdict")  # fmt: skip
    assert judge.built is not None
    print(f"\nThe rubric (agreement {judge.built.agreement:.2f} on {judge.built.held_out} of the ten, kept apart):")
    print(judge.built.rubric)


if __name__ == "__main__":
    main()
