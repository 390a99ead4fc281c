"""Action distributions: what a policy network's outputs mean, for every action space.

A network emits ``dist_inputs``, f32 ``[.., D]`` with ``D == distribution.n_inputs``; a
:class:`Distribution` turns them into actions, densities and entropies. It holds no parameters, its
methods are pure and can be traced, and every leading axis is a batch axis. Densities come from
distrax.

An action has two forms. The *stored* form is what was sampled, and what ``log_prob`` takes. The
*environment* form is what ``env.step`` receives. Their values differ for bounded ``Box`` spaces
only; ``to_env`` and ``from_env`` go from one to the other, on numpy and JAX arrays alike.

=================  =====================  =============================  ======================
space              distribution           ``n_inputs``                   stored action
=================  =====================  =============================  ======================
``Discrete``       :class:`Categorical`   n                              as in the space
``MultiDiscrete``  :class:`Categorical`   sum of all sizes               as in the space
``MultiBinary``    :class:`Bernoulli`     number of bits                 0 or 1
``Box`` of floats  :class:`Gaussian`      d; d + 1 or 2d with learn_std  f32 as sampled
``Dict, Tuple``    :class:`Product`       sum over the parts             dict or tuple of these
=================  =====================  =============================  ======================
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import distrax
import gin
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rl_trainers.types import PyTree

Array = jax.Array | np.ndarray

# Stands for the logit of a category that does not exist: finite, so that no gradient is 0 * inf.
_NEVER = -1e30
# Keeps the density of a collapsed learned Gaussian finite in f32.
_MIN_LEARNED_STD = 1e-6
# The largest f32 below 1, whose arctanh is finite.
_INSIDE = float(np.nextafter(np.float32(1), np.float32(0)))
# 32 nodes integrate log(1 - tanh(u)^2) to 1e-6 for a std up to 1, 2e-4 up to 2, 1e-2 up to 4.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


class Distribution(abc.ABC):
    """A family of action distributions, parametrised by ``dist_inputs``.

    Attributes:
        n_inputs: ``D``, how many numbers parametrise one distribution.
    """

    n_inputs: int

    @abc.abstractmethod
    def sample(self, inputs: Array, key: Array, temperature: Any = 1.0) -> PyTree:
        """Draws stored actions ``[.., *act]``, one for each row of ``inputs``.

        Args:
            inputs: f32 ``[.., D]``.
            key: PRNG key, used up.
            temperature: scales the noise, may be traced. 1 samples the distribution, 0 is
                :meth:`mode` exactly.

        Raises:
            ValueError: if the last axis of ``inputs`` is not ``D``.
        """

    @abc.abstractmethod
    def mode(self, inputs: Array) -> PyTree:
        """Stored action ``[.., *act]`` without noise: ``inputs [.., D]`` at temperature 0."""

    @abc.abstractmethod
    def log_prob(self, inputs: Array, action: PyTree) -> jax.Array:
        """Log density in nats, f32 ``[..]``, of stored actions ``[.., *act]`` at ``inputs``.

        Leading axes broadcast. The density is finite for any finite action, so that rows where no
        decision was taken can be masked out of a loss: an action outside the support counts as the
        nearest one within it.
        """

    def sample_and_log_prob(self, inputs: Array, key: Array) -> tuple[PyTree, jax.Array]:
        """A sample ``[.., *act]`` and its log density f32 ``[..]``; gradients flow through both.

        Args:
            inputs: f32 ``[.., D]``.
            key: PRNG key, used up.
        """
        action = self.sample(inputs, key)
        return action, self.log_prob(inputs, action)

    @abc.abstractmethod
    def entropy(self, inputs: Array) -> jax.Array:
        """Entropy in nats, f32 ``[..]``, of the distributions at ``inputs [.., D]``."""

    @abc.abstractmethod
    def kl(self, inputs_p: Array, inputs_q: Array) -> jax.Array:
        """Kullback-Leibler divergence from q to p, ``E_p[log p - log q]`` in nats, f32 ``[..]``."""

    @abc.abstractmethod
    def to_env(self, action: PyTree) -> PyTree:
        """What ``env.step`` receives for a stored action ``[.., *act]``, in the space's dtype.

        numpy arrays stay numpy and JAX arrays stay JAX (in the widest dtype that JAX has enabled).
        """

    @abc.abstractmethod
    def from_env(self, action: PyTree) -> PyTree:
        """Stored form of an action ``[.., *act]`` in environment units, inverse of ``to_env``."""

    def _checked(self, inputs: Array) -> jax.Array:
        """``inputs`` as f32, if their last axis fits."""
        if np.ndim(inputs) == 0 or inputs.shape[-1] != self.n_inputs:
            raise ValueError(
                f'inputs of {self!r} have shape {np.shape(inputs)}; the last axis must be '
                f'{self.n_inputs}'
            )
        return jnp.asarray(inputs, jnp.float32)


@gin.configurable(module='rl_trainers')
class Categorical(Distribution):
    """Independent categorical choices, one for each element of the action.

    Sampling is the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030, section
    2): ``argmax(logits + temperature * gumbel)``.
    """

    def __init__(
        self,
        n_categories: int | Sequence[int] | np.ndarray,
        shape: Sequence[int] = (),
        *,
        start: int | np.ndarray = 0,
        dtype: Any = np.int32,
    ):
        """Sets the sizes.

        Args:
            n_categories: number of categories; an array gives each element of the action its own.
            shape: shape of one action; the shape of ``n_categories`` where that is an array.
            start: the first category, one for all or ``[*shape]``.
            dtype: what the environment receives; stored actions have the nearest dtype of JAX.

        Raises:
            ValueError: for an empty choice, shapes that disagree, categories beyond JAX's integers.
        """
        sizes = np.asarray(n_categories, np.int64)
        if sizes.ndim and tuple(shape) not in ((), sizes.shape):
            raise ValueError(f'shape={tuple(shape)} must be {sizes.shape}, that of n_categories')
        self._sizes = sizes if sizes.ndim else np.full(tuple(shape), sizes)
        if self._sizes.size == 0 or self._sizes.min() < 1:
            raise ValueError(f'n_categories={n_categories} must be at least 1, over a shape with '
                             f'at least one element; got shape={self._sizes.shape}')
        self._start = np.broadcast_to(np.asarray(start, np.int64), self._sizes.shape)
        self._index_dtype = jax.dtypes.canonicalize_dtype(np.int64)
        limit = np.iinfo(self._index_dtype).max
        if self._start.min() < -limit or (self._start + self._sizes - 1).max() > limit:
            raise ValueError(f'start={start}: categories must lie within {-limit} and {limit}, the '
                             f'range of {self._index_dtype}, the widest integer JAX has enabled')
        self._dtype = np.dtype(dtype)
        self._stored_dtype = jax.dtypes.canonicalize_dtype(self._dtype)
        self.n_inputs = int(self._sizes.sum())
        columns = np.arange(self._sizes.max())
        self._exists = columns < self._sizes[..., None]
        offsets = (np.cumsum(self._sizes) - self._sizes.ravel()).reshape(self._sizes.shape)
        self._columns = np.where(self._exists, offsets[..., None] + columns, 0)

    def __repr__(self) -> str:
        return f'Categorical({self._sizes.tolist()}, start={self._start.tolist()})'

    def _logits(self, inputs: Array) -> jax.Array:
        """``[.., *act, max size]``."""
        inputs = self._checked(inputs)
        if self._exists.all():
            return inputs.reshape(inputs.shape[:-1] + self._exists.shape)
        return jnp.where(self._exists, inputs[..., self._columns], _NEVER)

    def _distribution(self, inputs: Array) -> distrax.Independent:
        return distrax.Independent(distrax.Categorical(self._logits(inputs)), self._sizes.ndim)

    def _choose(self, scores: jax.Array) -> jax.Array:
        return (jnp.argmax(scores, axis=-1) + self._start).astype(self._stored_dtype)

    def sample(self, inputs: Array, key: Array, temperature: Any = 1.0) -> jax.Array:
        """See :meth:`Distribution.sample`; integers ``[.., *act]``."""
        logits = self._logits(inputs)
        return self._choose(logits + temperature * jax.random.gumbel(key, logits.shape))

    def mode(self, inputs: Array) -> jax.Array:
        """See :meth:`Distribution.mode`; the first of equally likely categories."""
        return self._choose(self._logits(inputs))

    def log_prob(self, inputs: Array, action: Array) -> jax.Array:
        """See :meth:`Distribution.log_prob`; the sum over the elements of the action."""
        index = jnp.asarray(action).astype(self._index_dtype) - self._start
        return self._distribution(inputs).log_prob(jnp.clip(index, 0, self._sizes - 1))

    def entropy(self, inputs: Array) -> jax.Array:
        """See :meth:`Distribution.entropy`; the sum over the elements of the action."""
        return self._distribution(inputs).entropy()

    def kl(self, inputs_p: Array, inputs_q: Array) -> jax.Array:
        """See :meth:`Distribution.kl`."""
        return self._distribution(inputs_p).kl_divergence(self._distribution(inputs_q))

    def to_env(self, action: Array) -> Array:
        """See :meth:`Distribution.to_env`; the same object if the dtype fits."""
        return _cast(action, self._dtype)

    def from_env(self, action: Array) -> Array:
        """See :meth:`Distribution.from_env`; the same object if the dtype fits."""
        return _cast(action, self._stored_dtype)


@gin.configurable(module='rl_trainers')
class Bernoulli(Distribution):
    """Independent bits, each with one logit: ``P(1) = sigmoid(input)``.

    A sample is ``input + temperature * logistic noise > 0``: Gumbel-max with two categories.
    """

    def __init__(self, shape: Sequence[int] = (), *, dtype: Any = np.int8):
        """Sets the shape of one action and the dtype that the environment receives.

        Raises:
            ValueError: if there is no bit.
        """
        self._shape = tuple(shape)
        self._dtype = np.dtype(dtype)
        self.n_inputs = int(np.prod(self._shape))
        if self.n_inputs < 1:
            raise ValueError(f'shape={self._shape} must have at least one element')

    def __repr__(self) -> str:
        return f'Bernoulli(shape={self._shape})'

    def _logits(self, inputs: Array) -> jax.Array:
        inputs = self._checked(inputs)
        return inputs.reshape(inputs.shape[:-1] + self._shape)

    def _distribution(self, inputs: Array) -> distrax.Independent:
        return distrax.Independent(distrax.Bernoulli(self._logits(inputs)), len(self._shape))

    def sample(self, inputs: Array, key: Array, temperature: Any = 1.0) -> jax.Array:
        """See :meth:`Distribution.sample`; 0 or 1, ``[.., *act]``."""
        logits = self._logits(inputs)
        noise = jax.random.logistic(key, logits.shape)
        return (logits + temperature * noise > 0).astype(self._dtype)

    def mode(self, inputs: Array) -> jax.Array:
        """See :meth:`Distribution.mode`; 0 where both are equally likely."""
        return (self._logits(inputs) > 0).astype(self._dtype)

    def log_prob(self, inputs: Array, action: Array) -> jax.Array:
        """See :meth:`Distribution.log_prob`; the sum over the bits."""
        bits = jnp.clip(jnp.asarray(action).astype(jnp.float32), 0, 1)
        return self._distribution(inputs).log_prob(bits)

    def entropy(self, inputs: Array) -> jax.Array:
        """See :meth:`Distribution.entropy`; the sum over the bits."""
        return self._distribution(inputs).entropy()

    def kl(self, inputs_p: Array, inputs_q: Array) -> jax.Array:
        """See :meth:`Distribution.kl`."""
        return self._distribution(inputs_p).kl_divergence(self._distribution(inputs_q))

    def to_env(self, action: Array) -> Array:
        """See :meth:`Distribution.to_env`; the same object if the dtype fits."""
        return _cast(action, self._dtype)

    def from_env(self, action: Array) -> Array:
        """See :meth:`Distribution.from_env`; the same object if the dtype fits."""
        return _cast(action, self._dtype)


@gin.configurable(module='rl_trainers')
class Gaussian(Distribution):
    """A diagonal Gaussian, clipped on the way to the environment or squashed by tanh.

    ``bounds='clip'``: the stored action is the Gaussian sample, unbounded; ``to_env`` clips it to
    ``[low, high]``, and the density is of what was sampled, before clipping.

    ``bounds='squash'``: the stored action is ``tanh(u)`` of a Gaussian sample u, in [-1, 1], and
    ``to_env`` maps it affinely, -1 to ``low`` and 1 to ``high``. The density is of the stored
    action and has the Jacobian (Haarnoja et al. 2018, arXiv:1801.01290, appendix C):
    ``log p(a) = log N(u) - sum_i log(1 - tanh(u_i)^2)``. The entropy,
    ``H[N] + sum_i E log(1 - tanh(u_i)^2)``, has no closed form; each expectation is one
    Gauss-Hermite quadrature, so it is deterministic and differentiable. It is at most ``d log 2``,
    that of the uniform density. :meth:`mode` is ``tanh(mean)``.
    """

    def __init__(
        self,
        shape: Sequence[int] = (),
        std: float = 1.0,
        learn_std: str | None = None,
        *,
        low: float | np.ndarray = -np.inf,
        high: float | np.ndarray = np.inf,
        bounds: str = 'clip',
        dtype: Any = np.float32,
    ):
        """Sets the parametrisation and the bounds.

        Args:
            shape: shape of one action, with d elements.
            std: standard deviation of u, in units of the stored action before any tanh; with
                ``learn_std``, its value where the network emits 0.
            learn_std: None for a constant, 'shared' for one more input that every element uses,
                'separate' for one more input per element. The input goes through a softplus.
            low: lower bounds in environment units, ``[*shape]`` or one for all; may be infinite.
            high: upper bounds, likewise.
            bounds: 'clip' or 'squash', see above.
            dtype: float dtype that the environment receives; stored actions are f32.

        Raises:
            ValueError: for an empty shape, a std, learn_std or bounds outside its range, and for
                'squash' where a bound is infinite.
        """
        self._shape = tuple(shape)
        self._dtype = np.dtype(dtype)
        n_dims = int(np.prod(self._shape))
        if n_dims < 1:
            raise ValueError(f'shape={self._shape} must have at least one element')
        if not 0 < std < np.inf or (learn_std and std <= _MIN_LEARNED_STD):
            least = _MIN_LEARNED_STD if learn_std else 0
            raise ValueError(f'std={std} must be finite and greater than {least}')
        if learn_std not in (None, 'shared', 'separate'):
            raise ValueError(f"learn_std={learn_std!r} must be None, 'shared' or 'separate'")
        if bounds not in ('clip', 'squash'):
            raise ValueError(f"bounds={bounds!r} must be 'clip' or 'squash'")
        self._std, self._learn_std, self._n_dims = float(std), learn_std, n_dims
        self.n_inputs = n_dims + {None: 0, 'shared': 1, 'separate': n_dims}[learn_std]
        self._low = np.broadcast_to(np.asarray(low, self._dtype), self._shape)
        self._high = np.broadcast_to(np.asarray(high, self._dtype), self._shape)
        self._squash = bounds == 'squash'
        self._bounded = bool(np.isfinite(self._low).any() or np.isfinite(self._high).any())
        if self._squash and not (np.isfinite(self._low) & np.isfinite(self._high)).all():
            raise ValueError(
                f"bounds='squash' needs finite bounds in every dimension, got "
                f"low={self._low.tolist()}, high={self._high.tolist()}; 'clip' takes infinite ones"
            )

    def __repr__(self) -> str:
        return (f'Gaussian(shape={self._shape}, std={self._std}, learn_std={self._learn_std!r}, '
                f'bounds={"squash" if self._squash else "clip"!r})')

    def _mean_and_std(self, inputs: Array) -> tuple[jax.Array, jax.Array]:
        """Both f32 ``[.., d]``."""
        inputs = self._checked(inputs)
        mean = inputs[..., : self._n_dims]
        if self._learn_std is None:
            return mean, jnp.full_like(mean, self._std)
        excess = self._std - _MIN_LEARNED_STD
        # The inverse of softplus, so that an input of 0 gives the configured std.
        shift = excess + np.log(-np.expm1(-excess))
        std = _MIN_LEARNED_STD + jax.nn.softplus(inputs[..., self._n_dims :] + shift)
        return mean, jnp.broadcast_to(std, mean.shape)

    def _gaussian(self, inputs: Array) -> distrax.Independent:
        return distrax.Independent(distrax.Normal(*self._mean_and_std(inputs)), 1)

    def _stored(self, u: jax.Array) -> jax.Array:
        action = jnp.tanh(u) if self._squash else u
        return action.reshape(action.shape[:-1] + self._shape)

    def sample(self, inputs: Array, key: Array, temperature: Any = 1.0) -> jax.Array:
        """See :meth:`Distribution.sample`; f32 ``[.., *act]``."""
        mean, std = self._mean_and_std(inputs)
        return self._stored(mean + temperature * std * jax.random.normal(key, mean.shape))

    def mode(self, inputs: Array) -> jax.Array:
        """See :meth:`Distribution.mode`; the mean of the Gaussian, squashed if it is."""
        return self._stored(self._mean_and_std(inputs)[0])

    def log_prob(self, inputs: Array, action: Array) -> jax.Array:
        """See :meth:`Distribution.log_prob`; per unit of the stored action."""
        action = jnp.asarray(action, jnp.float32)
        action = action.reshape(action.shape[: action.ndim - len(self._shape)] + (self._n_dims,))
        gaussian = self._gaussian(inputs)
        if not self._squash:
            return gaussian.log_prob(action)
        squashed = distrax.Transformed(gaussian, distrax.Block(distrax.Tanh(), 1))
        return squashed.log_prob(jnp.clip(action, -_INSIDE, _INSIDE))

    def sample_and_log_prob(self, inputs: Array, key: Array) -> tuple[jax.Array, jax.Array]:
        """See :meth:`Distribution.sample_and_log_prob`; exact near the bounds too."""
        mean, std = self._mean_and_std(inputs)
        u = mean + std * jax.random.normal(key, mean.shape)
        log_prob = distrax.Independent(distrax.Normal(mean, std), 1).log_prob(u)
        if self._squash:
            log_prob -= distrax.Block(distrax.Tanh(), 1).forward_log_det_jacobian(u)
        return self._stored(u), log_prob

    def entropy(self, inputs: Array) -> jax.Array:
        """See :meth:`Distribution.entropy`; of the stored action."""
        entropy = self._gaussian(inputs).entropy()
        if not self._squash:
            return entropy
        mean, std = self._mean_and_std(inputs)
        nodes = mean[..., None] + std[..., None] * np.float32(_NODES)
        log_det = distrax.Tanh().forward_log_det_jacobian(nodes) @ np.float32(_WEIGHTS)
        return entropy + log_det.sum(-1)

    def kl(self, inputs_p: Array, inputs_q: Array) -> jax.Array:
        """See :meth:`Distribution.kl`; squashing does not change it."""
        return self._gaussian(inputs_p).kl_divergence(self._gaussian(inputs_q))

    def to_env(self, action: Array) -> Array:
        """See :meth:`Distribution.to_env`; always within the bounds."""
        if not self._squash:
            action = _cast(action, self._dtype)
            return self._clip(action) if self._bounded else action
        wide = _cast(action, np.promote_types(self._dtype, np.float32))
        # This form, and not low + share * (high - low), gives both ends exactly.
        return self._clip(_cast(0.5 * (1 - wide) * self._low + 0.5 * (1 + wide) * self._high,
                                self._dtype))

    def _clip(self, action: Array) -> Array:
        # After the cast: rounding to the space's dtype could step over a bound.
        xp: Any = jnp if isinstance(action, jax.Array) else np
        return xp.minimum(xp.maximum(action, self._low), self._high)

    def from_env(self, action: Array) -> Array:
        """See :meth:`Distribution.from_env`; f32, and in [-1, 1] if it is squashed."""
        if not self._squash:
            return _cast(action, np.dtype(np.float32))
        wide = _cast(action, np.promote_types(self._dtype, np.float32))
        low, high = (bound.astype(wide.dtype) for bound in (self._low, self._high))
        # Halved first, because high - low overflows for bounds near the largest float.
        half = 0.5 * high - 0.5 * low
        share = (wide - (0.5 * low + 0.5 * high)) / np.where(half > 0, half, 1)
        return _cast(share.clip(-1, 1), np.dtype(np.float32))


class Deterministic(Gaussian):
    """The tanh of its inputs as the action, with Gaussian noise of constant ``std`` to explore by.

    The stored action is clipped to [-1, 1], and mapped to the bounds as a squashed Gaussian's. Densities and
    entropies are those of the noise before it is clipped.
    """

    def sample(self, inputs: Array, key: Array, temperature: Any = 1.0) -> jax.Array:
        """See :meth:`Distribution.sample`; f32 ``[.., *act]``."""
        action = self.mode(inputs)
        noise = jax.random.normal(key, action.shape)
        return jnp.clip(action + temperature * self._std * noise, -1.0, 1.0)

    def _gaussian(self, inputs: Array) -> distrax.Independent:
        mean = jnp.tanh(self._checked(inputs))
        return distrax.Independent(distrax.Normal(mean, jnp.full_like(mean, self._std)), 1)

    def log_prob(self, inputs: Array, action: Array) -> jax.Array:
        """See :meth:`Distribution.log_prob`; per unit of the stored action."""
        action = jnp.asarray(action, jnp.float32)
        flat = action.reshape(action.shape[: action.ndim - len(self._shape)] + (self._n_dims,))
        return self._gaussian(inputs).log_prob(flat)

    def sample_and_log_prob(self, inputs: Array, key: Array) -> tuple[jax.Array, jax.Array]:
        """See :meth:`Distribution.sample_and_log_prob`."""
        return Distribution.sample_and_log_prob(self, inputs, key)

    def entropy(self, inputs: Array) -> jax.Array:
        """See :meth:`Distribution.entropy`."""
        return self._gaussian(inputs).entropy()


class Product(Distribution):
    """Independent parts, for ``Dict`` and ``Tuple`` spaces; actions are dicts or tuples."""

    def __init__(self, parts: Mapping[str, Distribution] | Sequence[Distribution]):
        """Joins the parts; ``inputs`` are theirs, one after another, in the order given.

        Raises:
            ValueError: if there is no part.
        """
        if not parts:
            raise ValueError(f'parts={parts!r} must name at least one distribution')
        self._keys: list[Any] | None = list(parts) if isinstance(parts, Mapping) else None
        self._parts: list[Any] = list(parts.values() if isinstance(parts, Mapping) else parts)
        self._splits = np.cumsum([part.n_inputs for part in self._parts])[:-1].tolist()
        self.n_inputs = sum(part.n_inputs for part in self._parts)

    def __repr__(self) -> str:
        return f'Product({self._join(self._parts)!r})'

    def _join(self, values: Sequence[Any]) -> PyTree:
        return tuple(values) if self._keys is None else dict(zip(self._keys, values, strict=True))

    def _split(self, inputs: Array) -> list[jax.Array]:
        return jnp.split(self._checked(inputs), self._splits, axis=-1)

    def _zip(self, *columns: Sequence[Any]) -> Any:
        return zip(self._parts, *columns, strict=True)

    def _leaves(self, action: PyTree) -> list[Any]:
        return [action[key] for key in self._keys or range(len(self._parts))]

    def sample(self, inputs: Array, key: Array, temperature: Any = 1.0) -> PyTree:
        """See :meth:`Distribution.sample`; one key per part."""
        keys = list(jax.random.split(key, len(self._parts)))
        rows = self._zip(self._split(inputs), keys)
        return self._join([part.sample(x, k, temperature) for part, x, k in rows])

    def mode(self, inputs: Array) -> PyTree:
        """See :meth:`Distribution.mode`."""
        return self._join([part.mode(x) for part, x in self._zip(self._split(inputs))])

    def log_prob(self, inputs: Array, action: PyTree) -> jax.Array:
        """See :meth:`Distribution.log_prob`; the sum over the parts."""
        rows = self._zip(self._split(inputs), self._leaves(action))
        return sum(part.log_prob(x, leaf) for part, x, leaf in rows)

    def entropy(self, inputs: Array) -> jax.Array:
        """See :meth:`Distribution.entropy`; the sum over the parts."""
        return sum(part.entropy(x) for part, x in self._zip(self._split(inputs)))

    def kl(self, inputs_p: Array, inputs_q: Array) -> jax.Array:
        """See :meth:`Distribution.kl`; the sum over the parts."""
        rows = self._zip(self._split(inputs_p), self._split(inputs_q))
        return sum(part.kl(p, q) for part, p, q in rows)

    def to_env(self, action: PyTree) -> PyTree:
        """See :meth:`Distribution.to_env`; part by part."""
        return self._join([part.to_env(leaf) for part, leaf in self._zip(self._leaves(action))])

    def from_env(self, action: PyTree) -> PyTree:
        """See :meth:`Distribution.from_env`; part by part."""
        return self._join([part.from_env(leaf) for part, leaf in self._zip(self._leaves(action))])


@gin.configurable(module='rl_trainers')
def create_distribution(
    space: spaces.Space,
    *,
    std: float | None = None,
    learn_std: str | None = None,
    bounds: str | None = None,
) -> Distribution:
    """The distribution over the actions of a space; the table is at the top of the module.

    Args:
        space: Discrete, MultiDiscrete, MultiBinary, Box of floats, or a Dict or Tuple of these.
        std: see :class:`Gaussian`, as for the next two; ``Box`` spaces read them. None leaves the
            choice to ``Gaussian``, whose arguments gin can bind.
        learn_std: None, 'shared' or 'separate'.
        bounds: 'clip' or 'squash'.

    Raises:
        TypeError: for a space that no distribution covers.
        ValueError: from the constructor of the distribution.
    """
    given = {'std': std, 'learn_std': learn_std, 'bounds': bounds}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), start=int(space.start), dtype=space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return Categorical(space.nvec, start=space.start, dtype=space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return Bernoulli(space.shape, dtype=space.dtype)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return Gaussian(space.shape, low=space.low, high=space.high, dtype=space.dtype, **settings)
    if isinstance(space, spaces.Dict):
        return Product({key: create_distribution(part, **settings)
                        for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return Product([create_distribution(part, **settings) for part in space.spaces])
    hint = ' with integers; use MultiDiscrete' if isinstance(space, spaces.Box) else ''
    raise TypeError(
        f'space={space}: no action distribution for {type(space).__name__}{hint}. Supported are '
        f'Discrete, MultiDiscrete, MultiBinary, Box of floats, and Dict and Tuple of these'
    )


def _cast(action: Array, dtype: np.dtype) -> Array:
    """``action`` in ``dtype``, or in the nearest dtype that JAX has; the same object if it is."""
    if isinstance(action, jax.Array):
        return action.astype(jax.dtypes.canonicalize_dtype(dtype))
    return np.asarray(action, dtype)
