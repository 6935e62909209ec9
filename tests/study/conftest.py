"""An environment with the wheels, and what `netweight init` writes, for the studies that run commands in it."""

from pathlib import Path

import pytest
from installed_wheel import Installed, built

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """An environment with the wheels of netweight and of its small models, and Flower's commands."""
    wheels = [built(source, tmp_path_factory.mktemp("wheel")) for source in (ROOT, ROOT / "toys")]
    made = Installed.of(tmp_path_factory.mktemp("installed"), *wheels, programs=("flwr", "huggingface_hub"))
    yield made
    made.end()


@pytest.fixture(scope="session")
def begun(installed, tmp_path_factory):
    """What `netweight init` writes."""
    folder = tmp_path_factory.mktemp("begun") / "Größe zwei"
    folder.mkdir()
    done = installed.bash("netweight init .", folder)
    assert done.returncode == 0, done.stderr
    return folder
