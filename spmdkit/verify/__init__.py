"""`verify`: the proof that cutting a task over a mesh does not change what it computes.

subject.py      the user's task, made ready to be compared, run on one mesh         -> Results
compare.py      errors between two results, and how large they may be
finding.py      where two results part, in numbers;  diagnosis.py  what that means, and the repair
mutants.py      programs with one known mistake, which have to be caught
judge.py        a case or a mutant -> its outcome, in this process;  worker.py, pool.py  in others
cases.py        which meshes;  proof.py  all of them -> a report;  table.py  for people;  certificate.py  for `train`;  command.py
"""

from spmdkit.verify.proof import VerifyOptions, verify

__all__ = ["VerifyOptions", "verify"]
