"""Programs here are written as strangers write them: dtypes are promoted as JAX does by default. A third of them is
quick."""

import pytest

QUICK = {
    "test_clip",
    "test_cnn_linen",
    "test_cnn_nnx",
    "test_gan",
    "test_linear_recurrence",
    "test_lines",
    "test_mixup",
    "test_mlm_nsp",
    "test_nnx_metrics",
    "test_noisy_sgd",
    "test_optimizers",
    "test_pinn",
    "test_ppo",
    "test_streaming",
}
"""Those that found something wrong when they were written, and one of each library."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "tasks" and item.path.stem not in QUICK:
            item.add_marker(pytest.mark.slow)
    modules = {item.getparent(pytest.Module) for item in items if item.path.parent.name == "tasks"}
    for module in modules:
        module.add_marker(pytest.mark.promotes("natural code of people who have their own models"))
