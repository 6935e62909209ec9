"""Workers of Flower's simulation whose process died are replaced; others go back among the idle ones."""

import sys

import pytest

pytest.importorskip("flwr")
pytest.importorskip("ray")

from flwr.simulation.ray_transport.ray_actor import BasicActorPool
from ray.exceptions import ActorDiedError

from netweight.plugins.flower.simulation_workers import install, replace_dead_workers


class Pool(BasicActorPool):
    """Flower's pool with names in place of processes."""

    def __init__(self):
        self.pool, self._future_to_actor = ["first"], {}
        self.create_actor_fn = lambda: "new"


@pytest.mark.parametrize(("error", "idle"), [(ActorDiedError(), ["new"]), (ValueError("in a client"), ["first"])])
def test_a_worker_is_replaced_where_its_process_died(error, idle):
    class Changed(Pool):
        """A class of its own, so that Flower's stays as it is."""

    install(Changed)
    install(Changed)
    pool = Changed()
    future = pool.submit(lambda actor, *job: "future", (None, None, "0", None))
    try:
        raise error
    except Exception:
        pool.add_actor_back_to_pool(future)
    assert pool.pool == idle
    assert pool._future_to_actor == {}


def test_a_worker_that_answered_is_idle_again():
    class Changed(Pool):
        """A class of its own, so that Flower's stays as it is."""

    install(Changed)
    pool = Changed()
    pool.add_actor_back_to_pool(pool.submit(lambda actor, *job: "future", (None, None, "0", None)))
    assert pool.pool == ["first"]


def test_nothing_changes_outside_of_a_simulation(monkeypatch):
    monkeypatch.delitem(sys.modules, "flwr.simulation.run_simulation", raising=False)
    before = BasicActorPool.add_actor_back_to_pool
    replace_dead_workers()
    assert BasicActorPool.add_actor_back_to_pool is before
