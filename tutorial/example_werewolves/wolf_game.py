"""Werewolves: for nine, three werewolves against a village with a seer, a witch, a hunter and a
guard; or for six.

The game knows no model: `ask(player, text)` says what a player answers. `python wolf_game.py`
writes train.jsonl and val.jsonl: a task is a seed, which decides who has which role and in what
order they speak.
"""

import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

NINE = ("werewolf",) * 3 + ("villager",) * 2 + ("seer", "witch", "hunter", "guard")
SIX = ("werewolf",) * 2 + ("villager",) * 2 + ("seer", "guard")
DAYS = 8
Ask = Callable[[int, str], Awaitable[str]]


def side(role: str) -> str:
    return "werewolf" if role == "werewolf" else "village"


@dataclass
class Game:
    """One game: who is who, who lives, and what each player has been told since it was last
    asked."""

    seed: int
    deck: tuple[str, ...] = NINE
    brief: bool = False
    """Players see only their choices, not what was said and who died: for a model that reads
    little."""
    kinds: bool = False
    """Players see only their role and name a kind of player, such as `ally`; which of that kind is
    drawn."""
    roles: dict[int, str] = field(init=False)
    alive: list[int] = field(init=False)
    news: dict[int, list[str]] = field(init=False)
    known: dict[int, dict[int, str]] = field(init=False)
    """What each player knows of another: `ally` or `wolf`."""
    named: set[int] = field(default_factory=set)
    """Whom somebody voted for who claimed to be the seer."""
    potions: set[str] = field(default_factory=lambda: {"save", "poison"})
    guarded: int = 0
    nonsense: int = 0
    """Answers that were no choice; they count as `none`."""
    choices: dict[int, list[float]] = field(init=False)
    """What each answer of a player did at once: 1 against the other side, 0 against its own or no
    choice, else 0.5."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.roles = dict(enumerate(self.draw.sample(self.deck, len(self.deck)), 1))
        self.alive = [*self.roles]
        self.news = {player: [] for player in self.roles}
        self.choices = {player: [] for player in self.roles}
        pack = self.living("werewolf")
        self.known = {
            one: dict.fromkeys(pack if one in pack else [one], "ally") for one in self.roles
        }

    def living(self, role: str) -> list[int]:
        return [player for player in self.alive if self.roles[player] == role]

    def winner(self) -> str | None:
        wolves = len(self.living("werewolf"))
        if not wolves:
            return "village"
        return "werewolf" if 2 * wolves > len(self.alive) else None

    def introduction(self, player: int) -> str:
        """What a player knows of itself; werewolves know each other."""
        if self.kinds:
            return self.roles[player]
        mates = (
            [p for p in self.living("werewolf") if p != player]
            if self.roles[player] == "werewolf"
            else []
        )
        return f"{player} {self.roles[player]}" + "".join(f" {mate}" for mate in mates)

    async def choose(
        self, ask: Ask, player: int, what: str, options: list[str], claim: str = ""
    ) -> str:
        """The player's choice, which may have a claim behind it; `none` where it says something
        else."""
        offered: dict[str, list[str]] = {}
        for option in options if self.kinds else ():
            kind = self.kind(player, option, "other") if option.isdigit() else option
            offered.setdefault(kind, []).append(option)
        own = (
            [" ".join([what, *sorted(offered)])]
            if self.kinds
            else self.listed(player, what, options)
        )
        lines = [*(() if self.brief or self.kinds else self.news[player]), *own]
        self.news[player] = []
        answer = (await ask(player, "\n".join(lines))).strip()
        choice = said = answer.removesuffix(f" {claim}" if claim else "")
        if said in offered:
            choice = self.draw.choice(offered[said])
            answer = choice + answer.removeprefix(said)
        if choice not in options:
            self.nonsense += answer != "none"
            self.choices[player].append(0.0)
            return "none"
        against = what in ("kill", "vote", "shoot") and choice != "none"
        self.choices[player].append(float(self.opposed(player, int(choice))) if against else 0.5)
        return answer

    def opposed(self, one: int, other: int) -> bool:
        """Whether two players are on different sides."""
        return side(self.roles[one]) != side(self.roles[other])

    def kind(self, player: int, option: str, unknown: str) -> str:
        """What a player knows of another: `ally`, `wolf` or `named`."""
        number = int(option) if option.isdigit() else 0
        return self.known[player].get(number, "named" if number in self.named else unknown)

    def listed(self, player: int, what: str, options: list[str]) -> list[str]:
        """The choices as the player sees them: those it knows something of in lines of their own,
        the others last."""
        lines: dict[str, list[str]] = {"ally": [], "wolf": [], "named": [], what: []}
        for option in options:
            lines[self.kind(player, option, what)].append(option)
        return [" ".join([name, *found]) for name, found in lines.items() if found or name == what]

    async def play(self, ask: Ask) -> str:
        """The side that wins; `nobody`, where it takes too many days."""
        for day in range(1, DAYS + 1):
            await self.night(ask, day)
            if self.winner() is None:
                await self.day(ask)
            if (won := self.winner()) is not None:
                return won
        return "nobody"

    async def night(self, ask: Ask, day: int) -> None:
        numbers = [str(player) for player in self.alive]
        wolves = self.living("werewolf")
        prey = await self.choose(ask, wolves[day % len(wolves)], "kill", numbers)
        dying = {int(prey)} if prey != "none" else set[int]()
        for guard in self.living("guard"):
            choice = await self.choose(
                ask, guard, "guard", [n for n in numbers if int(n) != self.guarded]
            )
            self.guarded = int(choice) if choice != "none" else 0
        for seer in self.living("seer"):
            choice = await self.choose(ask, seer, "check", [n for n in numbers if int(n) != seer])
            if choice != "none":
                found = side(self.roles[int(choice)])
                self.known[seer][int(choice)] = "wolf" if found == "werewolf" else "ally"
                self.news[seer].append(f"{choice} is {found}")
        for witch in self.living("witch"):
            if not self.potions:
                continue
            options = ["none"]
            if dying and "save" in self.potions:
                self.news[witch].append(f"{prey} dies")
                options.append("save")
            options += [n for n in numbers if int(n) != witch] if "poison" in self.potions else []
            choice = await self.choose(ask, witch, "potion", options)
            if choice == "save":
                self.potions.discard("save")
                dying.clear()
            elif choice != "none":
                self.potions.discard("poison")
                dying.add(int(choice))
        if prey != "none" and int(prey) == self.guarded:
            dying.discard(self.guarded)
        for player in sorted(dying):
            if player in self.alive:  # a hunter may have been quicker
                await self.die(ask, player)

    async def day(self, ask: Ask) -> None:
        """Everybody votes in turn, heard by all; `3 seer` is a vote for 3 and a claim to be the
        seer, true or not."""
        votes: Counter[int] = Counter()
        for player in self.draw.sample(self.alive, len(self.alive)):
            others = [str(p) for p in self.alive if p != player]
            choice = await self.choose(ask, player, "vote", others, claim="seer")
            if choice == "none":
                continue
            number, *claim = choice.split()
            votes[int(number)] += 1
            self.named |= {int(number)} if claim else set()
            for listener in self.alive:
                if listener != player:
                    self.news[listener].append(f"{player}: {choice}")
        most = votes.most_common(2)
        if most and (len(most) == 1 or most[0][1] > most[1][1]):
            await self.die(ask, most[0][0])

    async def die(self, ask: Ask, player: int) -> None:
        self.alive.remove(player)
        for other in self.alive:
            self.news[other].append(f"{player} is dead")
        if self.roles[player] == "hunter" and self.winner() is None:
            shot = await self.choose(ask, player, "shoot", [str(other) for other in self.alive])
            if shot != "none":
                await self.die(ask, int(shot))


def main() -> None:
    for name, seeds in (("train", range(512)), ("val", range(10_000, 10_128))):
        text = "".join(
            json.dumps({"question": f"Game {seed}.", "seed": seed}) + "\n" for seed in seeds
        )
        Path(__file__).with_name(f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
