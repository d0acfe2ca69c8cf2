"""A scripted writer of word problems, which can vary: 16 topics, 4 skills, 5 ways to ask.

As models do, it has favourites: where a prompt does not say what the tasks are about, two of three
are about the same two topics and ask for a sum. `reply` writes of the cell that the prompt names,
`stubborn` never reads it. Every tenth answer is wrong.
"""

import json
import random
import re

WRONG, FAVOURITE = 0.10, 0.67
TOPICS = {
    "market": "a stall has {a} crates of apples and {b} crates of pears",
    "kitchen": "a cook fills {a} jars with jam and {b} jars with honey",
    "railway": "a train carries {a} people in front and {b} people behind",
    "library": "a shelf holds {a} novels and {b} atlases",
    "farm": "a farmer counts {a} sheep on the hill and {b} goats in the barn",
    "school": "a class draws {a} maps and {b} posters",
    "harbour": "a crane unloads {a} containers by day and {b} containers by night",
    "bakery": "an oven bakes {a} rolls early and {b} loaves late",
    "garden": "a gardener plants {a} tulips along the path and {b} roses by the wall",
    "theatre": "a theatre sells {a} tickets in advance and {b} tickets at the door",
    "workshop": "a carpenter cuts {a} boards of oak and {b} boards of pine",
    "hospital": "a ward orders {a} bandages and {b} syringes",
    "museum": "a museum shows {a} coins and {b} masks",
    "post office": "a clerk sorts {a} letters and {b} parcels",
    "observatory": "a telescope records {a} stars before midnight and {b} stars after it",
    "sports club": "a club buys {a} balls and {b} nets",
}
SKILLS = {
    "sum": (
        """How many is that altogether? | What do the two come to altogether? | Give the number altogether.
        | Altogether, how many are there? | Say how many there are altogether."""
    ),
    "difference": (
        """By how many do the two differ? | How far do the two differ? | Give the number by which they differ.
        | The two numbers differ: by how much? | Say by how many they differ."""
    ),
    "product": (
        """How many pairs, one of each, can be picked? | In how many ways can one of each be picked?
        | Give the number of pairs that can be picked. | One of each is picked: how many pairs can there be?
        | Say how many different pairs can be picked."""
    ),
    "remainder": (
        """Put in rows of ten, how many of all are left over? | All go into tens; what is left over?
        | Give what is left over when all are packed by ten. | Packed by ten, how many are left over?
        | Say how many are left over after all full tens."""
    ),
}
SIGNS = {"altogether": "sum", "differ": "difference", "picked": "product", "left over": "remainder"}
HOW_MANY = re.compile(r"JSON array of (\d+)")


def reply(ask):
    """The replies to one request: equal requests, equal replies."""
    return answered(
        ask,
        lambda prompt: dict(
            re.findall(r"^  - metadata\.(topic|skill): (.+)$", prompt, re.MULTILINE)
        ),
    )


def stubborn(ask):
    """The same writer, which does as it likes."""
    return answered(ask, lambda prompt: {})


def answered(ask, read_cell):
    prompt = ask.body["messages"][-1]["content"]
    chance = random.Random(f"{ask.sampling.seed} {prompt}")
    wanted = HOW_MANY.search(prompt)
    if wanted is None:
        return [f"ANSWER: {value(prompt, chance)}" for _ in range(ask.sampling.n)]
    cell = read_cell(prompt)
    used = set()
    return json.dumps([task(cell, chance, used) for _ in range(int(wanted[1]))])


def task(cell, chance, used):
    """A task of the cell; of a favourite topic and skill where that names none. One reply uses no
    words twice."""
    favourite = (
        chance.choice(["market", "kitchen"])
        if chance.random() < FAVOURITE
        else chance.choice(list(TOPICS))
    )
    topic = cell.get("topic", favourite)
    skill = cell.get("skill", "sum" if chance.random() < FAVOURITE else chance.choice(list(SKILLS)))
    scene = TOPICS[topic].format(a=chance.randint(12, 99), b=chance.randint(12, 99))
    ways = re.split(r"\s*\|\s*", SKILLS[skill])
    asked = chance.choice([way for way in ways if (topic, way) not in used] or ways)
    used.add((topic, asked))
    question = f"{scene[0].upper()}{scene[1:]}. {asked}"
    return {
        "question": question,
        "answer": str(value(question, chance)),
        "metadata": {"topic": topic, "skill": skill},
    }


def value(text, chance):
    """The answer to the last task in a text, or one beside it."""
    a, b = map(int, re.findall(r"\d+", text)[-2:])
    place = {text.lower().rfind(sign): skill for sign, skill in SIGNS.items()}
    skill = place[max(place)]
    right = {"sum": a + b, "difference": abs(a - b), "product": a * b, "remainder": (a + b) % 10}[
        skill
    ]
    return right + chance.choice([-1, 1]) if chance.random() < WRONG else right
