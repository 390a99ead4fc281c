"""Environments made of supervised data: read the input token by token, then write the output likewise.

The words, rewards and masks are those of Trax (https://github.com/google/trax, ``rl/envs/data_envs.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces


@gin.configurable(module="rl_trainers.envs")
class SequenceDataEnv(gymnasium.Env):
    """An environment of sequences ``(input, output, input, output, ..)`` of tokens.

    While it shows an input, an action has no effect (``control_mask`` 0); the observation after the input
    is ``eos_id``. Then actions are the tokens of the reply, and each is the next observation. The reply
    ends with ``eos_id``, which is rewarded with ``metric(reply, output)`` and is the only step in which time
    passes (``discount_mask`` 1). For the data ``[(2, 3), (4, 5)]``: observations 2, 3, eos, a, b, eos with
    actions any, any, a, b, eos.
    """

    def __init__(
        self,
        data_stream: Any,
        vocab_size: int,
        metric: Callable[[Sequence[int], Sequence[int]], float] | None = None,
        eos_id: int = 1,
        max_length: int = 1000,
    ):
        """Makes the environment.

        Args:
            data_stream: iterator over lists of sequences of tokens, or a function that returns one, so that
                several environments do not share it. One with a method ``seed``, such as
                :func:`copy_stream` returns, is seeded by ``reset(seed=..)``.
            vocab_size: tokens are 0 .. ``vocab_size - 1``.
            metric: of a reply and the output; by default the share of right tokens.
            eos_id: token that ends a reply.
            max_length: tokens after which whatever comes next ends the reply.

        Raises:
            TypeError: ``data_stream`` is no iterator.
            ValueError: ``eos_id`` is no token, or ``max_length`` is less than 0.
        """
        self._data = data_stream() if callable(data_stream) else data_stream
        if not hasattr(self._data, "__next__"):
            raise TypeError(f"data_stream={data_stream!r} must be an iterator, such as iter(..) makes one")
        if not 0 <= eos_id < vocab_size:
            near = min(max(eos_id, 0), vocab_size - 1)
            raise ValueError(
                f"eos_id={eos_id} must be in 0..{vocab_size - 1} (vocab_size={vocab_size}); nearest valid "
                f"value: {near}"
            )
        if max_length < 0:
            raise ValueError(f"max_length={max_length} must be at least 0; nearest valid value: 0")
        self.observation_space = spaces.Discrete(vocab_size)
        self.action_space = spaces.Discrete(vocab_size)
        self._vocab_size, self._eos, self._max_length = vocab_size, eos_id, max_length
        self._metric = _accuracy if metric is None else metric
        self._sequences: list[list[int]] = []
        self._place = self._token = 0
        self._reply: list[int] = []

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.int64, dict]:
        """Takes the next sequences from the stream."""
        super().reset(seed=seed)
        if seed is not None and hasattr(self._data, "seed"):
            self._data.seed(seed)
        self._sequences = [[int(token) for token in sequence] for sequence in next(self._data)]
        tokens = [token for sequence in self._sequences for token in sequence]
        if not all(self._sequences[::2]) or not all(0 <= t < self._vocab_size for t in tokens):
            raise ValueError(
                f"data_stream: {self._sequences} must have no empty input and tokens in "
                f"0..{self._vocab_size - 1} (vocab_size={self._vocab_size})"
            )
        self._place, self._token, self._reply = 0, 0, []
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.int64, float, bool, bool, dict]:
        """One token; after the end nothing changes."""
        reward, control, discount = 0.0, 0, 0
        if not self._is_over():
            control = self._place % 2
            if control:
                self._reply.append(int(action))
                discount = int(action == self._eos or len(self._reply) > self._max_length)
            if discount:
                reward = float(self._metric(self._reply[:-1], self._sequences[self._place]))
            self._token += 1
            if discount or (not control and self._token == len(self._sequences[self._place])):
                self._place, self._token, self._reply = self._place + 1, 0, []
        masks = {"control_mask": control, "discount_mask": discount}
        return self._observation(), reward, self._is_over(), False, masks

    def _is_over(self) -> bool:
        return self._place >= len(self._sequences)

    def _observation(self) -> np.int64:
        if not self._is_over() and self._place % 2 == 0:
            return np.int64(self._sequences[self._place][self._token])
        return np.int64(self._reply[-1] if self._reply else self._eos)


@gin.configurable(module="rl_trainers.envs")
def copy_stream(length: int, low: int = 2, high: int = 15, n: int = 1) -> Iterator[list[np.ndarray]]:
    """Random sequences, each followed by its copy, for ever.

    Args:
        length: tokens of a sequence.
        low: smallest token.
        high: one more than the largest token.
        n: sequences in an episode.

    Raises:
        ValueError: there is no token or no sequence to draw.
    """
    for name, value, least in (("length", length, 1), ("n", n, 1), ("high", high, low + 1)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}; nearest valid value: {least}")
    return _CopyStream(length, low, high, n)


class _CopyStream:
    """An iterator that can be seeded, and whose state can be kept."""

    def __init__(self, *settings: int):
        self._settings = settings
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Begins the sequences of this seed."""
        self._rng = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        return self

    def __next__(self) -> list[np.ndarray]:
        length, low, high, n = self._settings
        drawn = self._rng.integers(low, high, (n, length))
        return [sequence for sequence in drawn for _ in range(2)]


def _accuracy(reply: Sequence[int], output: Sequence[int]) -> float:
    """The share of tokens that agree, of the longer one's length."""
    longer = max(len(reply), len(output))
    return sum(a == b for a, b in zip(reply, output, strict=False)) / longer if longer else 1.0
