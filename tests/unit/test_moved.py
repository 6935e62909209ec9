"""Names of 0.1.0: modules that moved are found where they are, with a warning, and stay themselves."""

import importlib
import subprocess
import sys

import pytest

import netweight
from netweight import autoload


def test_every_former_name_leads_to_a_module_of_today():
    for name in autoload._MOVED:
        assert importlib.util.find_spec(autoload.current_name(f"netweight.{name}")) is not None, name
        assert {name, name.split(".")[0]} & netweight._Finder.packages, name
    assert autoload.current_name("netweight.errors") == "netweight.errors"
    assert autoload.current_name("zoo.data") == "zoo.data"


def test_a_former_name_warns_and_is_the_same_module():
    program = """
import warnings
warnings.simplefilter("ignore")
from netweight.generate.adapter import Adapter
from netweight.zoo.language import load_pairs
import netweight.nn.lora
assert Adapter is netweight.nn.lora.Adapter
assert netweight.nn.lora.__spec__.name == netweight.nn.lora.__name__ == "netweight.nn.lora"
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stderr == ""
    with pytest.warns(
        DeprecationWarning, match=r"netweight.methods.forget.config is netweight.methods.forget.settings"
    ):
        importlib.import_module("netweight.methods.forget.config")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_name_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("netweight.zoo.nothing")
