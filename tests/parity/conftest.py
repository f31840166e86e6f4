import pytest

from tests.parity.pool import Pool


@pytest.fixture(scope="session")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()
