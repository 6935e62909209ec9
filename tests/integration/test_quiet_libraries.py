"""What other libraries write while they are imported stays out of the output, in workers, too."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

LIBRARIES = [
    "peft", "transformers.models.llama.modeling_llama", "torchao", "bitsandbytes",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
]  # fmt: skip
IN_WORKER = """
import os.path, sys
from netweight.core.engines import local_processes
from netweight.core.quiet import quiet_libraries
quiet_libraries()
if __name__ == "__main__":
    for _, outcome in local_processes(os.path.basename, sys.argv[1:], workers=1, preload=sys.argv[1:]):
        print(outcome.error or "ended")
"""
HERE = """
import importlib, sys
from netweight.core.quiet import quiet_libraries
quiet_libraries()
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


# In a worker the same function is called by the import of its module, and what it does must be inherited.
@pytest.mark.parametrize(
    "program", [pytest.param(HERE, id="here", marks=pytest.mark.study), pytest.param(IN_WORKER, id="in a worker")]
)
def test_imports_of_libraries_write_nothing(program, tmp_path):
    installed = [name for name in LIBRARIES if find_spec(name.partition(".")[0]) is not None]
    file = tmp_path / "program.py"
    file.write_text(program)
    ran = subprocess.run([sys.executable, str(file), *installed], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""


def test_errors_of_libraries_stay(tmp_path):
    words = "import logging; from netweight.core.quiet import quiet_libraries; quiet_libraries();"
    words += "logging.getLogger('torchao').warning('no'); logging.getLogger('torchao').error('yes')"
    ran = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=120)
    assert ran.stderr == "yes\n"
