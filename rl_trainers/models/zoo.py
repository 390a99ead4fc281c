"""Flax linen networks: bodies, a normaliser, and the policy and value networks that stand on them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp

from rl_trainers.models.adapters import call
from rl_trainers.types import PyTree

_FEW = 4
_HIDDEN = nn.initializers.variance_scaling(2.0, "fan_in", "uniform")


def _concatenate(x: PyTree, flatten: bool = True) -> jax.Array:
    leaves = jax.tree.leaves(x)
    if len(leaves) == 1 and not flatten:
        return leaves[0]
    return jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], axis=-1)


def _symmetric_uniform(scale: float) -> Callable:
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -scale, scale)


@jax.custom_vjp
def _product(x, kernel):
    """``x [.., K] @ kernel [K, M]``.

    Its gradient is the usual one in forms that XLA runs faster on a CPU, where summing over the rows of two
    row-major matrices takes twice the time of the product itself, or eight times if M is small.
    """
    return x @ kernel


def _product_forward(x, kernel):
    return x @ kernel, (x, kernel)


def _product_backward(saved, g):
    x, kernel = saved
    rows, g_rows = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    if g.shape[-1] <= _FEW:
        columns = [jnp.sum(rows * g_rows[:, i : i + 1], axis=0) for i in range(g.shape[-1])]
        return g @ kernel.T, jnp.stack(columns, axis=1)
    # Without the barrier XLA undoes the transposition.
    return g @ kernel.T, jax.lax.optimization_barrier(rows.T) @ g_rows


_product.defvjp(_product_forward, _product_backward)


def _dot_general(x, kernel, dimension_numbers, precision=None):
    return _product(x, kernel)


_Dense = functools.partial(nn.Dense, dot_general=_dot_general)


@gin.configurable(module="rl_trainers.models")
class MLP(nn.Module):
    """Dense layers over the concatenated leaves of the observation, ``[R, ..] -> [R, layer_widths[-1]]``.

    Attributes:
        layer_widths: units of each layer.
        activation: applied between layers.
        out_activation: whether it is applied after the last layer too.
        flatten: whether a single array of higher rank is flattened first.
    """

    layer_widths: Sequence[int] = (64, 64)
    activation: Callable = nn.relu
    out_activation: bool = True
    flatten: bool = True

    @nn.compact
    def __call__(self, x):
        """Features ``[R, layer_widths[-1]]``."""
        x = _concatenate(x, self.flatten)
        for i, width in enumerate(self.layer_widths):
            x = _Dense(width, kernel_init=_HIDDEN, name=f"dense_{i}")(x)
            if self.out_activation or i + 1 < len(self.layer_widths):
                x = self.activation(x)
        return x


class _Conv(nn.Module):
    """A square convolution, ``[R, H, W, C] -> [R, H', W', n_filters]``, as one matrix product.

    On a CPU, XLA runs the gradients of its own convolutions 15 times slower within a loop than outside, and
    the steps of an epoch are a loop (https://github.com/jax-ml/jax/issues/12868).
    """

    n_filters: int
    size: int
    stride: int
    padding: str

    @nn.compact
    def __call__(self, x):
        """The filters' outputs."""
        size, stride, channels = self.size, self.stride, x.shape[-1]
        kernel = self.param("kernel", _HIDDEN, (size, size, channels, self.n_filters))
        bias = self.param("bias", nn.initializers.zeros, (self.n_filters,))
        pads = jax.lax.padtype_to_pads(x.shape[1:3], (size, size), (stride, stride), self.padding)
        rows, columns = (
            (n + sum(pad) - size) // stride + 1 for n, pad in zip(x.shape[1:3], pads, strict=True)
        )
        # The input in blocks of stride x stride; a patch is n x n neighbouring blocks.
        n = -(-size // stride)
        fill = [
            (low, (count + n - 1) * stride - length - low)
            for (low, _), count, length in zip(pads, (rows, columns), x.shape[1:3], strict=True)
        ]
        x = jax.lax.pad(x, 0.0, [(0, 0, 0), *((low, high, 0) for low, high in fill), (0, 0, 0)])
        x = x.reshape(-1, rows + n - 1, stride, columns + n - 1, stride, channels).swapaxes(2, 3)
        x = x.reshape(*x.shape[:3], -1)
        shifts = [(i, j) for i in range(n) for j in range(n)]
        patches = jnp.concatenate([x[:, i : i + rows, j : j + columns] for i, j in shifts], axis=-1)
        weights = jnp.pad(kernel, [(0, n * stride - size)] * 2 + [(0, 0)] * 2)
        weights = weights.reshape(n, stride, n, stride, channels, -1).swapaxes(1, 2)
        return patches @ weights.reshape(-1, self.n_filters) + bias


@gin.configurable(module="rl_trainers.models")
class AtariCnn(nn.Module):
    """The network of Mnih et al. 2015 (https://doi.org/10.1038/nature14236), ``[R, H, W, C] -> [R, F]``.

    Attributes:
        hidden_sizes: filters of the 8x8/4, 4x4/2 and 3x3/1 convolutions.
        output_size: ``F``.
        padding: of the convolutions.
    """

    hidden_sizes: Sequence[int] = (32, 64, 64)
    output_size: int = 512
    padding: str = "VALID"

    @nn.compact
    def __call__(self, x):
        """Features ``[R, F]``."""
        sizes = zip(self.hidden_sizes, (8, 4, 3), (4, 2, 1), strict=True)
        for i, (n_filters, size, stride) in enumerate(sizes):
            x = nn.relu(_Conv(n_filters, size, stride, self.padding, name=f"conv_{i}")(x))
        x = x.reshape(x.shape[0], -1)
        return nn.relu(_Dense(self.output_size, kernel_init=_HIDDEN)(x))


@gin.configurable(module="rl_trainers.models")
class Normalize(nn.Module):
    """Shifts and scales observations to mean 0 and variance 1 by running statistics, ``[R, ..]``.

    Statistics change only when the trainer gathers them, after an epoch's training; so all forward passes
    of an epoch use the same ones. Chan et al. 1979, "Updating formulae ... for computing sample variances".

    Attributes:
        sample_limit: rows after which the statistics stay as they are.
        epsilon: added to the standard deviation.
        limit: outputs are clipped to ``[-limit, limit]``.
    """

    sample_limit: float = math.inf
    epsilon: float = 1e-5
    limit: float = 10.0

    @nn.compact
    def __call__(self, x, mask=None):
        """Normalised observations; gathers those with ``mask [R]`` 1 where the statistics are mutable."""
        x = _concatenate(x, flatten=False)
        count = self.variable("model_state", "count", jnp.zeros, ())
        mean = self.variable("model_state", "mean", jnp.zeros, x.shape[1:])
        variance = self.variable("model_state", "variance", jnp.ones, x.shape[1:])
        if mask is not None and self.is_mutable_collection("model_state"):
            weight = mask.reshape(-1, *[1] * (x.ndim - 1))
            rows = jnp.sum(mask)
            new_mean = jnp.sum(x * weight, 0) / jnp.maximum(rows, 1)
            new_variance = jnp.sum(jnp.square(x - new_mean) * weight, 0) / jnp.maximum(rows, 1)
            total = count.value + rows
            share = jnp.where(count.value < self.sample_limit, rows / jnp.maximum(total, 1), 0.0)
            delta = new_mean - mean.value
            variance.value += share * (
                new_variance - variance.value + (1 - share) * jnp.square(delta)
            )
            mean.value += share * delta
            count.value = jnp.where(share > 0, total, count.value)
        x = (x - mean.value) / (jnp.sqrt(variance.value) + self.epsilon)
        return jnp.clip(x, -self.limit, self.limit)


@gin.configurable(module="rl_trainers.models")
class LayerNormSquash(nn.Module):
    """A dense layer, layer norm and tanh, ``[R, ..] -> [R, width]``; goes where a normaliser goes.

    It keeps observations in (-1, 1) whatever their scale, without statistics. Hoffman et al. 2020, "Acme",
    https://arxiv.org/abs/2006.00979, LayerNormMLP.

    Attributes:
        width: units.
        epsilon: added to the variance.
    """

    width: int = 128
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x, mask=None):
        """Features ``[R, width]``."""
        x = _Dense(self.width, kernel_init=_HIDDEN, name="dense")(_concatenate(x))
        return jnp.tanh(nn.LayerNorm(self.epsilon, use_fast_variance=False, name="layer_norm")(x))


@gin.configurable(module="rl_trainers.models")
class TransformerDecoder(nn.Module):
    """A decoder that sees the rows of the same episode up to its own, ``[R, ..] -> [R, d_model]``.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, with the layer normalisation in front of each
    part (Xiong et al. 2020, https://arxiv.org/abs/2002.04745). Positions count from the first row of the
    episode that is in sight.

    Attributes:
        d_model: width of the rows between the parts.
        d_ff: units of the dense layer of each block.
        n_layers: blocks.
        n_heads: heads of the attention, a divisor of ``d_model``.
        dropout: must be 0: with any other the policy that acts would not be the one that is trained.
        vocab_size: rows are tokens, one-hot or a single number each; ``None``: rows are features.

    Raises:
        ValueError: for dropout, or if ``n_heads`` or ``vocab_size`` do not fit.
    """

    d_model: int = 64
    d_ff: int = 128
    n_layers: int = 1
    n_heads: int = 1
    dropout: float = 0.0
    vocab_size: int | None = None

    sequence = True

    def __post_init__(self):
        """Checks the attributes."""
        if self.dropout:
            raise ValueError(
                f"dropout={self.dropout}: the probabilities of an action when it is taken and when it is "
                "trained on would differ, so that no ratio of them meant anything; nearest valid value: 0"
            )
        if self.d_model % self.n_heads:
            near = max(n for n in range(1, self.n_heads + 1) if self.d_model % n == 0)
            raise ValueError(
                f"n_heads={self.n_heads} must divide d_model={self.d_model}; nearest valid value: {near}"
            )
        super().__post_init__()

    @nn.compact
    def __call__(self, x, episode):
        """Features ``[R, d_model]`` of rows in episodes ``episode i32 [N, S]``, ``R = N S``."""
        sees = jnp.tril(episode[:, :, None] == episode[:, None, :])
        x = self._embed(_concatenate(x)).reshape(*episode.shape, self.d_model)
        x += _sinusoids(sees.sum(-1) - 1, self.d_model)
        for _ in range(self.n_layers):
            attention = nn.MultiHeadDotProductAttention(self.n_heads)
            x += attention(nn.LayerNorm()(x), mask=sees[:, None])
            wide = nn.relu(_Dense(self.d_ff)(nn.LayerNorm()(x)))
            x += _Dense(self.d_model)(wide)
        return nn.LayerNorm()(x).reshape(-1, self.d_model)

    def _embed(self, x):
        if self.vocab_size is None:
            return _Dense(self.d_model)(x)
        if x.shape[-1] not in (1, self.vocab_size):
            raise ValueError(
                f"vocab_size={self.vocab_size}, but an observation is {x.shape[-1]} numbers, neither a "
                f"token nor a one-hot vector of one; nearest valid value: {x.shape[-1]}"
            )
        tokens = jnp.argmax(x, -1) if x.shape[-1] > 1 else x[:, 0].astype(jnp.int32)
        return nn.Embed(self.vocab_size, self.d_model, embedding_init=nn.initializers.normal(1.0))(tokens)


class _Recurrent(nn.Module):
    hidden_size: int = 64
    body: Callable | None = None

    sequence = True

    def _cell(self):
        raise NotImplementedError

    @nn.compact
    def __call__(self, x, episode):
        """Features ``[R, hidden_size]`` of rows in episodes ``episode i32 [N, S]``, ``R = N S``."""
        if self.body is not None:
            x = call(self.body, mode="train")(x)
        x = _concatenate(x).reshape(*episode.shape, -1)
        cell = self._cell()
        first = cell.initialize_carry(jax.random.PRNGKey(0), (*episode.shape, x.shape[-1]))
        carry = self.variable("carry", "state", lambda: first)
        begins = jnp.concatenate([jnp.zeros_like(episode[:, :1]), episode[:, 1:] - episode[:, :-1]], 1) != 0

        def row(cell, state, x):
            x, begins, before = x
            state = jax.tree.map(lambda b, s: jnp.where(begins[:, None], b, s), before, state)
            return cell(state, x)

        over_rows = nn.scan(
            row, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
        )
        state = jax.tree.map(lambda s: s[:, 0], carry.value)
        state, x = over_rows(cell, state, (x, begins, carry.value))
        if self.is_mutable_collection("carry"):
            carry.value = jax.tree.map(lambda s: s[:, None], state)
        return x.reshape(-1, self.hidden_size)


@gin.configurable(module="rl_trainers.models")
class GRU(_Recurrent):
    """A gated recurrent unit over the rows of an episode, ``[R, ..] -> [R, hidden_size]``.

    Cho et al. 2014, https://arxiv.org/abs/1406.1078. It remembers nothing at the first row of each episode.

    Attributes:
        hidden_size: units.
        body: factory of a module under it, which sees single rows; ``None`` for none.
    """

    def _cell(self):
        return nn.GRUCell(self.hidden_size, name="cell")


@gin.configurable(module="rl_trainers.models")
class LSTM(_Recurrent):
    """A long short-term memory over the rows of an episode, ``[R, ..] -> [R, hidden_size]``.

    Hochreiter and Schmidhuber 1997, https://doi.org/10.1162/neco.1997.9.8.1735. It remembers nothing at the
    first row of each episode.

    Attributes:
        hidden_size: units.
        body: factory of a module under it, which sees single rows; ``None`` for none.
    """

    def _cell(self):
        return nn.OptimizedLSTMCell(self.hidden_size, name="cell")


def _sinusoids(place: jax.Array, width: int) -> jax.Array:
    """Positions as f32 ``[.., width]``, Vaswani et al. 2017, section 3.5."""
    half = (width + 1) // 2
    angle = place[..., None] * 10000.0 ** (-jnp.arange(half) / half)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)[..., :width]


def _through(body, x, episode):
    """``body`` over rows; told of episodes if it is a sequence network."""
    return body(x, episode=episode) if getattr(body, "sequence", False) else body(x)


def _makes_sequences(*bodies: Callable | None) -> bool:
    """Whether a factory of these makes a sequence network."""
    made = [body and call(body, mode="train") for body in bodies]
    return any(getattr(body, "sequence", False) for body in made)


class _Head(nn.Module):
    """An optional body, and a dense layer on top of it."""

    body: nn.Module | None
    n_outputs: int
    init: Callable

    @nn.compact
    def __call__(self, x, episode=None):
        """Outputs ``[R, n_outputs]``."""
        if self.body is not None:
            x = _through(self.body, x, episode)
        x = _concatenate(x)
        return _Dense(self.n_outputs, kernel_init=self.init, name="head")(x)


class _ActionHead(_Head):
    """A head that takes actions as well; see :class:`Value`."""

    n_layers: int = 1
    width: int = 64
    multiply: bool = False
    concatenate: bool = False

    @nn.compact
    def __call__(self, x, episode=None, action=None):
        """Outputs ``[R, n_outputs]``, or ``[K, R, n_outputs]`` of ``action [K, R, A]``."""
        if self.concatenate and episode is not None:
            raise ValueError("concatenate_actions=True: a sequence network takes actions after its body only")
        if action is not None and self.concatenate:
            x = _concatenate(x)
            x = jnp.concatenate(
                [jnp.broadcast_to(x, (*action.shape[:2], x.shape[-1])), action], axis=-1
            ).reshape(-1, x.shape[-1] + action.shape[-1])
        x = _concatenate(x if self.body is None else _through(self.body, x, episode))
        if action is not None and not self.concatenate:
            x = self._inject(x, action)
        x = _Dense(self.n_outputs, kernel_init=self.init, name="head")(x)
        return x if action is None else x.reshape(*action.shape[:2], self.n_outputs)

    def _inject(self, x, action):
        x = _Dense(self.width, kernel_init=_HIDDEN, name="inject_body")(x)
        action = _Dense(self.width, kernel_init=_HIDDEN, name="inject_action")(action)
        x = x * jnp.tanh(action) if self.multiply else x + action
        for i in range(self.n_layers):
            x = nn.relu(_Dense(self.width, kernel_init=_HIDDEN, name=f"inject_{i}")(x))
        return x


class _Normalized(nn.Module):
    """A normaliser, and an optional body on top of it."""

    normalize: nn.Module
    body: nn.Module | None

    def __call__(self, x, mask=None, episode=None):
        """What the body makes of ``x [R, ..]``."""
        x = self.normalize(x, mask)
        return x if self.body is None else _through(self.body, x, episode)


def _head(body, n_outputs: int, head_init_range: float | None, scale: float) -> _Head:
    """A head whose outputs start small (``scale`` of the usual size), or uniform in a given range."""
    init = (
        nn.initializers.variance_scaling(scale**2, "fan_in", "uniform")
        if head_init_range is None
        else _symmetric_uniform(head_init_range)
    )
    return _Head(body, n_outputs, init)


@gin.configurable(module="rl_trainers.models", denylist=["policy_distribution"])
class Policy(nn.Module):
    """A policy network, ``[R, *obs] -> dist_inputs [R, D]``.

    Attributes:
        policy_distribution: gives ``D``.
        body: factory of the module under the head.
        normalizer: factory of a module such as :class:`Normalize`, or ``None``.
        head_init_range: bound of the head's initial weights; ``None`` for small ones.
    """

    policy_distribution: Any
    body: Callable | None = MLP
    normalizer: Callable | None = None
    head_init_range: float | None = None

    def setup(self):
        """Makes the submodules."""
        self.normalize = self.normalizer and call(self.normalizer, mode="train")
        body = self.body and call(self.body, mode="train")
        self.policy = _head(body, self.policy_distribution.n_inputs, self.head_init_range, 0.01)

    @property
    def sequence(self) -> bool:
        """Whether the body is a sequence network."""
        return _makes_sequences(self.body)

    def __call__(self, x, mask=None, episode=None):
        """``dist_inputs [R, D]``."""
        x = x if self.normalize is None else self.normalize(x, mask)
        return self.policy(x, episode)


@gin.configurable(module="rl_trainers.models")
class Value(nn.Module):
    """A value network, ``[R, *obs] -> value [R]``; with actions ``[K, R, A]`` their values ``[K, R]``.

    Actions come in after the body, by default as Trax puts them in: body and action each go through a
    dense layer, are joined, and go through ``inject_actions_n_layers`` more.

    Attributes:
        body: factory of the module under the head.
        normalizer: factory of a module such as :class:`Normalize`, or ``None``.
        head_init_range: bound of the head's initial weights; ``None`` for the usual ones.
        inject_actions_n_layers: dense layers over the joined features.
        inject_actions_dim: units of each of them.
        multiplicative_action_injection: join by ``x * tanh(a)`` instead of ``x + a``.
        concatenate_actions: put actions beside the observation under the body instead.
    """

    body: Callable | None = MLP
    normalizer: Callable | None = None
    head_init_range: float | None = None
    inject_actions_n_layers: int = 1
    inject_actions_dim: int = 64
    multiplicative_action_injection: bool = False
    concatenate_actions: bool = False

    def setup(self):
        """Makes the submodules."""
        self.normalize = self.normalizer and call(self.normalizer, mode="train")
        body = self.body and call(self.body, mode="train")
        head = _head(body, 1, self.head_init_range, 1.0)
        self.value = _ActionHead(
            head.body,
            1,
            head.init,
            self.inject_actions_n_layers,
            self.inject_actions_dim,
            self.multiplicative_action_injection,
            self.concatenate_actions,
        )

    @property
    def sequence(self) -> bool:
        """Whether the body is a sequence network."""
        return _makes_sequences(self.body)

    def __call__(self, x, mask=None, action=None, episode=None):
        """``value [R]``, or ``[K, R]`` of ``action [K, R, A]``."""
        x = x if self.normalize is None else self.normalize(x, mask)
        return self.value(x, episode, action)[..., 0]


@gin.configurable(module="rl_trainers.models", denylist=["n_actions"])
class Quality(nn.Module):
    """A network of the values of all actions of a ``Discrete`` space, ``[R, *obs] -> [R, n_actions]``.

    Attributes:
        n_actions: how many actions there are.
        body: factory of the module under the head.
        normalizer: factory of a module such as :class:`Normalize`, or ``None``.
        head_init_range: bound of the head's initial weights; ``None`` for small ones, so that values which
            are scaled up begin near 0.
    """

    n_actions: int
    body: Callable | None = MLP
    normalizer: Callable | None = None
    head_init_range: float | None = None

    def setup(self):
        """Makes the submodules."""
        self.normalize = self.normalizer and call(self.normalizer, mode="train")
        body = self.body and call(self.body, mode="train")
        self.value = _head(body, self.n_actions, self.head_init_range, 0.01)

    @property
    def sequence(self) -> bool:
        """Whether the body is a sequence network."""
        return _makes_sequences(self.body)

    def __call__(self, x, mask=None, episode=None):
        """``[R, n_actions]``."""
        x = x if self.normalize is None else self.normalize(x, mask)
        return self.value(x, episode)


@gin.configurable(module="rl_trainers.models", denylist=["policy_distribution"])
class PolicyAndValue(nn.Module):
    """A policy and a value network, ``[R, *obs] -> (dist_inputs [R, D], value [R])``.

    Its parameters are ``{'shared', 'policy', 'value'}``; what stands under both heads is ``'shared'``, which
    is missing if there is nothing.

    Attributes:
        policy_distribution: gives ``D``.
        body: factory of the module under the heads.
        normalizer: factory of a module such as :class:`Normalize`, or ``None``.
        joint: whether both heads stand on one body; if not, each has a body of its own.
        head_init_range: bound of the policy head's initial weights; ``None`` for small ones.
        value_body: factory of the value network's own body, if it is another one.
        value_head_init_range: bound of the value head's initial weights; ``None`` for the usual ones.
        inject_actions: how the value network takes actions, see :class:`Value`: ``(inject_actions_n_layers,
            inject_actions_dim, multiplicative_action_injection)``; ``None`` if it takes none.
    """

    policy_distribution: Any
    body: Callable | None = MLP
    normalizer: Callable | None = None
    joint: bool = True
    head_init_range: float | None = None
    value_body: Callable | None = None
    value_head_init_range: float | None = None
    inject_actions: tuple[int, int, bool] | None = None

    def setup(self):
        """Makes the submodules."""
        bodies = [self.body] if self.joint else [self.body, self.value_body or self.body]
        made = [body and call(body, mode="train") for body in bodies]
        body = made[0] if self.joint else None
        normalize = self.normalizer and call(self.normalizer, mode="train")
        self.shared = _Normalized(normalize, body) if normalize else body
        policy_body, value_body = (None, None) if self.joint else made
        n_inputs = self.policy_distribution.n_inputs
        self.policy = _head(policy_body, n_inputs, self.head_init_range, 0.01)
        value: Any = _head(value_body, 1, self.value_head_init_range, 1.0)
        if self.inject_actions is not None:
            value = _ActionHead(value.body, 1, value.init, *self.inject_actions)
        self.value = value

    @property
    def sequence(self) -> bool:
        """Whether a body is a sequence network."""
        return _makes_sequences(self.body, None if self.joint else self.value_body)

    def __call__(self, x, mask=None, episode=None, action=None):
        """``(dist_inputs [R, D], value [R])``; ``value [K, R]`` of ``action [K, R, A]``, else ``None``."""
        if isinstance(self.shared, _Normalized):
            x = self.shared(x, mask, episode)
        elif self.shared is not None:
            x = _through(self.shared, x, episode)
        if self.inject_actions is None:
            return self.policy(x, episode), self.value(x, episode)[..., 0]
        value = None if action is None else self.value(x, episode, action)[..., 0]
        return self.policy(x, episode), value


