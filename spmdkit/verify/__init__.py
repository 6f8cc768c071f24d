"""`verify`: the proof that cutting a task over a mesh does not change what it computes.

task_runner.py  the user's task, made ready to be compared, run on one mesh         -> Results
compare.py      errors between two results, and how large they may be;  noise.py  what is rounding alone
dtypes.py       numbers of any width, complex too
difference.py   where two results part, in numbers;  diagnosis.py  what that means, and the repair
locate.py       which line is the first to differ;  tracing.py  a step with all its values;  sharding_relation.py  a
value here and there
search.py       the walk from results that differ back to where they begin to;  locate_step.py  the same for a step of
`sk.verify`
mutants.py      programs with one known mistake, which have to be caught;  mutations.py, user_mistakes.py  the mistakes
runner.py       a case or a mutant -> its outcome, in this process;  worker.py, pool.py  in others
cases.py        which meshes;  report.py  all of them -> a report;  table.py  for people;  certificate.py  for `train`;
command.py
external_step.py  `sk.verify(make, meshes=[...])`: a step that uses nothing of spmdkit;  device_binding.py  which
devices it holds

The package itself is what a user calls: `sk.verify(make, meshes=[...])`.
"""

import sys
import types
from typing import Any

from spmdkit.verify.report import VerifyOptions, verify

__all__ = ["VerifyOptions", "verify"]


class _Package(types.ModuleType):
    """This package as a function: one name for the folder and for what is called."""

    def __call__(self, make: Any, **options: Any) -> Any:
        """Compares a hand-written step on meshes with one device: `spmdkit.verify.external_step.verify_step`."""
        from spmdkit.verify.external_step import verify_step

        return verify_step(make, **options)


sys.modules[__name__].__class__ = _Package
