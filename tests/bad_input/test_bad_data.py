"""The data: lengths, dtypes, holes, sources that raise."""

import pytest

from tests.support.command_line import Case
from tests.support.messages import Says

CASES = {
    "unequal lengths": Case(Says(asked="train_data", found=("32 examples in leaf 'x' float32[32,4]", "31 in leaf 'y' float32[31,8]"), rule="count the same examples", repair="[:31]"), task={"train_data": "{'x': DATA['x'], 'y': DATA['y'][:31]}"}),
    "empty": Case(Says(asked="train_data is empty", found=("float32[0,4]", "0 examples"), rule="at least 1", repair=("filter", "path")), task={"train_data": "{'x': DATA['x'][:0], 'y': DATA['y'][:0]}"}),
    "an empty dict": Case(Says(asked="train_data is {}", found="no array", repair="at least one array"), task={"train_data": "{}"}),
    "fewer examples than a batch": Case(Says(asked="batch_size is 64", found="32 examples", rule="full batches only", repair=("at most 32", "data.drop_remainder: false")), config={"batch_size": "64"}),
    "float64": Case(Says(asked="train_data: leaf 'x'", found="float64", rule="float32", repair=".astype(np.float32)"), task={"train_data": "{'x': DATA['x'].astype(np.float64), 'y': DATA['y']}"}),
    "text": Case(Says(asked="train_data: leaf 'x'", found="<U1", rule="numbers or booleans", repair="np.unique(values, return_inverse=True)[1]"), task={"train_data": "{'x': np.array(['a'] * 32), 'y': DATA['y']}"}),
    "objects": Case(Says(asked="train_data: leaf 'x'", found="dtype object", rule="numbers or booleans", repair="np.stack"), task={"train_data": "{'x': np.array([None] * 32), 'y': DATA['y']}"}),
    "dates": Case(Says(asked="train_data: leaf 'x'", found="datetime64[D]", rule="numbers or", repair="(values - values.min()).astype(np.int32)"), task={"train_data": "{'x': np.array(['2026-01-01'] * 32, 'datetime64[D]'), 'y': DATA['y']}"}),
    "integers that do not fit": Case(Says(asked="train_data: leaf 'x'", found=("int64", "1099511627776"), rule="-2147483648 to 2147483647", repair="JAX_ENABLE_X64=1"), task={"train_data": "{'x': np.full((32, 4), 2**40), 'y': DATA['y']}"}),
    "a scalar among the arrays": Case(Says(asked="train_data: leaf 'scale'", found="is a float32", rule="examples along its first dim", repair=("np.asarray(...)", "a list")), task={"train_data": "{**DATA, 'scale': np.float32(2)}"}),
    "a list among the arrays": Case(Says(asked="train_data: leaf 'z/0'", found="is a float", rule="examples along its first dim", repair=("np.asarray(...)", "a list")), task={"train_data": "{**DATA, 'z': [1.0, 2.0]}"}),
    "a path": Case(Says(asked="train_data", found="is a str", rule=("arrays", "grain.MapDataset"), repair=("IterDataset", "jax.tree_util.register_dataclass")), task={"train_data": "'data.npz'"}),
    "a generator": Case(Says(asked="train_data", found="is a generator", rule=("arrays", "grain.MapDataset"), repair=("IterDataset", "jax.tree_util.register_dataclass")), task={"train_data": "(i for i in range(9))"}),
    "a source without a length": Case(Says(asked="train_data", found="is a Endless", rule=("arrays", "grain.MapDataset"), repair=("IterDataset", "jax.tree_util.register_dataclass")), "class Endless:\n    def __getitem__(self, i): return DATA['x'][i]", {"train_data": "Endless()"}),
    "a source that raises at once": Case(Says(asked="train_data[0]", found="OSError: disk gone", rule="index from 0 to 31"), "class Broken(Examples):\n    def __getitem__(self, i): raise OSError('disk gone')", {"train_data": "Broken()"}, exit=70),
    "a source that raises at one item": Case(Says(asked=("batch of step 5", "train_data[5]"), found="OSError: item 5 is gone", rule="Every index"), "class Broken(Examples):\n    def __getitem__(self, i):\n        if i == 5: raise OSError('item 5 is gone')\n        return super().__getitem__(i)", {"train_data": "Broken()"}, {"steps": "8", "batch_size": "8"}, exit=70, may_train=True),
    "a source of uneven examples": Case(Says(asked=("batch of step 3", "train_data[29] leaf 'y'"), found=("float32[7]", "example 0"), rule="a compiled step has one", repair=("Pad or crop", "__getitem__")), "class Uneven(Examples):\n    def __getitem__(self, i): return {'x': DATA['x'][i], 'y': DATA['y'][i][: 8 - i % 2]}", {"train_data": "Uneven()"}, may_train=True),
    "a source whose length raises": Case(Says(asked="len(train_data)", found="OSError: no index", rule="number of examples"), "class Broken(Examples):\n    def __len__(self): raise OSError('no index')", {"train_data": "Broken()"}, exit=70),
    "eval_data of float64": Case(Says(asked="eval_data: leaf 'x'", found="float64", rule="float32", repair=".astype(np.float32)"), task={"eval_data": "{'x': DATA['x'].astype(np.float64), 'y': DATA['y']}"}),
    "eval_data is empty": Case(Says(asked="eval_data is empty", found=("float32[0,4]", "0 examples"), rule="at least 1", repair=("filter", "path")), task={"eval_data": "{'x': DATA['x'][:0], 'y': DATA['y'][:0]}"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_the_data_is_told_and_nothing_is_lost(name, folder):
    CASES[name].run(folder)
