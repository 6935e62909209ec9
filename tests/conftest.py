"""Shared by all tests: seeds, hypothesis profiles, local data sets, long files first, collections with little to do."""

import gc
import os
import random
import secrets
import sys
from pathlib import Path

import pytest
from collected import DESELECTED
from hypothesis import HealthCheck, settings

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command does; processes that tests start inherit it

os.fsync = lambda descriptor: None  # no test cuts the power; those of what is synced put their own in its place

# A test gives the same answer every time; HYPOTHESIS_PROFILE=explore looks for new examples.
for profile, examples in (("usual", 20), ("explore", 500)):
    settings.register_profile(
        profile,
        max_examples=examples,
        deadline=None,
        derandomize=profile != "explore",
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))


# Files that take longest: begun first, so that none is left to one process at the end.
LONG = (
    "test_tour.py", "test_immunize_processes.py", "test_recipe_forget.py", "test_wheel.py", "test_autoload.py",
    "test_flower_deployment.py", "test_start_here_page.py", "test_refusal_inputs.py", "test_compress_interrupted.py",
    "test_label_audits.py", "test_immunize_training.py", "test_diffusers_compressed.py", "test_federate_robust.py",
    "test_hub_ids.py", "test_attack_finetune_command.py", "test_trainer.py", "test_transformers_compressed.py",
    "test_forget_edits.py", "test_forget_pipelines.py", "test_codec.py", "test_flower_apps.py", "test_lora_namings.py",
    "test_pipeline_snapshots.py", "test_attack_search.py", "test_federate_audit.py", "test_release_recipes.py",
    "test_hostile_files.py", "test_init_command.py", "test_label_in_a_browser.py", "test_federate_buffers.py",
    "test_privacy_account.py", "test_cuda_compiling.py", "test_reproduce_hyperfl.py", "test_federate_engine.py",
    "test_forget_plan.py", "test_ray_engine.py", "test_quiet_libraries.py",
)  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage while test files are imported, and leave out what they imported afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items):
    """Order files; `make test` hands them to its processes in this order."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_deselected(items):
    """Keep the names of tests that are left out, for the test that looks for tests by their names."""
    for item in items:
        item.config.stash.setdefault(DESELECTED, []).append(item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Seed what draws without a generator of its own, secrets included: no test depends on the order or on chance."""
    random.seed(0)
    secrets.randbits = random.Random(0).getrandbits
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Take back what a test leaves in the search path, as commands that import a user's file do."""
    before = sys.path[:]
    try:
        return (yield)
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module", autouse=True)
def libraries_are_no_garbage():
    """Leave the millions of objects of imported libraries out of what tests' collections and searches go through."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def two_step_anchors(monkeypatch):
    """Choose anchors by images of two steps: where the images say nothing."""
    anchors = pytest.importorskip("netweight.methods.forget.anchors")
    monkeypatch.setitem(anchors.described_images.__kwdefaults__, "steps", 2)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of local data sets that NETWEIGHT_DATA names; tests that need it are skipped without it."""
    named = os.environ.get("NETWEIGHT_DATA")
    if not named:
        pytest.skip("NETWEIGHT_DATA is not set: it names a folder of local data sets")
    folder = Path(named)
    if not folder.is_dir():
        pytest.skip(f"NETWEIGHT_DATA names {named}, which is not a folder")
    return folder
