"""The fixtures for models and data that come from files alone."""

from tests.engine.conftest import factories, load, offline  # noqa: F401 - fixtures
