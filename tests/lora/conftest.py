"""The engine servers of the engine tests serve adapters as well."""

from tests.engines.conftest import fresh_server, pytest_runtest_makereport

__all__ = ["fresh_server", "pytest_runtest_makereport"]
