"""What pytest collected and then left out by markers or names, kept by `conftest.py`. Not a test itself."""

import pytest

DESELECTED = pytest.StashKey[list[str]]()
