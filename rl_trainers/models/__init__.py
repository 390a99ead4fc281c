"""Networks: a small Flax linen zoo, and the adapters that make any network a :class:`Model`.

This is the only package that knows a network library. A trainer is given a *factory*, which it calls as
``factory(policy_distribution=..., mode=...)`` (arguments that the factory does not take are left out) and
which returns a linen or nnx module, a Trax layer, a pair ``(init, apply)`` of functions, or a
:class:`Model`. A factory with an argument ``rngs`` gets ``flax.nnx.Rngs``, seeded by the trainer.

Networks see observations with exactly one leading axis. Before that every leaf of the observation is made
a float: images (uint8) are divided by 255, here and nowhere else; ``Discrete`` and ``MultiDiscrete``
become one-hot vectors; ``Dict`` and ``Tuple`` keep their structure. Actions, where a network takes them,
are treated likewise.

What a *sequence network* says of a row depends on earlier rows of the same episode, see
:func:`rl_trainers.models.adapters.adapt`. :class:`Policy`, :class:`Value` and :class:`PolicyAndValue` are
sequence networks if they stand on one, such as :class:`TransformerDecoder`, :class:`GRU` or :class:`LSTM`;
the last two are *recurrent*: what they remember of earlier rows is carried along as the policy's state.
"""

from rl_trainers.models.adapters import Model, call, features
from rl_trainers.models.building import build, build_pair, default
from rl_trainers.models.zoo import (
    GRU,
    LSTM,
    MLP,
    AtariCnn,
    LayerNormSquash,
    Normalize,
    Policy,
    PolicyAndValue,
    Quality,
    TransformerDecoder,
    Value,
)

__all__ = [
    "GRU",
    "LSTM",
    "MLP",
    "AtariCnn",
    "LayerNormSquash",
    "Model",
    "Normalize",
    "Policy",
    "PolicyAndValue",
    "Quality",
    "TransformerDecoder",
    "Value",
    "build",
    "build_pair",
    "call",
    "default",
    "features",
]
