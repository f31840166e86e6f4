import logging

import pytest

from titanlike.config import Config


@pytest.fixture
def make_config():
    """A Config from nested dicts of what differs from the defaults."""

    def make(**sections) -> Config:
        return Config.model_validate({"training": {"steps": 10}, **sections})

    return make


@pytest.fixture
def warnings_of(caplog):
    """The warnings that the logger "titanlike" got, also when something has cut it off from the root logger."""
    logger = logging.getLogger("titanlike")
    propagate, logger.propagate = logger.propagate, True
    yield lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    logger.propagate = propagate
