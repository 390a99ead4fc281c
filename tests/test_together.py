"""Many runs in one program against single ones."""

import functools
import signal

import jax
import numpy as np
import pytest

from rl_trainers import AWR, PPOJoint, RLTask, advantages, run_together
from rl_trainers.envs import probe_jax


def make(seed, cls=PPOJoint, gamma=0.9, **kwargs):
    task = RLTask(probe_jax.counting(7, truncates=True), num_envs=4, gamma=gamma, seed=seed)
    options = {"batch_size": 16, "train_steps_per_epoch": 8} if cls is PPOJoint else {}
    return cls(task, n_interactions_per_epoch=32, seed=seed, **{**options, **kwargs})


def difference(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.max(np.abs(np.asarray(a, float) - np.asarray(b, float)))) for a, b in pairs)


def test_seeds_together_learn_what_they_learn_alone(tmp_path):
    def directory(kind, seed):
        return str(tmp_path / f"{kind}_{seed}")

    together = [make(seed, output_dir=directory("together", seed)) for seed in range(3)]
    alone = [make(seed, output_dir=directory("alone", seed)) for seed in range(3)]
    run_together(together, 4, distinct=together[:1])
    for one, other in zip(together, alone, strict=True):
        other.run(4)
        assert difference(one.state, other.state) < 1e-5
        assert difference(one.task.actor, other.task.actor) < 1e-5
        assert one.task.n_interactions() == other.task.n_interactions() == 4 * 4 * 7
        np.testing.assert_allclose(one.avg_returns, other.avg_returns, rtol=1e-6)
        one.close()
        other.close()
    assert difference(together[0].state.params, together[1].state.params) > 1e-3

    # Each can be continued, alone or with the others.
    again = [make(seed, output_dir=directory("together", seed)) for seed in range(3)]
    assert [trainer.current_epoch for trainer in again] == [4, 4, 4]
    run_together(again, 6, n_epochs_is_total_epochs=True, distinct=again[:1])
    alone[2] = make(2, output_dir=directory("alone", 2))
    alone[2].run(2)
    assert difference(again[2].state, alone[2].state) < 1e-5
    for trainer in [*again, alone[2]]:
        trainer.close()


def test_learning_rates_and_hyperparameters_may_differ():
    settings = [{"lr_schedule": 1e-3}, {"lr_schedule": 1e-2}, {"epsilon": 0.01}]
    together = [make(0, **setting) for setting in settings]
    run_together(together, 2)
    for trainer, setting in zip(together, settings, strict=True):
        alone = make(0, **setting)
        alone.run(2)
        assert difference(trainer.state.params, alone.state.params) < 1e-5


def test_other_differences_are_refused():
    with pytest.raises(ValueError, match="differ in more than seeds.*dense<0.8999"):
        run_together([make(0), make(1, gamma=0.5)])
    estimator = functools.partial(advantages.td_lambda, lambda_=0.5)
    with pytest.raises(ValueError, match="differ in more than seeds"):
        run_together([make(0), make(0, advantage_estimator=estimator)])


def test_what_cannot_be_together_is_refused():
    with pytest.raises(ValueError, match="empty"):
        run_together([])
    on_host = PPOJoint(RLTask("CartPole-v1"))
    with pytest.raises(ValueError, match="PPOJoint on CartPole-v1 does not compile whole epochs"):
        run_together([on_host])
    ahead = make(1)
    ahead.run(1)
    with pytest.raises(ValueError, match="different epochs, 0 and 1"):
        run_together([make(0), ahead])


def test_trainers_with_rows_of_their_own_run_together():
    options = {"value_train_steps_per_epoch": 2, "policy_train_steps_per_epoch": 2, "n_replay_epochs": 2}
    together = [make(seed, AWR, **options) for seed in range(2)]
    run_together(together, 3, distinct=together[:1])
    alone = make(1, AWR, **options)
    alone.run(3)
    assert difference(together[1].state.params, alone.state.params) < 1e-5
    kept = [trainer._iteration.kept.rollout.steps for trainer in (together[1], alone)]
    assert difference(kept[0].action, kept[1].action) == 0
    assert difference(kept[0].reward, kept[1].reward) == 0


def test_hooks_and_evaluations_see_every_epoch():
    seen = []
    together = [make(seed, n_eval_episodes=2, on_epoch=seen.append) for seed in range(2)]
    run_together(together, 2, distinct=together[:1])
    assert [record["epoch"] for record in seen] == [1, 1, 2, 2]
    assert all(record["eval_return"] > 0 for record in seen)


def test_one_that_is_stopped_stops_all():
    together = [make(seed) for seed in range(2)]
    together[1].on_epoch = lambda record: together[1].stop() if record["epoch"] == 2 else None
    run_together(together, 5, distinct=together[:1])
    assert [trainer.current_epoch for trainer in together] == [2, 2]
    alone = make(0)
    alone.run(2)
    assert difference(together[0].state, alone.state) < 1e-5


def test_an_interrupt_leaves_trainers_where_they_stand(monkeypatch, tmp_path, interrupts):
    together = [make(seed, output_dir=str(tmp_path / str(seed))) for seed in range(2)]
    take_in = together[0]._iteration.take_in

    def interrupted(*arguments):
        if together[0].current_epoch > 2:
            signal.raise_signal(signal.SIGINT)
        return take_in(*arguments)

    monkeypatch.setattr(together[0]._iteration, "take_in", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_together(together, 10_000, distinct=together[:1])
    monkeypatch.undo()
    n_epochs = together[0].current_epoch
    assert n_epochs < 10_000
    for seed, trainer in enumerate(together):
        assert trainer.current_epoch == n_epochs
        assert trainer.state.step == 8 * n_epochs
        trainer.close()
        again = make(seed, output_dir=str(tmp_path / str(seed)))
        assert again.current_epoch == n_epochs
        again.close()
