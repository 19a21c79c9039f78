"""TextArena's games (https://github.com/LeonGuertler/TextArena): each player is a role, and sees what is new to it."""

import textarena

REBUILDABLE = False  # games draw from generators that the whole process shares
NAMES = ("first", "second", "third", "fourth", "fifth", "sixth")


def roles(id, players=1, **settings):
    """Name the players."""
    return NAMES[:players] if players > 1 else ("policy",)


class World:
    """`textarena.make(id)` of `players` players; an illegal move that ends a game pays only the one who made it."""

    def __init__(self, id, players=1, **settings):
        self.game = textarena.make(f"{id}-raw", **settings)
        self.roles = roles(id, players)
        self.ended = False

    def reset(self, seed, **task):
        self.game.reset(num_players=len(self.roles), seed=seed)
        return self._next()

    def step(self, action):
        self.ended, _ = self.game.step(action["text"])
        return {"done": True} if self.ended else self._next()

    def score(self):
        """Return the rewards of `close`, once the game has ended."""
        if not self.ended:
            return {"reward": 0.0}
        rewards, told = self.game.close()
        for player, reward in (rewards or {}).items():
            if isinstance(reward, bool) or not isinstance(reward, (int, float)):
                raise TypeError(f"expected a number as the reward of player {player}, got {reward!r}")
        broke = [player for player, each in told.items() if each.get("invalid_move")]
        earned = {self.roles[player]: float(reward) for player, reward in rewards.items()}
        if broke:
            earned = {role: min(reward, 0.0) for role, reward in earned.items()}
        if len(earned) == 1:
            (reward,) = earned.values()
            return {"reward": reward, "success": reward >= 1}
        return {"reward": sum(earned.values()) / len(earned), "per_role": earned}

    def _next(self):
        player, seen = self.game.get_observation()
        texts = [text for sender, text, *_ in seen if sender != player]
        return {"observation": "\n".join(texts) or "Your turn.", "role": self.roles[player]}
