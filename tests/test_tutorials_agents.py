"""The tutorials of many agents and of one agent in several frameworks: their programs run end to
end."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.protocols import Ask
from ajet_sdk.run import run, train
from ajet_sdk.types import Episode, Reward

pytestmark = pytest.mark.usefixtures("audited")

TUTORIALS = Path(__file__).parents[1] / "tutorial"
MATH, WOLVES, COUNTDOWN = (
    TUTORIALS / f"example_{name}" for name in ("math_agent", "werewolves", "countdown")
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of these folders by their own names, whatever others are called `agent`."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr(sys, "path", [*map(str, (MATH, WOLVES, COUNTDOWN)), *sys.path])
    for name in [
        name for name, module in sys.modules.items() if name == "agent" or name.startswith("agent_")
    ]:
        monkeypatch.delitem(sys.modules, name)


def load(path: Path) -> ModuleType:
    return importlib.import_module(path.stem)


def scripted(tmp_path: Path, reply: Any, config: Path, *overrides: str) -> Config:
    """The tutorial's config with a function of this module in place of its model."""
    sys.modules.setdefault("test_tutorials_agents", sys.modules[__name__])
    (tmp_path / "replies.py").write_text(
        "from ajet_sdk.engines.scripted import ScriptedEngine\nfrom test_tutorials_agents import"
        f" {reply.__name__}\nreplies = ScriptedEngine({reply.__name__})\n"
    )
    return load_config(
        config,
        [
            "ajet.rollout.max_response_length_in_one_turn=512",  # the scripted model's tokens are bytes
            "ajet.rollout.max_model_len=16384",
            f"ajet.model.scripted={tmp_path / 'replies.py'}->replies",
            f"ajet.experiment_dir={tmp_path / 'experiment'}",
            *overrides,
        ],
    )


@pytest.mark.parametrize(
    ("folder", "program"), [(WOLVES, "wolf_game.py"), (COUNTDOWN, "numbers_game.py")]
)
def test_the_task_files_are_what_their_program_writes(
    folder: Path, program: str, tmp_path: Path
) -> None:
    copy = tmp_path / program
    copy.write_text((folder / program).read_text())
    subprocess.run([sys.executable, copy], check=True, timeout=300)
    found = {name: (tmp_path / name).read_text() for name in ("train.jsonl", "val.jsonl")}
    assert found == {name: (folder / name).read_text() for name in found}
    train, val = (set(text.splitlines()) for text in found.values())
    assert train and val and train.isdisjoint(val)


# Countdown


def solver(ask: Ask) -> str:
    """Who reads the target and the numbers, and knows a way."""
    game = load(COUNTDOWN / "numbers_game.py")
    first, *lines = ask.body["messages"][-1]["content"].splitlines()
    target, offered = int(first.split()[1]), [line.split() for line in lines]
    numbers: Counter[int] = Counter()
    for _, _, move in offered:
        numbers |= Counter(int(n) for n in re.split(r"\D", move))
    good = {*game.solutions(tuple(numbers.elements()), target)}
    return next(letter for _, letter, move in offered if move in good)


def test_countdown_counts_as_the_programme_does() -> None:
    game = load(COUNTDOWN / "numbers_game.py")
    assert game.moves((8, 3)) == {"8+3": 11, "8*3": 24, "8-3": 5}
    assert (
        game.moves((8, 2))["8/2"] == 4
        and "8-8" not in game.moves((8, 8))
        and game.moves((8, 8))["8/8"] == 1
    )
    assert game.after((7, 7, 3), "7*3") == (21, 7)
    assert set(game.solutions((9, 7, 3), 42)) == {"9-3"}


def test_every_countdown_can_be_won_in_two_moves_and_not_in_one() -> None:
    game = load(COUNTDOWN / "numbers_game.py")
    for name, held_out in (("train", False), ("val", True)):
        for row in map(json.loads, (COUNTDOWN / f"{name}.jsonl").read_text().splitlines()):
            numbers, target = tuple(row["numbers"]), row["target"]
            assert game.held_out(numbers, target) == held_out
            assert target not in game.moves(numbers).values() and any(
                game.solutions(numbers, target)
            )


@pytest.mark.slow
def test_the_countdown_agent_wins_with_a_model_that_can(tmp_path: Path) -> None:
    config = scripted(
        tmp_path,
        solver,
        COUNTDOWN / "countdown.yaml",
        "ajet.backbone=debug",
        "ajet.debug.debug_first_n_tasks=6",
    )
    tuned = train(config)
    assert tuned.metrics == {"debug/reward": 1.0} and all(len(e.calls) == 2 for e in tuned.episodes)


# Werewolves


def choices(text: str) -> tuple[str, list[str]]:
    """What is asked, and all choices."""
    what, lists = load(WOLVES / "wolf_recipe.py").choices(text)
    return what, [option for options in lists.values() for option in options]


def idle(ask: Ask) -> str:
    """The first choice of all; the village never uses what it could hurt itself with."""
    what, options = choices(ask.body["messages"][-1]["content"])
    return "none" if what in ("potion", "shoot") else str(options[0])


def pack(ask: Ask) -> str:
    """Werewolves who hold together."""
    me, role, *mates = ask.body["messages"][0]["content"].split()
    _, options = choices(ask.body["messages"][-1]["content"])
    if role != "werewolf":
        return idle(ask)
    return str(next(one for one in options if one not in (me, *mates)))


def games(tmp_path: Path, reply: Any, *overrides: str) -> tuple[Episode, ...]:
    whole = "ajet.rollout.user_workflow=wolf_players.py->play"
    config = scripted(tmp_path, reply, WOLVES / "werewolves.yaml", whole, *overrides)
    tasks = [{"question": f"Game {seed}.", "seed": seed} for seed in range(6)]
    report = run(config, tasks=tasks)
    assert not report.failures
    return report.episodes


@pytest.mark.slow
def test_nine_players_play_and_the_side_under_training_is_paid(tmp_path: Path) -> None:
    played = games(
        tmp_path, pack, "ajet.rollout.opponent=policy", "ajet.rollout.val_kwargs.opponent=policy"
    )
    sides = [{call.target_tag for call in episode.calls if call.trainable} for episode in played]
    assert {frozenset(one) for one in sides} == {frozenset({"werewolf"}), frozenset({"village"})}
    won = [e.output["winner"] in one for e, one in zip(played, sides, strict=True)]
    assert [e.reward for e in played] == [float(one) for one in won] and 0 < sum(won) < 6
    assert len({call.agent for call in played[0].calls}) > 5


@pytest.mark.slow
def test_in_training_each_choice_counts_for_its_own_call(tmp_path: Path) -> None:
    players = load(WOLVES / "wolf_players.py")
    [played] = games(
        tmp_path, pack, "ajet.rollout.opponent=policy", "ajet.rollout.val_kwargs.opponent=policy"
    )[:1]
    assert players.won(played.output, played)[0] == [Reward(name="won", value=played.reward)], (
        "in validation"
    )
    training = played.model_copy(update={"split": "train", "step": 1})
    _, *each = players.won(played.output, training)[0]
    assert [one.call_id for one in each] == [
        call.call_id for call in played.calls if call.trainable
    ]
    called = {call.call_id: call for call in played.calls}
    game = load(WOLVES / "wolf_game.py").Game(played.task.metadata["seed"])
    for one in each:
        request = called[one.call_id].request["messages"]
        what, _ = choices(request[-1]["content"])
        said = called[one.call_id].response["choices"][0]["message"]["content"].split()[0]
        against = what in ("kill", "vote", "shoot") and said != "none"
        me = int(request[0]["content"].split()[0])
        assert one.value == (float(game.opposed(me, int(said))) if against else 0.5)


@pytest.mark.long
@pytest.mark.slow
def test_one_side_alone_can_be_trained(tmp_path: Path) -> None:
    played = games(
        tmp_path,
        pack,
        "ajet.rollout.trainable_targets=werewolf",
        "ajet.rollout.trained_seats=null",
        "ajet.rollout.opponent=policy",
        "ajet.rollout.val_kwargs.opponent=policy",
    )
    assert {c.target_tag for e in played for c in e.calls if c.trainable} == {"werewolf"}
    assert [e.reward for e in played] == [float(e.output["winner"] == "werewolf") for e in played]


def play(seed: int, answer: Any) -> Any:
    """A game, and its end."""
    game = load(WOLVES / "wolf_game.py").Game(seed)

    async def ask(player: int, text: str) -> str:
        return str(answer(game, player, text))

    return game, asyncio.run(game.play(ask))


@pytest.mark.slow
def test_the_game_keeps_its_rules() -> None:
    """Whoever answers at random: the dead don't act, nobody is asked for what he is not, and it
    ends."""
    recipe = load(WOLVES / "wolf_recipe.py")
    draw, powers = (
        random.Random(0),
        {"check": "seer", "guard": "guard", "potion": "witch", "shoot": "hunter"},
    )

    def answer(game: Any, player: int, text: str) -> str:
        what, options = choices(text)
        if what == "kill":
            assert game.roles[player] == "werewolf"
        elif what in powers:
            assert game.roles[player] == powers[what]
        assert player in game.alive or what == "shoot"
        assert {int(one) for one in options if one.isdigit()} <= set(game.alive)
        return str(recipe.guess(draw, text))

    ends = Counter(play(seed, answer)[1] for seed in range(200))
    assert set(ends) == {"werewolf", "village", "nobody"} or set(ends) == {"werewolf", "village"}
    assert min(ends["werewolf"], ends["village"]) > 50
    silent, end = play(1, lambda game, player, text: "what?")
    assert end == "nobody" and silent.nonsense > 20
    assert {value for each in silent.choices.values() for value in each} == {0.0}


def test_choices_are_listed_by_what_their_player_knows() -> None:
    recipe, seen = load(WOLVES / "wolf_recipe.py"), list[tuple[int, dict[str, list[str]]]]()

    def answer(game: Any, player: int, text: str) -> str:
        what, lists = recipe.choices(text)
        seen.append((player, lists))
        wolf = str(game.living("werewolf")[0])
        return (
            "none" if game.roles[player] != "seer" else wolf if what == "check" else f"{wolf} seer"
        )

    game, _ = play(3, answer)
    for player, lists in seen:
        assert not any(game.opposed(player, int(one)) for one in lists["ally"])
        assert all(game.opposed(player, int(one)) for one in lists["wolf"])
    listed = {
        (game.roles[player], name)
        for player, lists in seen
        for name, found in lists.items()
        if found
    }
    assert {("seer", "wolf"), ("villager", "named"), ("werewolf", "ally")} <= listed
    assert ("villager", "wolf") not in listed and ("villager", "ally") not in listed


@pytest.mark.slow
def test_six_who_see_their_choices_alone(tmp_path: Path) -> None:
    config = WOLVES / "werewolves_six.yaml"
    own = ["ajet.rollout.opponent=policy", "ajet.rollout.val_kwargs.opponent=policy"]
    [played] = run(
        scripted(tmp_path, pack, config, *own), tasks=[{"question": "Game 1.", "seed": 1}]
    ).episodes
    assert played.error is None and len({call.agent for call in played.calls}) <= 6
    texts = [
        str(message["content"]) for call in played.calls for message in call.request["messages"]
    ]
    assert not any(word in text for text in texts for word in ("dead", ":"))


def spare(ask: Ask) -> str:
    """The first kind that is no ally."""
    _, options = choices(ask.body["messages"][-1]["content"])
    return next(one for one in sorted(options) if one != "ally")


@pytest.mark.slow
def test_nine_who_name_a_kind_of_player(tmp_path: Path) -> None:
    own = ["ajet.rollout.opponent=policy", "ajet.rollout.val_kwargs.opponent=policy"]
    config = scripted(tmp_path, spare, WOLVES / "werewolves.yaml", *own)
    [played] = run(config, tasks=[{"question": "Game 1.", "seed": 1}]).episodes
    assert played.error is None and played.output["nonsense"] == 0
    asked = [call.request["messages"] for call in played.calls]
    assert all(len(messages) == 2 for messages in asked)
    assert not any(
        letter.isdigit() for messages in asked for one in messages for letter in one["content"]
    )
    pack = {call.agent for call in played.calls if call.target_tag == "werewolf"}
    assert min(value for one in pack for value in played.output["choices"][one]) == 1.0


def test_the_village_hears_a_claim_and_the_seer_learns_what_he_checked() -> None:
    heard: dict[int, list[str]] = {n: [] for n in range(1, 10)}

    def answer(game: Any, player: int, text: str) -> str:
        heard[player] += text.splitlines()[:-1]
        what, options = choices(text)
        wolf = str(game.living("werewolf")[0])
        if what == "check":
            return wolf
        if what == "vote" and game.roles[player] == "seer":
            return f"{wolf} seer"
        return options[0] if what == "vote" else "none"

    game, _ = play(3, answer)
    seer = next(n for n, role in game.roles.items() if role == "seer")
    assert any(line.endswith("is werewolf") for line in heard[seer])
    others = [n for n in heard if n != seer]
    assert any(re.fullmatch(rf"{seer}: \d seer", line) for n in others for line in heard[n])


def test_a_demonstration_is_one_player_s_view() -> None:
    recipe = load(WOLVES / "wolf_recipe.py")
    seen = [recipe.demonstrate(random.Random(n)).messages for n in range(20)]
    assert all(talk[0]["role"] == "system" and talk[-1]["role"] == "assistant" for talk in seen)


# One agent in several frameworks


def calculator(ask: Ask) -> dict[str, Any]:
    """What a model that knows its tool would say."""
    messages = ask.body["messages"]
    text = json.dumps(messages)
    if messages[-1]["role"] == "tool":
        return {
            "role": "assistant",
            "content": re.findall(r"-?\d+", json.dumps(messages[-1]["content"]))[-1],
        }
    function = {
        "name": "calc",
        "arguments": json.dumps({"expression": re.findall(r"What is (\d+[-+*]\d+)", text)[-1]}),
    }
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def prompts(tmp_path: Path, variant: str) -> list[bytes]:
    """What the model read in each call of the agent, which solves its problem."""
    config = scripted(
        tmp_path,
        calculator,
        MATH / "math_agent.yaml",
        "ajet.backbone=debug",
        "ajet.debug.debug_first_n_tasks=1",
        f"ajet.rollout.user_workflow={variant}.py:solve",
        f"ajet.experiment_dir={tmp_path / variant}",
    )
    tuned = train(config)
    assert tuned.metrics == {"debug/reward": 1.0}
    [episode] = tuned.episodes
    return [
        bytes(i for i in call.prompt_ids if i < 256)
        for call in episode.calls
        if call.prompt_ids is not None
    ]


@pytest.mark.slow
def test_the_math_agent_by_http_and_responses_reads_as_by_the_openai_sdk(tmp_path: Path) -> None:
    """So the recipe's model, which has seen the SDK's requests, can be trained behind each."""
    first = prompts(tmp_path, "agent")
    assert len(first) == 2
    assert first == prompts(tmp_path, "agent_http") == prompts(tmp_path, "agent_responses")


@pytest.mark.parametrize(
    ("variant", "package"),
    [("agent_langgraph", "langgraph"), ("agent_agentscope", "agentscope.permission")],
)
def test_the_math_agent_in_a_framework(variant: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    assert len(prompts(tmp_path, variant)) == 2
