"""Nine players, each an agent of its own: the model under training plays one side, a frozen one the other."""

from wolf_game import Game, side

import ajet


@ajet.workflow(trainable_targets=["werewolf", "village"])
async def play(model: ajet.Model, seed: int) -> dict[str, object]:
    """A whole game. A player's target tag is its side; who of them is trained, the config says."""
    game = Game(seed)
    players = {n: model.agent(f"Player{n}", target_tag=side(role)) for n, role in game.roles.items()}
    talks = {n: [{"role": "system", "content": game.introduction(n)}] for n in players}

    async def ask(player: int, text: str) -> str:
        talk = talks[player]
        talk.append({"role": "user", "content": text})
        reply = await players[player].chat(talk)
        talk.append(reply)
        return reply["content"] or ""

    winner = await game.play(ask)
    return {"winner": winner, "nonsense": game.nonsense, "alive": game.alive}


@ajet.judge
def won(output: dict[str, object], episode: ajet.Episode) -> float:
    """1 where the side under training has won."""
    return float(output["winner"] in {call.target_tag for call in episode.calls if call.trainable})
