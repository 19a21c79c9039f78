"""Gymnasium's environments (https://gymnasium.farama.org): an action is a text, such as `2`, or JSON for a space of
several numbers."""

import json

import gymnasium
import numpy
from gymnasium import spaces

REENTRANT = True


class World:
    """`gymnasium.make(id, **settings)`; `words` names the actions of a discrete space."""

    def __init__(self, id, words=(), **settings):
        self.env = gymnasium.make(id, render_mode="ansi" if _shows_text(id) else None, **settings)
        self.words = list(words)

    def reset(self, seed):
        observation, _ = self.env.reset(seed=seed)
        return self._shown(observation)

    def step(self, action):
        try:
            value = self._action(self.env.action_space, action["text"].strip())
        except (ValueError, TypeError, KeyError) as error:
            return {"observation": f"No action: {error}. Expected {self._expected()}.", "reward": 0.0}
        observation, reward, terminated, truncated, _ = self.env.step(value)
        return {**self._shown(observation), "reward": float(reward), "done": terminated or truncated}

    def close(self):
        self.env.close()

    def _shown(self, observation):
        plain = _plain(observation)
        text = self.env.render() if self.env.render_mode == "ansi" else json.dumps(plain)
        return {"observation": text, "state_key": json.dumps(plain)}

    def _action(self, space, said):
        if isinstance(space, spaces.Discrete) and self.words:
            return space.start + self.words.index(said)
        if isinstance(space, spaces.Text):
            return said
        value = _of_plain(space, json.loads(said))
        if value not in space:
            raise ValueError(f"{said} is none")
        return value

    def _expected(self):
        return " or ".join(self.words) or str(self.env.action_space)


def _shows_text(id):
    made = gymnasium.make(id)
    try:
        return "ansi" in made.metadata.get("render_modes", ())
    finally:
        made.close()


def _of_plain(space, value):
    """Convert JSON to an action of a space."""
    if isinstance(space, spaces.Dict):
        return {name: _of_plain(inner, value[name]) for name, inner in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_of_plain(inner, each) for inner, each in zip(space, value, strict=True))
    return value if isinstance(space, (spaces.Discrete, spaces.Text)) else numpy.asarray(value, space.dtype)


def _plain(value):
    """Convert an observation to JSON's values."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value
