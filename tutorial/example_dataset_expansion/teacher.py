"""A scripted teacher: stands in for a large model, so that this runs anywhere, and to the same
bytes.

It does what `ajet dataset expand` asks a model for: it writes new tasks like the examples, and
works tasks out. It is no more reliable than a model: every tenth answer is wrong, one task in
twelve repeats an example of the prompt, and one reply in fifty is prose. So verification and
deduplication have something to do.
"""

import json
import random
import re

WRONG, REPEATED, PROSE = 0.10, 0.08, 0.02
SUM = re.compile(r"(\d+)\s*([-+*])\s*(\d+)")
EXAMPLE = re.compile(r'^\{"question": .*\}$', re.MULTILINE)
HOW_MANY = re.compile(r"JSON array of (\d+)")


def reply(ask):
    """The replies to one request. What is drawn, is drawn by its words and its seed: equal
    requests, equal replies."""
    return replies(ask, value)


def biased(ask):
    """The same teacher with an error of its own: it believes that every product is ten more,
    whenever it is asked."""
    return replies(
        ask, lambda a, operator, b, chance: value(a, operator, b, chance) + 10 * (operator == "*")
    )


def varied(ask):
    """The same teacher without regard to what its pupil can do: its numbers have one to four
    digits."""
    return replies(ask, value, task_of_any_length)


def replies(ask, value, write=None):
    prompt = ask.body["messages"][-1]["content"]
    chance = random.Random(f"{ask.sampling.seed} {prompt}")
    return [said(prompt, chance, value, write or task) for _ in range(ask.sampling.n)]


def said(prompt, chance, value, write):
    if chance.random() < PROSE:
        return "Sure! Here is what you asked for."
    wanted = HOW_MANY.search(prompt)
    if wanted is None:
        return worked_out(prompt, chance, value)
    examples = [json.loads(line) for line in EXAMPLE.findall(prompt)]
    return json.dumps([write(examples, chance, value) for _ in range(int(wanted[1]))])


def task(examples, chance, value):
    """A task in the style of the examples: one of their operators, numbers as long as theirs."""
    example = chance.choice(examples)
    if chance.random() < REPEATED:
        return example
    a, operator, b = SUM.search(example["question"]).groups()
    a, b = (chance.randint(10 ** (len(number) - 1), 10 ** len(number) - 1) for number in (a, b))
    return {"question": f"What is {a}{operator}{b}?", "answer": str(value(a, operator, b, chance))}


def task_of_any_length(examples, chance, value):
    operator, length = SUM.search(chance.choice(examples)["question"])[2], chance.randint(1, 4)
    a, b = (chance.randint(10 ** (length - 1), 10**length - 1) for _ in range(2))
    return {"question": f"What is {a}{operator}{b}?", "answer": str(value(a, operator, b, chance))}


def worked_out(prompt, chance, value):
    """An independent answer to the task that ends the prompt."""
    a, operator, b = SUM.findall(prompt)[-1]
    answer = value(int(a), operator, int(b), chance)
    return f"{a} {operator} {b} is {answer}.\nANSWER: {answer}"


def value(a, operator, b, chance):
    right = {"+": a + b, "-": a - b, "*": a * b}[operator]
    return right + chance.choice([-10, -1, 1, 10]) if chance.random() < WRONG else right
