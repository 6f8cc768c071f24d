"""docs/development/rows.md: the table of `spmdkit explain` for each of the forty tasks and each example.

`python -m tests.support.row_tables` writes it. The lines of the user's code are left out, so that the page does not
change with every edit.
"""

import importlib
from pathlib import Path

import jax

import spmdkit as sk
from spmdkit.config import load_config
from spmdkit.program.row_table import COLUMNS, Row
from tests.support import tasks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "development" / "rows.md"
EXAMPLES = (
    "contrastive",
    "custom_step",
    "demo",
    "digits_cnn",
    "digits_equinox",
    "digits_nnx",
    "linear_regression",
    "mirrored",
    "moe",
    "pinn",
    "pipeline",
    "recurrent",
)
"""Configs in configs/, one for each example that has a loss."""


def rows_of_task(name: str) -> list[Row]:
    """Returns the table of a task of tests/tasks on {data: 4}."""
    task = tasks.natural_task(name)
    return tasks.program_of(task.task, "data 4", steps=task.steps, **task.settings).row_table


def rows_of_example(name: str) -> list[Row]:
    """Returns the table of a config in configs/, on its mesh."""
    return sk.build(load_config(ROOT / "configs" / f"{name}.yaml")).row_table


def without_lines(row: Row) -> tuple[str, ...]:
    """Returns the fields of a row; `why` without the line."""
    *fields, why = vars(row).values()
    return (*(field.partition(": ")[0].strip() for field in fields), why.partition(" at ")[0])


def page(names: list[str], examples: tuple[str, ...]) -> str:
    """Returns docs/development/rows.md."""
    sections = [("Tasks", names, rows_of_task), ("Examples", examples, rows_of_example)]
    text = [HEAD]
    for title, items, rows_of in sections:
        text += [
            f"## {title}",
            "",
            f"| {title[:-1].lower()} | {' | '.join(COLUMNS)} |",
            "| --- " * (1 + len(COLUMNS)) + "|",
        ]
        for name in items:
            for row in rows_of(name):
                cells = " | ".join(cell.replace("|", "\\|") for cell in without_lines(row))
                text.append(f"| {name.replace('_', ' ')} | {cells} |")
        text.append("")
    return "\n".join(text)


HEAD = """# How rows enter the tasks and the examples

The tables of [`spmdkit explain`](../howto/rows_in_a_loss.md) for the [forty tasks](tasks.md) on {data: 4} and
for the examples on the meshes of their configs. `python -m tests.support.row_tables` writes this page. A `train_step`
that does not call `sk.value_and_grad` has no row.

Every task is equal to one device on four meshes ([tests/tasks](../../tests/tasks)), and `verify` reports no difference
([tests/verify](../../tests/verify/test_verify_tasks.py)). So no loss and no metric may be mixed across rows, and every
reduction of a leaf gives the state of one device.
"""


def main() -> None:
    """Writes the page."""
    jax.config.update("jax_num_cpu_devices", 8)
    PAGE.write_text(page(tasks.task_names(), EXAMPLES), encoding="utf-8")


if __name__ == "__main__":
    # Imported under its module name, since the tasks register in tests.support.tasks.
    importlib.import_module("tests.support.row_tables").main()
