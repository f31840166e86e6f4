"""Common to all tests: --slow, one thread a process, free ports."""

import os
import socket

import pytest

pytest.register_assert_rewrite("tests.parity.against_plain")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch; processes that tests start inherit it
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOG_RANK", "NGPU", "NNODES", "RDZV_ENDPOINT", "TITANLIKE_FAULT"):
    os.environ.pop(name, None)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("slow"):
            if not config.getoption("--slow"):
                item.add_marker(pytest.mark.skip(reason="slow: needs --slow"))
            elif not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture
def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.fixture
def make_config():
    """A Config from sections given as dicts, the rest at its defaults."""
    from titanlike.config import Config

    return lambda **sections: Config.model_validate(sections)


@pytest.fixture(scope="session")
def pool():
    """Worker processes for all tests that need ranks."""
    from tests.pool import Pool

    pool = Pool()
    yield pool
    pool.close()
