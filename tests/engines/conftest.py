import pytest

from tests.engines import jobs


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """The losses of the same job on this machine."""
    return jobs.local(tmp_path_factory.mktemp("local") / "project")
