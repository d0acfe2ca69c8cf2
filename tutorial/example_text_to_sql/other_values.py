"""Demonstrations about places and goods that the shop lacks.

    python other_values.py expert.jsonl > demonstrations.jsonl

The recorded conversations have eight cities, which can be learnt by heart: a model then writes a city that it knows for
one that it does not. To copy a name is more than to repeat tokens, too: SmolLM2 reads " Berlin" as one token, and
writes it after a quotation mark as "Ber" and "lin". Each conversation is written twice, with another place or product
each time; a conversation about neither is written twice as it was recorded.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

_PLACES = """
Aachen Aarhus Aberdeen Accra Amsterdam Ankara Antwerp Atlanta Austin Baghdad Baku Bangkok Barcelona Basel Bath
Beirut Belfast Belgrade Bergen Bern Birmingham Bogota Bologna Bonn Bordeaux Boston Bremen Brest Brighton Bristol
Bruges Brussels Bucharest Budapest Buffalo Cairo Calgary Cambridge Canberra Cardiff Chester Chicago Cologne
Copenhagen Cordoba Cork Dakar Dallas Damascus Delft Delhi Denver Derby Detroit Dover Dresden Dubai Dundee Durban
Durham Edinburgh Essen Exeter Florence Frankfurt Galway Gdansk Geneva Genoa Ghent Glasgow Graz Grenoble Haifa
Hamburg Hanoi Hanover Harlem Havana Helsinki Houston Hull Istanbul Jakarta Kabul Karachi Kiel Kiev Krakow Kyoto
Lagos Lahore Leeds Leiden Leipzig Leon Liege Lille Lima Limerick Linz Liverpool Ljubljana Lyon Madison Malaga Malmo
Manchester Manila Marseille Melbourne Memphis Miami Milan Minsk Monaco Montreal Moscow Mumbai Munich Munster Nairobi
Nantes Naples Newcastle Nice Norwich Odessa Orlando Osaka Ottawa Oxford Palermo Perth Phoenix Pisa Plymouth Portland
Porto Quebec Reims Richmond Riga Rotterdam Rouen Salem Salzburg Sarajevo Seattle Seoul Seville Sheffield Siena
Singapore Skopje Sofia Split Stockholm Strasbourg Stuttgart Sydney Tallinn Tampa Tampere Tartu Tehran Tokyo Toledo
Toronto Toulouse Trieste Tripoli Tunis Turin Utrecht Valencia Vancouver Venice Verona Vilnius Waterford Winchester
York Zagreb Zurich
"""
_THINGS = """
apple arrow badge bag ball band basket bath bed bell belt bike bird blanket board boat bolt boot bottle bowl
bracelet brick bridge broom bucket button cabinet cable cake camera candle cap car card carpet cart chain cup
curtain cushion dish doll door dress drill drum engine fan fence flag flower fork frame garden glove guitar hammer
hat heater helmet hook hose jacket jar kettle key kite knob ladder lantern lid lock magnet map marker mat mirror mug
nail necklace needle net oven paddle pan pen pencil piano picture pillow pipe plant plate pot printer pump purse
rack radio razor ring robot rod rope ruler saddle sail saw scarf screen seat sensor shelter shirt shovel skirt sock
sofa spoon stamp statue stool stove string table tank tent tie tile tool towel toy train tray tube vase wallet wheel
window wire
"""
PLACES, THINGS = _PLACES.split(), _THINGS.split()
VALUE = re.compile(r"(\w+\.)?(\w+) = '([^']*)'")


def another(table: str, column: str, value: str, draw: random.Random) -> str:
    """Another value of the same form: `Vienna` → `Kyoto`, `lamps` → `kettles`, `red lamp` → `red kettle`."""
    if column == "city":
        return draw.choice(PLACES)
    if column == "category":
        return f"{draw.choice(THINGS)}s"
    return f"{value.split()[0]} {draw.choice(THINGS)}" if table == "products." else value


def with_other_values(question: str, query: str, draw: random.Random) -> tuple[str, str]:
    for table, column, value in VALUE.findall(query):
        new = another(table, column, value, draw)
        question = re.sub(rf"\b{re.escape(value)}\b", new, question)
        query = query.replace(f"'{value}'", f"'{new}'")
    return question, query


def about_others(row: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    system, asked, replied = row["messages"]
    question, query = with_other_values(asked["content"], replied["content"], draw)
    return {**row, "messages": [system, {**asked, "content": question}, {**replied, "content": query}]}


if __name__ == "__main__":
    draw = random.Random(0)
    recorded = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    rows = [about_others(row, draw) for row in recorded * 2]
    draw.shuffle(rows)
    for row in rows:
        print(json.dumps(row, ensure_ascii=False))
