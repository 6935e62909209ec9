"""Every command of README and of the pages, from wheels, in empty folders, without variables of this environment.

Where a page names models and files of its reader, they are made here from what `netweight init` writes. Commands that
would take hours are given fewer steps. A command may exit with 1 only if it says why in a verdict.
"""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is in the llm extra")
pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.study,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not (ROOT / "CMakeLists.txt").is_file(), reason="outside a source tree"),
]
# What other libraries print: none of it belongs into the output of a command.
OTHERS = (
    "LOAD REPORT", "UNEXPECTED", "MISSING", "Writing model shards", "Loading weights", "Loading checkpoint shards",
    "Loading pipeline components", "UserWarning", "FutureWarning", "DeprecationWarning", "torchao", "bitsandbytes",
    "Fetching ", "Map: ", "Generating train split", "`torch_dtype` is deprecated", "it/s]", "s/it]",
)  # fmt: skip


@dataclass
class Page:
    """How a page is run."""

    inputs: str = ""
    """Lines of a shell that make the files and folders that the page takes for granted."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Texts of commands → what is run in their place: names of a reader's models, and fewer steps."""
    left_out: tuple[str, ...] = ()
    """Beginnings of commands that need another machine or a clone."""


_ROWS = """
cp -r my-model my-base
head -n 24 harmful.jsonl > refused.jsonl; head -n 24 keep.jsonl > ordinary.jsonl
"""
_BANK = "netweight space ingest my-loras bank && netweight space fit bank faces --components 20\n"
_FACES = """
python -c "from netweight.toys.faces_pipeline import faces_pipeline; faces_pipeline().save_pretrained('base-model')"
"""
PAGES = {
    "README": Page(),
    "docs/start-here": Page(left_out=("pip", 'eval "$(_NETWEIGHT_COMPLETE=zsh')),  # another shell
    "docs/compress": Page(
        """python -c "
from pathlib import Path; from safetensors.torch import load_file, save_file; import shutil
shutil.copytree('my-model', 'my-finetune'); file = 'my-finetune/model.safetensors'
save_file({name: value * 1.001 for name, value in load_file(file).items()}, file, {'format': 'pt'})" """
    ),
    "docs/label": Page(
        _ROWS + "cp ordinary.txt prompts.txt\n"
        "netweight federate run --clients 3 --rounds 1 --updates 1 --epochs 1 --no-audit --out federation\n"
        'ln -s "$(python -c "from netweight.toys import minilm; print(minilm.folder())")" all-minilm\n',
        {"--minutes 30": "--minutes 2"},
    ),
    "docs/federate": Page(replaced={"--rounds 5": "--rounds 1"}),
    "docs/malicious-clients": Page(replaced={"--rounds 5": "--rounds 1"}),
    "docs/gradient-inversion": Page(
        """python -c "
from pathlib import Path; import torch; from torch import nn; from safetensors.torch import save_file
from netweight.attacks.gradient_inversion.client import gradient_of, known_parameters
text = 'from torch import nn\\n\\n\\ndef make():\\n    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))\\n'
Path('mymodel.py').write_text(text); names = {}; exec(text, names); model = names['make']()
sent = gradient_of(model)(known_parameters(model), (torch.rand(1, 3, 32, 32), torch.tensor([3])))
save_file(sent, 'update.safetensors')" """,
        {"--rounds 5": "--rounds 1"},
    ),
    "docs/immunize": Page(_ROWS, {"--out attack": "--out attack --minutes 1"}),
    "docs/finetuning-attacks": Page(
        _ROWS, {"--base BASE": "--base my-base", "DEFENDED": "my-model", "--out attack": "--out attack --minutes 1"}
    ),
    "docs/refusal": Page(
        _ROWS + "cp task.jsonl other.jsonl\n",
        {"UNDEFENDED": "my-base", "MODEL": "my-model", "--card": "--card --minutes 1"},
    ),
    "docs/forget": Page(replaced={"--out audit": "--steps 2 --out audit"}),
    "docs/forget-pipelines": Page(),
    "docs/forget-neurons": Page(
        "head -n 48 ordinary.txt > calibration.txt; tail -n +49 ordinary.txt > others.txt\n"
        "sed 's/^prompt/caption/' targets.csv > suspects.csv\n"
        "cut -d, -f1 targets.csv | tail -n 1 | tr -d '\"' > memorized.txt\n"
    ),
    "docs/forget-audit": Page(
        "netweight forget apply my-pipeline my-pipeline-edited --targets targets.csv --ordinary ordinary.txt\n",
        {"--out audit": "--steps 2 --out audit"},
    ),
    "docs/embedding-search": Page(
        replaced={"EDITED": "my-pipeline", "ORIGINAL": "my-pipeline", "--out": "--steps 2 --out"}
    ),
    "docs/adapter-bank": Page(),
    "docs/weight-space": Page(),
    "docs/weight-space-use": Page(
        _BANK + _FACES + "netweight space convert my-loras/person-00017 stranger.safetensors --layout kohya\n"
        "cp -r my-loras/person-00018 style-lora\n"
        """python -c "
from pathlib import Path; from netweight.metrics.images import write_png
from netweight.toys.faces_pipeline import FaceBank
write_png(Path('portrait.png'), FaceBank(seed=7).photographs(0)[1][0])" """,
        {"person-17": "person-00017", "sks person": "a face on a green ground", " age": " hair_length"},
    ),
    "docs/weight-space-view": Page(
        _BANK + _FACES + "netweight space direction faces --labels labels.csv --column hair_length --out age.json\n",
        {"person-17": "person-00017", "a photo of a person": "a face on a green ground"},
    ),
    "docs/weight-space-edits": Page(
        _BANK + _FACES + "echo 'from netweight.toys.faces_pipeline import read_attributes as read' > readers.py\n",
        {"person-17": "person-00017", "sks person": "a face on a green ground"},
    ),
    "docs/recipes": Page("cp quickstart.yaml my-recipe.yaml"),
    "docs/ecosystem": Page(
        "sed -i 's/seeds: 5}/grid: quick, seeds: 1, max_steps: 8, check_every: 4}/' release-immunized.yaml\n",
        left_out=("accelerate", "ACCELERATE"),
    ),
}  # fmt: skip


def commands(name):
    """The lines of a page that a reader types, in their order; continued lines are joined."""
    text = (ROOT / f"{name}.md").read_text()
    for language, block in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.S | re.M):
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        if language in ("", "sh", "bash"):
            yield from (line for line in lines if re.match(r"[\w=]+ ", line))
        elif language == "console":
            yield from (line[2:] for line in lines if line.startswith("$ "))


def typed(name):
    page = PAGES[name]
    for line in commands(name):
        shown = line
        for text, instead in page.replaced.items():
            line = line.replace(text, instead)
        programs = ("netweight", "cp", "cd", "eval", "sed")
        if line.startswith(programs) and not shown.startswith(page.left_out or ("\n",)):
            yield line


def judged(line, done):
    """Check how a command ended, and that it says nothing in the words of other libraries."""
    said = done.stdout + done.stderr
    reasons = ("Do not publish", "doctor", "the threshold was not reached")
    assert done.returncode == 0 or (done.returncode == 1 and any(each in line + said for each in reasons)), (line, said)
    assert "Traceback" not in said, (line, said)
    assert [text for text in said.splitlines() if any(mark in text for mark in OTHERS)] == [], line


@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_a_page_works_in_its_order(name, installed, begun, tmp_path):
    lines = list(typed(name))
    starts = any(line.startswith("netweight init .") for line in lines)
    folder = tmp_path / "Größe zwei"
    if starts:
        folder.mkdir()
    else:
        installed.copy(begun, folder)
    if PAGES[name].inputs:
        done = installed.bash("set -e\n" + PAGES[name].inputs, folder)
        assert done.returncode == 0, done.stderr
    assert lines
    for line in lines:
        if line.startswith("cd "):
            folder = folder / line.split()[1]
        else:
            judged(line, installed.bash(line, folder))


def test_the_pages_that_show_commands_are_run():
    shown = {f"docs/{page.stem}" for page in (ROOT / "docs").glob("*.md")} | {"README"}
    shown = {name for name in shown if any(line.startswith("netweight ") for line in commands(name))}
    elsewhere = {
        "docs/add-a-method",
        "docs/reproduced",
        "docs/miniatures",
        "docs/flower",
        "docs/immunize-results",
    }  # own tests, or experiments
    assert shown - elsewhere <= set(PAGES)


@pytest.mark.parametrize("name", ["README", "docs/start-here", "docs/label"])
def test_the_python_of_a_page_works_after_its_commands(name, installed, begun, tmp_path):
    folder = tmp_path / "here"
    installed.copy(begun, folder)
    link = 'ln -s "$(python -c "from netweight.toys import minilm; print(minilm.folder())")" all-minilm'
    done = installed.bash(f"netweight compress my-model my-model-net && {link}", folder)
    assert done.returncode == 0, done.stderr
    for code in re.findall(r"```python\n(.*?)```", (ROOT / f"{name}.md").read_text(), re.S):
        (folder / "block.py").write_text(code)
        judged("python", installed.bash("python block.py", folder))


def test_the_pages_own_tests_pass_on_the_wheel(installed, tmp_path):
    """They run the Python of all other pages; no source of netweight lies beside them."""
    for name in ("tests", "docs", "examples", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    done = installed.bash("python -m pytest -q -p no:cacheprovider tests/examples", tmp_path, timeout=5400)
    assert done.returncode == 0, done.stdout[-8000:]


def test_flower_as_its_page_says(installed, tmp_path):
    """A simulation, then report, audit and export of its folder, and the state dicts back in the reader's modules."""
    pytest.importorskip("flwr")
    text = (ROOT / "docs" / "flower.md").read_text()
    config = re.search(r"^    \[superlink\.local\]\n(?:    .*\n)+", text, re.M)[0]
    place = Path(installed.variables["HOME"]) / ".flwr"
    place.mkdir(exist_ok=True)
    (place / "config.toml").write_text(re.sub(r"^    ", "", config, flags=re.M))
    blocks = re.findall(r"(?:^    .*\n)+", text, re.M)
    lines = [re.sub(r"\\\n\s*", " ", block) for block in blocks if "superlink" not in block]
    lines = [line.strip() for block in lines for line in block.splitlines()]
    assert [line.split()[0] for line in lines].count("flwr") == 1
    folder, ran = tmp_path, None
    for line in lines:
        line = line.replace("/tmp/", f"{tmp_path}/")
        if line.startswith("cd "):
            folder = folder / line.removeprefix("cd ")
        elif line.startswith(("netweight", "flwr")):
            done = installed.bash(line, folder)
            if line.startswith("flwr"):
                assert done.returncode == 0, done.stderr
                ran = done.stdout
            else:
                judged(line, done)
    assert ran is not None
    history = json.loads((tmp_path / "federation" / "history.json").read_text())
    assert [len(each["after"]) for each in history["rounds"]] == [3] * 5
    assert (tmp_path / "federation" / "report.html").is_file()
    code = next(code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "load_state_dict" in code)
    done = installed.bash(f"python -c '{'from app import model' + chr(10) + code}'", folder)
    assert done.returncode == 0, done.stderr
