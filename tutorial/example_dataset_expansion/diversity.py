"""How many different forms come of the same tokens, with and without cells, from a writer that
reads them or doesn't.

python tutorial/example_dataset_expansion/diversity.py
"""

import tempfile
from pathlib import Path

from ajet_sdk.engines.budget import Budget
from ajet_tools.dataset.generate.cells import cells_of
from ajet_tools.dataset.generate.directory import Directory
from ajet_tools.dataset.generate.expand import Expansion
from ajet_tools.dataset.generate.runs import generate
from ajet_tools.dataset.generate.seeds import read_seeds
from ajet_tools.dataset.generate.settings import GenerationConfig
from ajet_tools.dataset.model.open import open_endpoint

HERE = Path(__file__).resolve().parent
TOKENS = 40_000


CELLS = [f"topic={HERE / 'topics.txt'}", "skill=sum,difference,product,remainder"]


def forms(writer: str, cells: list[str], seed: int) -> int:
    """Forms of the rows that a budget of tokens pays for."""
    config = GenerationConfig(5000, cells=cells_of(cells), validation=0, seed=seed)
    endpoint = open_endpoint(
        None, None, scripted=f"{HERE / 'writer.py'}:{writer}", budget=Budget(tokens=TOKENS)
    )
    with tempfile.TemporaryDirectory() as folder:
        source = Expansion(read_seeds(HERE / "problems.jsonl"), config)
        return generate(source, Directory(Path(folder)), endpoint).result.diversity().forms


def main() -> None:
    print(f"forms of {TOKENS:,} tokens, three seeds")
    for writer, what in (("reply", "writes of the cell"), ("stubborn", "ignores the cell")):
        for cells, how in (([], "no cells"), (CELLS, "64 cells")):
            print(
                f"{what:<20}{how:<10}", *(f"{forms(writer, cells, seed):>5}" for seed in range(3))
            )


if __name__ == "__main__":
    main()
