"""Flower's simulation with worker processes that die: each is replaced, so that the next round goes on.

Flower 1.41 puts the worker of a message that failed back among the idle ones, also where its process has died. The dead
worker fails at once, is idle again before all others, and is given nearly every message from then on: no later round
has enough updates. Ray starts no new process for it, since Flower asks for none.
"""

from __future__ import annotations

import sys
from typing import Any

_ENGINE = "flwr.simulation.run_simulation"
_MARK = "_netweight_replaces_dead_workers"


def replace_dead_workers() -> None:
    """Let Flower's simulation in this process replace a worker whose process died by a new one.

    Nothing happens outside of a simulation, whose engine runs in the server's process.
    """
    if _ENGINE not in sys.modules:
        return
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool

    install(BasicActorPool)


def install(pool_class: Any) -> None:
    """Change the class of a pool of workers so that one whose process died is replaced; a second time does nothing.

    Args:
        pool_class: Flower's `BasicActorPool`.
    """
    from ray.exceptions import RayActorError

    if getattr(pool_class, _MARK, False):
        return
    add_back = pool_class.add_actor_back_to_pool

    def add_actor_back_to_pool(self: Any, future: Any) -> None:
        # Flower calls this while it handles the exception that the message's future raised.
        if isinstance(sys.exc_info()[1], RayActorError):
            self._future_to_actor.pop(future)
            self.pool.append(self.create_actor_fn())
        else:
            add_back(self, future)

    pool_class.add_actor_back_to_pool = add_actor_back_to_pool
    setattr(pool_class, _MARK, True)
