"""`CaseRunner`: runs the cases and mutants of one task in this process, and returns their outcomes as plain values.

References are computed once. Processes with the same folder share them.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.errors import ConfigError, SpmdkitError
from spmdkit.foundation import files
from spmdkit.foundation.formatting import format_error
from spmdkit.program import compiler
from spmdkit.program.program import Program
from spmdkit.step import gradient, trace_context
from spmdkit.step.checks.return_values import checked_loss
from spmdkit.step.leaf_roles import differentiated
from spmdkit.step.state import TrainState
from spmdkit.step.step import Batch
from spmdkit.verify import compare, mutants, mutations
from spmdkit.verify.cases import exact_reducer
from spmdkit.verify.diagnosis import Difference, diagnose, find_difference
from spmdkit.verify.locate import Locator
from spmdkit.verify.noise import Noise, leaf_errors
from spmdkit.verify.probes import one_ulp, working_dtype
from spmdkit.verify.task_runner import Results, Setting, TaskRunner, Tree, flat
from spmdkit.verify.unpadded_reference import Unpadded


class Reference(NamedTuple):
    """The one-device results, the tolerance, the effect of one ulp in the input, the noise, and the dtype of that
    ulp."""

    results: Results
    tolerance: dict[str, float]
    moved: dict[str, float]
    noise: Noise
    dtype: str


class CaseRunner:
    """Compares settings of a task with one device.

    Args:
        folder: the folder in which processes share references.
        locate: `cases` locates failed cases, `all` also locates mutants.
    """

    def __init__(self, task_runner: TaskRunner, folder: Path | None = None, locate: Literal["", "cases", "all"] = ""):
        self.task_runner, self._folder, self.locate = task_runner, folder, locate
        self._references: dict[str, Reference] = {}
        self._base: Program | Unpadded | None = None  # of the first reference, until the comparison with plain JAX
        self._locator = Locator(task_runner)

    # ---- references

    def reference(self, setting: Setting, evaluated: bool = True) -> Reference:
        """Returns the reference of a setting: the simplest program on one device.

        A per-replica step with `axis_name` has one reference per number of replicas. A task with model state, or a loss
        that calls sk.all_gather, has one per number of microbatches, since batch statistics and gathered rows are those
        of a microbatch. If the config has short batches, the reference is not padded, except with several microbatches.
        """
        replicas = self.task_runner.replicas(setting.mesh)
        first = self._one(Setting({}, 1, setting.short, setting.clip_norm, True, replicas), evaluated=True)
        if setting.microbatches == 1 or not _of_a_microbatch(first.results):
            return first
        return self._one(Setting({}, setting.microbatches, setting.short, setting.clip_norm, True, replicas), evaluated)

    def _one(self, setting: Setting, evaluated: bool) -> Reference:
        evaluated = evaluated and self._is_of_cases(setting)
        whole, key = (repr((setting, e)) for e in (True, evaluated))
        if whole in self._references:
            return self._references[whole]
        if key not in self._references:
            name = f"reference-{hashlib.sha256(key.encode()).hexdigest()[:16]}.pickle"
            path = None if self._folder is None else self._folder / name
            if path is not None and path.exists():
                self._references[key] = pickle.loads(path.read_bytes())
            else:
                self._references[key] = self._make(setting, evaluated)
                if path is not None:
                    files.replace(path, pickle.dumps(self._references[key]))
        return self._references[key]

    def _make(self, setting: Setting, evaluate: bool) -> Reference:
        task_runner = self.task_runner
        program = self._plain_program(setting, evaluate)
        results = task_runner.run(program, evaluate=evaluate)

        def probe(i: int) -> Results:
            return task_runner.run(program, evaluate=evaluate, moved=one_ulp(np.random.default_rng(i), dtype))

        dtype = working_dtype(program) if task_runner.dtype == "float64" else task_runner.dtype
        probes = [probe(i) for i in range(compare.NUM_PROBES)]
        if self._is_first(setting):
            self._base = program
        return Reference(results, *compare.tolerances(results, probes, float(np.finfo(dtype).eps)), dtype)

    def _plain_program(self, setting: Setting, evaluated: bool) -> Program | Unpadded:
        # Short batches of a mutant are not in the user's config. A loss for full batches only may mix examples.
        as_configured = setting.short == self.task_runner.short
        first = self._is_first(setting)
        program = self.task_runner.program(setting, probe=first, evaluated=evaluated)
        if not (as_configured and setting.short and setting.microbatches == 1) or program.schedule.always_full:
            return program
        if first:
            (_, batch), *_ = program.batches(stop=1)
            program.check_padding(program.init(), batch)
        return Unpadded(program)

    def _is_of_cases(self, setting: Setting) -> bool:
        """Returns whether this setting is a reference of cases. Settings used by mutants only are not evaluated."""
        return setting.short == self.task_runner.short and setting.clip_norm is None

    def _is_first(self, setting: Setting) -> bool:
        return self._is_of_cases(setting) and setting.microbatches == 1

    def compare_with_plain_jax(self) -> dict[str, Any]:
        """Returns the errors of spmdkit on one device relative to `jax.value_and_grad` of the user's loss, or
        `not_applicable` with the reason."""
        loss_fn = self.task_runner.loss_fn
        if loss_fn is None:
            return {"not_applicable": "the task has its own train_step, and no loss to compare"}
        setting = Setting({}, short=self.task_runner.short, plain=True)
        reference = self.reference(setting)
        program, self._base = self._base or self.task_runner.program(setting, evaluated=False), None
        if program._step_context.sharding.explicit:
            return {"not_applicable": "the loss is in JAX's explicit sharding mode"}
        (_, batch), *_ = program.batches(stop=1)
        expected, actual = plain_value_and_grad(program, loss_fn, program.init(), batch), reference.results.batches[0]
        roles = program._step_context.options.roles
        trained = {path: x for path, x in expected.gradient.items() if path not in roles}
        errors = leaf_errors(actual.gradient, trained)
        worst = max(errors, key=lambda path: np.nan_to_num(errors[path], nan=np.inf))
        outcome = {"loss_error": compare.number_error(actual.loss, expected.loss), "gradient_error": errors[worst]}
        passed = all(outcome[f"{q}_error"] <= reference.tolerance[q] for q in ("loss", "gradient"))
        return outcome | {"worst_leaf": worst, "passed": bool(passed)}

    # ---- cases

    def case(self, mesh: dict[str, int], microbatches: int, whole: bool) -> dict[str, Any]:
        """Returns the outcome of one case: its errors and `passed`, or `skipped` with the reason.

        Args:
            whole: also evaluate, and save and restore the state.
        """
        begin = time.perf_counter()
        setting = Setting(mesh, microbatches, short=self.task_runner.short)
        name = self._name(setting)
        try:
            reference = self.reference(setting, evaluated=whole)
        except ConfigError as error:  # a train_step has no microbatches
            if microbatches == 1:
                raise
            return name | {"skipped": _first_line(error)}
        if not mesh and microbatches > 1 and (why := _of_a_microbatch(reference.results)):
            return name | {"skipped": f"this is the reference: {why} are those of a microbatch"}
        try:
            program = self.task_runner.program(setting, evaluated=whole)
        except ConfigError as error:
            return name | {"skipped": _first_line(error)}
        found = self.task_runner.run(program, evaluate=whole, restore=whole)
        errors = compare.compare(found, reference.results, reference.noise)
        failed = errors.failed(reference.tolerance)
        outcome = name | compare.as_numbers(errors)
        outcome |= {"worst_leaf": errors.leaf.get("gradient", ""), "form": found.form, "passed": not failed}
        if failed:
            finding = find_difference(
                found, reference.results, errors, reference.tolerance, reference.noise, setting.short
            )
            diagnosis = diagnose(finding, mesh, microbatches, lambda: self.key_matters, lambda: self.examples_interact)
            outcome |= {"failed": failed, "worst_leaf": finding.leaf, "diagnosis": diagnosis._asdict()}
            outcome |= self._located(setting, program, finding) if self.locate else {}
        del program
        jax.clear_caches()
        return outcome | {"seconds": round(time.perf_counter() - begin, 2)}

    def _located(self, setting: Setting, program: Program, finding: Difference) -> dict[str, Any]:
        try:
            location = self._locator(setting, program, finding.quantity, finding.batch)
        except Exception as error:  # noqa: BLE001 - the case has failed anyway; its location is optional
            return {"located": None, "not_located": f"{type(error).__name__}: {_first_line(error)}"}
        if location is None:
            return {"located": None, "not_located": "no single line is the first to differ"}
        return {"located": {**location._asdict(), "text": location.text}}

    def _name(self, setting: Setting) -> dict[str, Any]:
        config = self.task_runner.config
        zero = {"zero": config.layout.zero} if setting.mesh.get("fsdp", 1) > 1 else {}
        reducer = exact_reducer(config)
        return {
            "mesh": setting.mesh,
            "microbatches": setting.microbatches,
            "reducer": reducer,
            "sync": "every_step",
            **zero,
        }

    @functools.cached_property
    def key_matters(self) -> bool:
        """Whether another plain key of the loss changes the gradient on one device."""

        def other(loss_key: Any, key: Any, replica: Any, micro: Any) -> Any:
            return loss_key(key, replica + 1, micro)

        setting = Setting({}, plain=True)
        with mutations.seam(gradient, "loss_key", other)(setting) as used:
            return self._differs(setting) and bool(used)

    @functools.cached_property
    def examples_interact(self) -> bool:
        """Whether two microbatches on one device change the gradient of full batches."""
        return self._differs(Setting({}, 2, plain=True))

    def _differs(self, setting: Setting) -> bool:
        expected = self.reference(Setting({}, short=self.task_runner.short))
        try:
            found = self.task_runner.run(self.task_runner.program(setting, evaluated=False))
        except SpmdkitError:
            return False
        found.batches, results = found.batches[:1], expected.results
        errors = leaf_errors(found.batches[0].gradient, results.batches[0].gradient)
        return any(not e <= expected.tolerance["gradient"] for e in errors.values())

    # ---- mutants

    def mutant(self, name: str, num_devices: int) -> dict[str, Any]:
        """Returns the outcome of a mutant: `caught` with the failed check, or `not_applicable` with the reason."""
        begin = time.perf_counter()
        mutant = mutants.by_name(name)
        outcome: dict[str, Any] = {"name": name, "description": mutant.description}
        settings = mutant.settings(self._known(num_devices))
        if isinstance(settings, str):
            return outcome | {"not_applicable": settings}
        reason = ""
        for setting in settings:
            outcome["mesh"], outcome["microbatches"] = setting.mesh, setting.microbatches
            tried = self._try(mutant, setting)
            if "not_applicable" not in tried:
                return outcome | tried | {"seconds": round(time.perf_counter() - begin, 2)}
            reason = reason or tried["not_applicable"]
            if tried["not_applicable"] == mutant.unused:
                break  # the program does not call the changed function, nor does it on the remaining meshes
        return outcome | {"not_applicable": reason}

    def _known(self, num_devices: int) -> mutants.TaskFacts:
        results = self.reference(Setting({}, short=self.task_runner.short)).results
        squares = [float(np.sum(np.asarray(x, np.float64) ** 2)) for x in results.batches[0].gradient.values()]
        return mutants.TaskFacts(num_devices, results.uses, float(np.sqrt(sum(squares))))

    def _try(self, mutant: mutants.Mutant, setting: Setting) -> dict[str, Any]:
        short = setting.short or self.task_runner.short
        original, setting = setting, Setting(setting.mesh, setting.microbatches, short, setting.clip_norm)
        try:
            jax.clear_caches()  # JAX would reuse parts of the step that were traced without the bug
            with mutant.apply(setting) as acted:
                program = self.task_runner.program(setting, evaluated=False)
                if mutant.traced and not acted:
                    return {"not_applicable": mutant.unused}
                found = self.task_runner.run(program, restore=mutant.restore)
        except ConfigError as error:
            return self._rejected(original, acted, _first_line(error))
        finally:
            jax.clear_caches()
        if not acted:
            return {"not_applicable": mutant.unused}
        reference = self.reference(setting, evaluated=False)
        errors = compare.compare(found, reference.results, reference.noise)
        failed = errors.failed(reference.tolerance)
        if not failed:
            if mutant.no_effect and self._changes_nothing(setting, found, reference):
                return {"not_applicable": mutant.no_effect}
            return {"caught": False, "by": "nothing"}
        finding = find_difference(found, reference.results, errors, reference.tolerance, reference.noise, short)
        diagnosis = diagnose(finding, setting.mesh, setting.microbatches, lambda: False, lambda: False)
        by = "gradient" if "gradient" in failed else failed[0]
        located = self._located(setting, program, finding) if self.locate == "all" else {}
        return {
            "caught": True,
            "by": f"{by} {format_error(errors.worst[by] or 0.0)}",
            "diagnosis": diagnosis._asdict(),
            **located,
        }

    def _changes_nothing(self, setting: Setting, found: Results, reference: Reference) -> bool:
        unchanged = self.task_runner.run(self.task_runner.program(setting, evaluated=False))
        floor = compare.FLOOR_ULPS * float(np.finfo(reference.dtype).eps)
        return not compare.compare(found, unchanged, reference.noise).failed(dict.fromkeys(compare.QUANTITIES, floor))

    def _rejected(self, setting: Setting, acted: list[Any], why: str) -> dict[str, Any]:
        """Returns the outcome of a rejected mutant: caught if the program without the bug is accepted."""
        try:
            self.task_runner.program(setting)
        except ConfigError as error:
            return {"not_applicable": _first_line(error)}
        return {"caught": True, "by": f"rejected: {why}"} if acted else {"not_applicable": why}


def _of_a_microbatch(results: Results) -> str:
    """Returns a description of the values computed per microbatch, which make several microbatches a different step on
    one device too; or an empty string."""
    if results.model_state:
        return "with model state, batch statistics"
    return "in a loss with sk.all_gather, the gathered rows" if "all_gather" in results.uses else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


class PlainResult(NamedTuple):
    """The loss of one batch at the initial parameters, and its gradient by path."""

    loss: float
    gradient: Tree


def plain_value_and_grad(
    program: Program | Unpadded, loss_fn: Callable[..., Any], state: TrainState, batch: Batch
) -> PlainResult:
    """Returns the plain JAX result of one batch. The rows are in the order of a one-device program without
    microbatches."""
    num = jax.tree.leaves(batch.examples)[0].shape[0]
    examples = trace_context.Examples(num, batch.mask, jnp.arange(num, dtype=jnp.int32), state.key)

    options = program._step_context.options
    context = trace_context.Context(
        trace_context.ShardingSpec(mesh=program.mesh, roles=program.config.roles),
        trace_context.StepOptions(logical_axes=options.logical_axes, flax_rules=options.flax_rules),
    )

    def value(params: Any, rows: Any) -> jax.Array:
        arguments = (
            params,
            *((state.model_state,) if program.stateful else ()),
            rows,
            gradient._loss_key(state.key, 0, 0),
        )
        with trace_context.tracing(context), trace_context.with_examples(examples):
            loss, _, _ = checked_loss(loss_fn(*arguments), program.stateful)
        return loss.value

    def over_one_replica(params: Any) -> jax.Array:
        rows = jax.tree.map(lambda x: x[None, None], batch.examples)
        by_data = jax.vmap(value, (None, 0), axis_name="data")
        return jax.vmap(by_data, (None, 0), axis_name="replica")(params, rows)[0, 0]

    both = jax.jit(jax.value_and_grad(over_one_replica, allow_int=True), compiler_options={**compiler.quick_options()})
    loss, grads = both(differentiated(state.params))
    return PlainResult(float(loss), flat(grads))
