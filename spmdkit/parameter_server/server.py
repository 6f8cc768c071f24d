"""A server stores its leaves, applies gradients as they arrive, and records the applied ones.

A push is identified by (worker, incarnation, number). `last_push` is the response to the last push of each worker, and
is part of the saved state. A push that is repeated after a lost response or a restart is acknowledged but not applied.
An incarnation is one start of a worker. Pushes of an earlier one are rejected once the coordinator has detected its
exit. A generation is one history of the servers' state. When a server dies, all servers restore the last checkpoint,
and gradients of lost updates are rejected. A batch that another server has not received is assigned again
(completed_batches.py).

    staleness = updates applied here since the worker pulled;    w <- w + optimizer(g) [/ max(1, staleness)]

`aggregate` k > 1 waits for the gradients of k workers at the same parameters, and applies their mean weighted by the
counts of their losses. Later gradients are dropped (backup workers). Each server decides independently.

Methods are called one at a time and return immediately. A repeated call returns the same response.

Source: Chen et al., "Revisiting Distributed Synchronous SGD" (2016), backup workers; Zhang et al., "Staleness-aware
Async-SGD" (2016), the division by the staleness; TensorFlow's `ConditionalAccumulator`.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdkit.parameter_server.completed_batches import BatchSet, LeafGroup, group_from_row, merge
from spmdkit.parameter_server.messages import PulledParams, Push, Response, Rules
from spmdkit.parameter_server.partition import Arrays, holder_of, to_arrays, to_tree

RECORDS = 4096
"""Maximum number of applied pushes in one report. The coordinator polls several times a second."""


class Server:
    """One server. It has no state until `install`.

    Args:
        abstract: its (abstract) parameters, a tree with None for the leaves of other servers.
        donate: an update may reuse the memory of the old parameters, since no worker shares it.
    """

    def __init__(self, optimizer: Any, abstract: Any, rules: Rules, donate: bool):
        self._optimizer, self._abstract, self._rules = optimizer, abstract, rules
        self._lock = threading.Lock()
        self._apply = jax.jit(self._updated, donate_argnums=(0,) if donate else ())
        self._apply_to_some = jax.jit(self._updated)
        self._paths = frozenset(to_arrays(abstract))
        self._opt_abstract = jax.eval_shape(optimizer.init, abstract)
        self._state: dict[str, Any] | None = None
        self.generation = -1
        self._members = 1
        self._ready: dict[int, int] = {}  # worker -> incarnation that is ready
        self._forget()

    def _forget(self) -> None:
        self._last_push: dict[int, tuple[int, int, Response]] = {}
        self._histogram: Counter[int] = Counter()
        self._dropped: Counter[str] = Counter()
        self._progress: Counter[int] = Counter()
        self._pending: list[Push] = []
        self._records: deque[dict[str, Any]] = deque(maxlen=RECORDS)
        self._num_records = 0
        self._model_state: Arrays | None = None
        self._next_batch, self._unassigned = 1, list[int]()
        self._groups = [LeafGroup(self._paths, BatchSet(1), 0)]
        self._last_completed: dict[int, int] = {}  # worker -> its last completed batch
        self._assigned: dict[int, dict[int, int]] = {}  # worker -> number of the push -> batch

    @property
    def applied(self) -> int:
        """The smallest number of updates over the leaves."""
        return min(part.applied for part in self._groups)

    # ---- calls of the coordinator ------------------------------------------------------------------------------------

    def install(
        self, generation: int, arrays: Mapping[str, Arrays], table: Mapping[str, Any], members: Mapping[int, int]
    ) -> None:
        """Installs a state and the table of a snapshot: `params`, `opt_state` (None: initialize) and `ema` by path, and
        `model_state`. `members`: worker -> its incarnation."""
        with self._lock:
            if generation <= self.generation:
                return
            self._forget()
            own: Callable[[Any, Any], Any] = lambda tree, given: jax.tree.map(jnp.array, to_tree(tree, given))
            params = own(self._abstract, arrays["params"])
            given = arrays.get("opt_state")
            opt_state = self._optimizer.init(params) if given is None else own(self._opt_abstract, given)
            ema = own(self._abstract, arrays["ema"]) if arrays.get("ema") is not None else None
            self._state = {"params": params, "opt_state": opt_state, "ema": ema}
            self._model_state = arrays.get("model_state")
            applied, again = int(table["applied"]), list(table.get("again", ()))
            self.generation, self._unassigned = generation, again
            self._next_batch = int(table.get("next_batch", applied + 1))
            self._groups = [group_from_row(row) for row in table.get("parts", ())]
            self._groups = self._groups or [LeafGroup(self._paths, BatchSet(min([self._next_batch, *again])), applied)]
            for worker, incarnation, number, outcome in table.get("last_push", ()):
                self._last_push[worker] = (incarnation, number, Response(outcome, self.applied))
            for worker, incarnation in members.items():
                self._fence(worker, incarnation)
            self._members = len(members)
            self._histogram.update({int(k): v for k, v in table.get("histogram", ())})
            self._dropped.update(dict(table.get("dropped", ())))
            self._progress.update({int(k): v for k, v in table.get("progress", ())})

    def admit(self, worker: int, incarnation: int, members: int) -> int | None:
        """Records a worker's new incarnation. Pushes of the old one are rejected, and its batches are assigned to other
        workers. Returns the worker's last batch that this server has completed."""
        with self._lock:
            self._fence(worker, incarnation)
            self._members = members
            self._unassigned += self._assigned.pop(worker, {}).values()
            self._apply_pending()
            return self._last_completed.get(worker)

    def reassign(self, batch: int) -> None:
        """Records on the first server that another server has not received a batch."""
        with self._lock:
            if batch not in self._unassigned and not any(batch in of.values() for of in self._assigned.values()):
                self._unassigned.append(batch)

    def _fence(self, worker: int, incarnation: int) -> None:
        last_push = self._last_push.get(worker)
        if last_push is None or last_push[0] < incarnation:
            self._last_push[worker] = (incarnation, -1, Response("none", self.applied))

    def status(self, cursor: int) -> dict[str, Any]:
        """Returns the status of the server, with its records from index `cursor` on."""
        with self._lock:
            new = min(max(0, self._num_records - cursor), len(self._records))
            records = list(self._records)[len(self._records) - new :]
            return {
                "installed": self._state is not None,
                "here": sorted(self._ready),
                "generation": self.generation,
                "applied": self.applied,
                "records": records,
                "cursor": self._num_records,
                "histogram": dict(self._histogram),
                "dropped": dict(self._dropped),
                "progress": dict(self._progress),
            }

    def snapshot(self) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """Returns (generation, arrays as for `install`, table), a consistent snapshot of the state and the applied
        pushes; None without a state."""
        with self._lock:
            if self._state is None:
                return None
            arrays: dict[str, Any] = {"model_state": self._model_state}
            for name, tree in self._state.items():
                if tree is not None:
                    arrays[name] = {path: np.array(x) for path, x in to_arrays(tree).items()}
            waiting = [p.batch for p in self._pending] + [b for of in self._assigned.values() for b in of.values()]
            pending, last_push = {(push.worker, push.number) for push in self._pending}, []
            for worker, (incarnation, number, response) in self._last_push.items():
                is_pending = (worker, number) in pending
                last_push.append((worker, incarnation, number - is_pending, "none" if is_pending else response.outcome))
            table = {
                "applied": self.applied,
                "last_push": last_push,
                "next_batch": self._next_batch,
                "again": sorted({*self._unassigned, *waiting}),
                "parts": [part.row() for part in self._groups],
                "histogram": sorted(self._histogram.items()),
                "dropped": sorted(self._dropped.items()),
                "progress": sorted(self._progress.items()),
            }
            return self.generation, arrays, table

    # ---- calls of workers --------------------------------------------------------------------------------------------

    def register(self, worker: int, incarnation: int) -> None:
        """Records on the first server that a worker is ready to compute."""
        with self._lock:
            self._ready[worker] = incarnation

    def take_batch(self, worker: int, incarnation: int, number: int) -> int | None:
        """Returns the batch for a worker's push `number`, on the first server. A repeated call returns the same batch.
        None: no state, or the worker has another incarnation."""
        with self._lock:
            if self._state is None or incarnation < self._last_push.get(worker, (0,))[0]:
                return None
            assigned = self._assigned.setdefault(worker, {})
            if number not in assigned:
                if self._unassigned:
                    assigned[number] = self._unassigned.pop(0)
                else:
                    assigned[number], self._next_batch = self._next_batch, self._next_batch + 1
            return assigned[number]

    def pull(self, newer_than: tuple[int, int] = (-1, -1)) -> PulledParams | None:
        """Returns the parameters; None if there are none yet, or none newer than (generation, version) while updates
        remain."""
        with self._lock:
            if self._state is None:
                return None
            done = self.applied >= self._rules.steps
            if (self.generation, self.applied) <= tuple(newer_than) and not done:
                return None
            params = {path: np.asarray(x) for path, x in to_arrays(self._state["params"]).items()}
            return PulledParams(self.generation, self.applied, done, params, self._model_state)

    def push(self, push: Push) -> Response:
        """Processes a push. A repeated push is acknowledged and not applied again."""
        with self._lock:
            if self._state is None or push.generation != self.generation:
                return Response("generation", self.applied)
            incarnation, number, before = self._last_push.get(push.worker, (0, -1, Response("none", 0)))
            if push.incarnation < incarnation:
                return Response("fenced", self.applied)
            if push.incarnation == incarnation and push.number <= number:
                return before if push.number == number else Response("fenced", self.applied)
            response = Response("again", self.applied) if self._is_closed(push.batch) else self._process_push(push)
            self._last_push[push.worker] = (push.incarnation, push.number, response)
            self._assigned.get(push.worker, {}).pop(push.number, None)
            if response.outcome == "pending":
                self._pending.append(push)
                self._apply_pending()
            elif response.outcome == "done":
                self._unassigned.append(push.batch)  # for a resumed run
            else:
                self._last_completed[push.worker] = push.batch
                if response.outcome != "applied":
                    self._dropped[response.outcome] += 1
            return self._last_push[push.worker][2]

    def _is_closed(self, batch: int) -> bool:
        """Returns whether a batch is closed for all leaves, even if only some have applied it."""
        if any(p.batch == batch for p in self._pending) or all(batch in part.completed for part in self._groups):
            return True
        return self.applied < self._rules.steps and not any(self._is_missing(part, batch) for part in self._groups)

    def _is_missing(self, part: LeafGroup, batch: int) -> bool:
        return part.applied < self._rules.steps and batch not in part.completed

    def _process_push(self, push: Push) -> Response:
        staleness = self.applied - push.version
        if self.applied >= self._rules.steps:
            return Response("done", self.applied, staleness)
        most, together = self._rules.max_staleness, self._rules.aggregate > 1
        if push.gradient is not None and together and staleness == 0:
            return Response("pending", self.applied, staleness)
        if push.gradient is not None and not together and (most is None or staleness <= most):
            self._update([push], staleness)
            return Response("applied", self.applied, staleness)
        for part in self._groups:
            part.completed.add(push.batch)
        outcome = "skipped" if push.gradient is None else "late" if together else "stale"
        return Response(outcome, self.applied, staleness)

    def _apply_pending(self) -> None:
        """Applies the mean of the held gradients once `aggregate` workers, or all live workers, have sent one."""
        pending, enough = self._pending, min(self._rules.aggregate, max(1, self._members))
        if len(pending) < enough:
            return
        self._pending = []
        self._update(pending, 0)
        for push in pending:
            self._last_completed[push.worker] = push.batch
            self._last_push[push.worker] = (push.incarnation, push.number, Response("applied", self.applied, 0))

    def _update(self, pushes: list[Push], staleness: int) -> None:
        """Applies the mean of gradients to each leaf, without those that the leaf has already applied."""
        assert self._state is not None
        of_groups = [[push for push in pushes if self._is_missing(part, push.batch)] for part in self._groups]
        gradient: Arrays = {}
        for part, missing in zip(self._groups, of_groups, strict=True):
            gradient |= mean_of(missing or pushes, part.paths)
        total = sum(push.weight for push in pushes) or 1.0
        loss = sum(push.loss * push.weight / total for push in pushes)
        scale = 1 / max(1, staleness) if self._rules.scale_by_staleness else 1.0
        args = to_tree(self._abstract, gradient), np.float32(loss), np.float32(scale)
        if all(of_groups):
            self._state = self._apply(self._state, *args)
        else:
            self._state = self._with_old_leaves(self._apply_to_some(self._state, *args), of_groups)
        jax.block_until_ready(self._state)  # the input (a view of the transport's memory) is unused from here on
        for part, missing in zip(self._groups, of_groups, strict=True):
            part.applied += bool(missing)
            for push in missing:
                part.completed.add(push.batch)
        self._groups = merge(self._groups) if len(self._groups) > 1 else self._groups
        states = [push.report["state"] for push in pushes if push.report and "state" in push.report]
        if states:
            self._model_state = _merged_model_state(self._model_state, states, fresh=staleness == 0)
        for push in pushes:
            self._note(push, staleness)

    def _with_old_leaves(self, new: dict[str, Any], of_groups: list[list[Push]]) -> dict[str, Any]:
        """Returns the state with the old leaves of closed parts. State that belongs to no leaf (a count of updates)
        follows the first part."""
        group_of = {path: i for i, part in enumerate(self._groups) for path in part.paths}
        old, arrays = to_arrays(self._state), to_arrays(new)
        pick: Callable[[str], Any] = lambda path: (arrays if of_groups[holder_of(path, group_of) or 0] else old)[path]
        state: dict[str, Any] = to_tree(new, {path: pick(path) for path in arrays})
        return state

    def _updated(self, state: dict[str, Any], gradient: Any, loss: Any, scale: Any) -> dict[str, Any]:
        params, ema, decay = state["params"], state["ema"], self._rules.ema
        updates, opt_state = self._optimizer.update(gradient, state["opt_state"], params, value=loss)
        if self._rules.scale_by_staleness:
            updates = jax.tree.map(lambda u: u * scale.astype(u.dtype), updates)
        params = optax.apply_updates(params, updates)
        if decay is not None:
            ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p.astype(e.dtype), ema, params)
        return {"params": params, "opt_state": opt_state, "ema": ema}

    def _note(self, push: Push, staleness: int) -> None:
        self._histogram[staleness] += 1
        self._progress[push.worker] += 1
        record = {name: getattr(push, name) for name in ("worker", "batch", "loss", "weight")}
        metrics = (push.report or {}).get("metrics", {})
        self._records.append(record | {"step": self.applied, "staleness": staleness, "metrics": metrics})
        self._num_records += 1


def _merged_model_state(current: Arrays | None, states: Sequence[tuple[Arrays, Arrays]], fresh: bool) -> Arrays:
    """Returns the model state after workers' steps, given (old, new) of each.

    For one worker that started from the current state, it is that worker's result. Otherwise numbers change by the mean
    of the workers' changes, and values that cannot be added (flags) are those of the last worker.
    """
    _, last = states[-1]
    if current is None or (fresh and len(states) == 1):
        return dict(last)

    def moved_leaf(path: str) -> Any:
        if not (np.issubdtype(last[path].dtype, np.number) or last[path].dtype.name == "bfloat16"):
            return last[path]
        total = sum((new[path] - old[path] for old, new in states[1:]), start=states[0][1][path] - states[0][0][path])
        return current[path] + (total / len(states)).astype(total.dtype)

    return {path: moved_leaf(path) for path in last}


def mean_of(pushes: list[Push], paths: Iterable[str]) -> Arrays:
    """Returns the mean of gradients, weighted by the counts of their losses, for some leaves."""
    if len(pushes) == 1:
        return {path: (pushes[0].gradient or {})[path] for path in paths}
    total = sum(push.weight for push in pushes) or 1.0
    parts = [(push.gradient or {}, push.weight / total) for push in pushes]
    return {path: sum(g[path] * np.asarray(share, g[path].dtype) for g, share in parts) for path in paths}
