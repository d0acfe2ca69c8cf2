"""Nine players, each an agent of its own: the model under training plays one side, a frozen one the
other."""

from typing import Any

from wolf_game import SIX, Game, side

import ajet


@ajet.workflow(trainable_targets=["werewolf", "village"])
async def play(model: ajet.Model, seed: int) -> dict[str, object]:
    """A game of nine. A player's target tag is its side; who of them is trained, the config
    says."""
    return await whole_game(model, Game(seed))


@ajet.workflow(trainable_targets=["werewolf", "village"])
async def play_kinds(model: ajet.Model, seed: int) -> dict[str, object]:
    """A game of nine whose players see their role and name a kind of player."""
    return await whole_game(model, Game(seed, kinds=True))


@ajet.workflow(trainable_targets=["werewolf", "village"])
async def play_six(model: ajet.Model, seed: int) -> dict[str, object]:
    """A game of six."""
    return await whole_game(model, Game(seed, SIX, brief=True))


async def whole_game(model: ajet.Model, game: Game) -> dict[str, object]:
    players = {
        n: model.agent(f"Player{n}", target_tag=side(role)) for n, role in game.roles.items()
    }
    talks = {n: [{"role": "system", "content": game.introduction(n)}] for n in players}

    async def ask(player: int, text: str) -> str:
        talk = talks[player][:1] if game.kinds else talks[player]
        talk.append({"role": "user", "content": text})
        reply = await players[player].chat(talk)
        talk.append(reply)
        return reply["content"] or ""

    winner = await game.play(ask)
    choices = {f"Player{n}": done for n, done in game.choices.items()}
    return {"winner": winner, "nonsense": game.nonsense, "alive": game.alive, "choices": choices}


CHOICE = 1.0
"""What a choice against the other side counts in training, beside 1 for the game."""


@ajet.judge
def won(output: dict[str, Any], episode: ajet.Episode) -> tuple[list[ajet.Reward], bool]:
    """1 where the side under training has won. In training each of its choices counts too, for its
    own tokens."""
    trained = [call for call in episode.calls if call.trainable]
    win = output["winner"] in {call.target_tag for call in trained}
    rewards = [ajet.Reward(name="won", value=win)]
    if episode.split == "train" and episode.step > 0:
        done = {agent: iter(values) for agent, values in output["choices"].items()}
        rewards += [
            ajet.Reward(
                name="choice", value=next(done[call.agent]), weight=CHOICE, call_id=call.call_id
            )
            for call in trained
        ]
    return rewards, win
