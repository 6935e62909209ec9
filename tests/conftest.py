"""Shared by all tests: hypothesis profiles and the folder of local data sets."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command does; processes that tests start inherit it

settings.register_profile("dev", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of local data sets that NETWEIGHT_DATA names; tests that need it are skipped without it."""
    named = os.environ.get("NETWEIGHT_DATA")
    if not named:
        pytest.skip("NETWEIGHT_DATA is not set: it names a folder of local data sets")
    folder = Path(named)
    if not folder.is_dir():
        pytest.skip(f"NETWEIGHT_DATA names {named}, which is no folder")
    return folder
