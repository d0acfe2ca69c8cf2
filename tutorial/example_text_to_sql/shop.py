"""A shop of ten tables, made from a seed: `shop-0.duckdb` for the agent, `shop-1` and `shop-2` for
the judge alone.

All have the same customers, products and places, and other figures: a query that is right is right
in each, a constant that was looked up in one is wrong in the others. Ages differ within a city,
prices and salaries everywhere, so that "the three oldest" has one answer.
"""

from __future__ import annotations

import os
import random
import threading
from functools import cache
from pathlib import Path

from sql_database import Database

FOLDER = Path(__file__).resolve().parent / "databases"
SEEDS = 3
CITIES = "Paris London Rome Berlin Madrid Vienna Dublin Athens Oslo Lisbon Prague Warsaw".split()  # noqa: SIM905
_FIRST = (
    "Ada Ben Carl Dora Eva Finn Gus Hana Ivan Jana Karl Lena Max Nora Omar Pia Quinn Rosa Sam Tess"
    " Uma Vera Will Yara Zoe Adam Bella Chloe Dean Emil"
)
FIRST = _FIRST.split()
LAST = "Adler Brown Costa Diaz Engel Fischer Gray Hill Ito Jones Khan Lopez Meyer Novak Olsen Price".split()  # noqa: SIM905
CATEGORIES = "lamps chairs books games shoes phones desks coats clocks".split()  # noqa: SIM905
ADJECTIVES = "red blue green black white small large old new soft round tall light heavy".split()  # noqa: SIM905
COUNTRIES = "Italy France Spain Poland Norway Greece".split()  # noqa: SIM905
ROLES = "clerk driver manager buyer cleaner".split()  # noqa: SIM905
STATUSES = "paid shipped returned cancelled".split()  # noqa: SIM905
METHODS = "card cash transfer voucher".split()  # noqa: SIM905
YEARS = range(2016, 2026)
TABLES = {
    "stores": "id integer, city text, opened integer",
    "employees": "id integer, name text, store_id integer, role text, salary integer",
    "customers": "id integer, name text, city text, age integer",
    "suppliers": "id integer, name text, country text",
    "products": "id integer, name text, category text, price double, supplier_id integer",
    "stock": "store_id integer, product_id integer, quantity integer",
    "orders": "id integer, customer_id integer, store_id integer, year integer, status text",
    "items": "order_id integer, product_id integer, quantity integer",
    "payments": "order_id integer, method text, amount double",
    "reviews": "product_id integer, customer_id integer, stars integer",
}
_BUILDING = threading.Lock()  # the episodes of a run are threads
_NAMES = random.Random(5)
PEOPLE = _NAMES.sample([f"{a} {b}" for a in FIRST for b in LAST], 300)
CUSTOMERS, EMPLOYEES = PEOPLE[:180], PEOPLE[180:]
PRODUCTS = [
    (f"{adjective} {category[:-1]}", category)
    for category in CATEGORIES
    for adjective in _NAMES.sample(ADJECTIVES, 10)
]


def rows_of(seed: int) -> dict[str, list[tuple[object, ...]]]:
    draw = random.Random(seed)
    prices = draw.sample(range(500, 30_000, 25), len(PRODUCTS))
    salaries = draw.sample(range(1_800, 6_000, 10), len(EMPLOYEES))
    ages = {city: draw.sample(range(18, 81), 15) for city in CITIES}
    made: dict[str, list[tuple[object, ...]]] = {
        "stores": [(n + 1, city, draw.choice(YEARS)) for n, city in enumerate(CITIES)],
        "employees": [
            (n + 1, name, n % len(CITIES) + 1, draw.choice(ROLES), salaries[n])
            for n, name in enumerate(EMPLOYEES)
        ],
        "customers": [
            (n + 1, name, CITIES[n // 15], ages[CITIES[n // 15]][n % 15])
            for n, name in enumerate(CUSTOMERS)
        ],
        "suppliers": [(n + 1, f"{LAST[n]} Ltd", COUNTRIES[n % len(COUNTRIES)]) for n in range(12)],
        "products": [
            (n + 1, name, category, prices[n] / 100, draw.randint(1, 12))
            for n, (name, category) in enumerate(PRODUCTS)
        ],
        "orders": [
            (
                n,
                draw.randint(1, 180),
                draw.randint(1, 12),
                draw.choice(YEARS),
                draw.choice(STATUSES),
            )
            for n in range(1, 1501)
        ],
        "reviews": [
            (draw.randint(1, 90), draw.randint(1, 180), draw.randint(1, 5)) for _ in range(900)
        ],
    }
    made["stock"] = [
        (store, product, draw.randint(0, 40)) for store in range(1, 13) for product in range(1, 91)
    ]
    made["items"] = [
        (order, product, draw.randint(1, 9))
        for order in range(1, 1501)
        for product in draw.sample(range(1, 91), draw.randint(1, 3))
    ]
    made["payments"] = [
        (order, draw.choice(METHODS), draw.randrange(500, 90_000) / 100) for order in range(1, 1501)
    ]
    return made


def build(path: Path, seed: int) -> None:
    """Write the database of a seed; it appears whole."""
    import duckdb

    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.duckdb")
    with duckdb.connect(str(draft)) as database:
        for table, rows in rows_of(seed).items():
            database.execute(f"CREATE TABLE {table} ({TABLES[table]})")
            values = ", ".join(f"({', '.join(map(literal, row))})" for row in rows)
            database.execute(f"INSERT INTO {table} VALUES {values}")
    draft.replace(path)


def literal(value: object) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


@cache
def databases() -> list[Database]:
    """The agent's, then the judge's own; made where they are not there."""
    found = []
    for seed in range(SEEDS):
        path = FOLDER / f"shop-{seed}.duckdb"
        with _BUILDING:
            if not path.exists():
                build(path, seed)
        found.append(Database(path))
    return found


if __name__ == "__main__":
    for one in databases():
        print(
            one.path.name,
            {table: one.query(f"select count(*) from {table}")[0][0] for table in one.tables()},
        )
