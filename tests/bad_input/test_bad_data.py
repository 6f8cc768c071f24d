"""The data: lengths, dtypes, holes, sources that raise."""

import pytest
from command_line import Case

CASES = {
    "unequal lengths": Case((), task={"train_data": "{'x': DATA['x'], 'y': DATA['y'][:31]}"}),
    "empty": Case((), task={"train_data": "{'x': DATA['x'][:0], 'y': DATA['y'][:0]}"}),
    "an empty dict": Case((), task={"train_data": "{}"}),
    "fewer examples than a batch": Case((), config={"batch_size": "64"}),
    "float64": Case((), task={"train_data": "{'x': DATA['x'].astype(np.float64), 'y': DATA['y']}"}),
    "text": Case((), task={"train_data": "{'x': np.array(['a'] * 32), 'y': DATA['y']}"}),
    "objects": Case((), task={"train_data": "{'x': np.array([None] * 32), 'y': DATA['y']}"}),
    "dates": Case((), task={"train_data": "{'x': np.array(['2026-01-01'] * 32, 'datetime64[D]'), 'y': DATA['y']}"}),
    "integers that do not fit": Case((), task={"train_data": "{'x': np.full((32, 4), 2**40), 'y': DATA['y']}"}),
    "a scalar among the arrays": Case((), task={"train_data": "{**DATA, 'scale': np.float32(2)}"}),
    "a list among the arrays": Case((), task={"train_data": "{**DATA, 'z': [1.0, 2.0]}"}),
    "a path": Case((), task={"train_data": "'data.npz'"}),
    "a generator": Case((), task={"train_data": "(i for i in range(9))"}),
    "a source without a length": Case((), "class Endless:\n    def __getitem__(self, i): return DATA['x'][i]", {"train_data": "Endless()"}),
    "a source that raises at once": Case((), "class Broken(Examples):\n    def __getitem__(self, i): raise OSError('disk gone')", {"train_data": "Broken()"}, exit=70),
    "a source that raises at one item": Case((), "class Broken(Examples):\n    def __getitem__(self, i):\n        if i == 5: raise OSError('item 5 is gone')\n        return super().__getitem__(i)", {"train_data": "Broken()"}, {"steps": "8", "batch_size": "8"}, exit=70, may_train=True),
    "a source of uneven examples": Case((), "class Uneven(Examples):\n    def __getitem__(self, i): return {'x': DATA['x'][i], 'y': DATA['y'][i][: 8 - i % 2]}", {"train_data": "Uneven()"}, may_train=True),
    "a source whose length raises": Case((), "class Broken(Examples):\n    def __len__(self): raise OSError('no index')", {"train_data": "Broken()"}, exit=70),
    "eval_data of float64": Case((), task={"eval_data": "{'x': DATA['x'].astype(np.float64), 'y': DATA['y']}"}),
    "eval_data is empty": Case((), task={"eval_data": "{'x': DATA['x'][:0], 'y': DATA['y'][:0]}"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_the_data_is_told_and_nothing_is_lost(name, folder):
    CASES[name].run(folder)
