"""Dates as people write them. `python dates.py` writes train.jsonl and val.jsonl, which share no
date."""

import datetime
import json
import random
from pathlib import Path

MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip


def write(day: datetime.date, style: int) -> str:
    """In words, with dots and the day first, or with dots and two digits of the year."""
    return (
        f"{day.day} {MONTHS[day.month - 1]} {day.year}",
        f"{day.day}.{day.month}.{day.year}",
        f"{day.day}.{day.month}.{day.year % 100:02}",
    )[style]


def main() -> None:
    draw = random.Random(0)
    days = draw.sample(
        [datetime.date(2001, 1, 1) + datetime.timedelta(i) for i in range(9000)], 120
    )
    rows = [
        {"question": f"Which day is {write(day, i % 3)}?", "answer": day.isoformat()}
        for i, day in enumerate(days)
    ]
    for name, part in (("train", rows[:60]), ("val", rows[60:])):
        Path(__file__).with_name(f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in part)
        )


if __name__ == "__main__":
    main()
