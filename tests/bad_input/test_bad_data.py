"""The data: lengths, dtypes, holes, sources that raise."""

import pytest

from tests.support.command_line import Case

CASES = {
    "unequal lengths": Case(("train_data has 32 examples in leaf 'x' float32[32,4] but 31 in leaf 'y' float32[31,8]. The first", "of every leaf must count the same examples. Cut or build them alike, for example [:31]."), task={"train_data": "{'x': DATA['x'], 'y': DATA['y'][:31]}"}),
    "empty": Case(("train_data is empty: float32[0,4] has 0 examples. Training and evaluation need at least 1. Check the filter or the path that made it.",), task={"train_data": "{'x': DATA['x'][:0], 'y': DATA['y'][:0]}"}),
    "an empty dict": Case(("train_data is {}, which holds no array. Give at least one array.",), task={"train_data": "{}"}),
    "fewer examples than a batch": Case(("train_data has 32 examples, batch_size is 64: not one full batch, and data.remainder: drop uses full batches only. Try a batch_size of at most 32, or data.remainder: mask.",), config={"batch_size": "64"}),
    "float64": Case(("train_data: leaf 'x' has dtype float64, and JAX without x64 computes in float32. spmdkit does not drop digits silently. Convert it yourself: .astype(np.float32).",), task={"train_data": "{'x': DATA['x'].astype(np.float64), 'y': DATA['y']}"}),
    "text": Case(("train_data: leaf 'x' has dtype <U1, which no device can hold. Data must be numbers or booleans.", "integers (np.unique(values, return_inverse=True)[1].astype(np.int32)), or leave it out."), task={"train_data": "{'x': np.array(['a'] * 32), 'y': DATA['y']}"}),
    "objects": Case(("train_data: leaf 'x' has dtype object, which no device can hold. Data must be numbers or booleans.", "often rows of unequal length: pad them to one shape and use np.stack, or leave it out."), task={"train_data": "{'x': np.array([None] * 32), 'y': DATA['y']}"}),
    "dates": Case(("train_data: leaf 'x' has dtype datetime64[D], which no device can hold. Data must be numbers or", "it to a number, such as days: (values - values.min()).astype(np.int32), or leave it out."), task={"train_data": "{'x': np.array(['2026-01-01'] * 32, 'datetime64[D]'), 'y': DATA['y']}"}),
    "integers that do not fit": Case(("train_data: leaf 'x' is int64 with values from 1099511627776 to 1099511627776, and JAX without x64", "-2147483648 to 2147483647. Map the values into that range, or set JAX_ENABLE_X64=1."), task={"train_data": "{'x': np.full((32, 4), 2**40), 'y': DATA['y']}"}),
    "a scalar among the arrays": Case(("train_data: leaf 'scale' is a float32, not an array. Every leaf of a mapping or tuple must be a", "counts the examples. Wrap it: np.asarray(...). Examples one by one are given as a list."), task={"train_data": "{**DATA, 'scale': np.float32(2)}"}),
    "a list among the arrays": Case(("train_data: leaf 'z/0' is a float, not an array. Every leaf of a mapping or tuple must be a numpy", "counts the examples. Wrap it: np.asarray(...). Examples one by one are given as a list."), task={"train_data": "{**DATA, 'z': [1.0, 2.0]}"}),
    "a path": Case(("train_data is a str. Data must be arrays (a dict or tuple of them), a grain.MapDataset, or have", "for a grain IterDataset, jax.tree_util.register_dataclass for a dataclass of arrays."), task={"train_data": "'data.npz'"}),
    "a generator": Case(("train_data is a generator. Data must be arrays (a dict or tuple of them), a grain.MapDataset, or", "for a grain IterDataset, jax.tree_util.register_dataclass for a dataclass of arrays."), task={"train_data": "(i for i in range(9))"}),
    "a source without a length": Case(("train_data is a Endless. Data must be arrays (a dict or tuple of them), a grain.MapDataset, or have", "for a grain IterDataset, jax.tree_util.register_dataclass for a dataclass of arrays."), "class Endless:\n    def __getitem__(self, i): return DATA['x'][i]", {"train_data": "Endless()"}),
    "a source that raises at once": Case(("train_data[0] raised OSError: disk gone. Every index from 0 to 31 must give an example, because",), "class Broken(Examples):\n    def __getitem__(self, i): raise OSError('disk gone')", {"train_data": "Broken()"}, exit=70),
    "a source that raises at one item": Case(("the batch of step 5 could not be read: train_data[5] raised OSError: item 5 is gone. Every index",), "class Broken(Examples):\n    def __getitem__(self, i):\n        if i == 5: raise OSError('item 5 is gone')\n        return super().__getitem__(i)", {"train_data": "Broken()"}, {"steps": "8", "batch_size": "8"}, exit=70, may_train=True),
    "a source of uneven examples": Case(("the batch of step 3 could not be read: train_data[29] leaf 'y' is float32[7], and in example 0 it", "because a compiled step has one. Pad or crop to one length, or cast, in __getitem__."), "class Uneven(Examples):\n    def __getitem__(self, i): return {'x': DATA['x'][i], 'y': DATA['y'][i][: 8 - i % 2]}", {"train_data": "Uneven()"}, may_train=True),
    "a source whose length raises": Case(("len(train_data) raised OSError: no index. Data must know its number of examples before the first",), "class Broken(Examples):\n    def __len__(self): raise OSError('no index')", {"train_data": "Broken()"}, exit=70),
    "eval_data of float64": Case(("eval_data: leaf 'x' has dtype float64, and JAX without x64 computes in float32. spmdkit does not drop digits silently. Convert it yourself: .astype(np.float32).",), task={"eval_data": "{'x': DATA['x'].astype(np.float64), 'y': DATA['y']}"}),
    "eval_data is empty": Case(("eval_data is empty: float32[0,4] has 0 examples. Training and evaluation need at least 1. Check the filter or the path that made it.",), task={"eval_data": "{'x': DATA['x'][:0], 'y': DATA['y'][:0]}"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_the_data_is_told_and_nothing_is_lost(name, folder):
    CASES[name].run(folder)
