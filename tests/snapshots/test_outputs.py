"""`--json` of every command on small input has the keys and values that it had."""

import json
from pathlib import Path

import pytest
import snapshot_cases as cases
from snapshot_golden import differences

for extra in ("transformers", "diffusers", "peft", "sklearn", "scipy", "matplotlib", "PIL"):
    pytest.importorskip(extra, reason="commands of all methods are run: the extras llm, diffusion and evidence")

KEPT = json.loads((Path(__file__).parent / "outputs.json").read_text())
# A change that is meant: case → (path in the output, why). Empty, or a line for each in the changelog.
_DEFAULTS = {
    f"/json/plan/steps/0/settings/{name}": "the defense's own default is shown, not null"
    for name in ("lr", "epochs", "batch_size", "seed", "save_every", "clip")
}
_SAMPLER = {
    f"/json/plan/steps/1/settings/{name}": "sums of two models are the default sampler"
    for name in ("sampler", "factor")
}
_FORESEEN = {
    f"/json/prompts/{prompt}/{count}": "while a removal is tried, the next one is predicted in the same run"
    for prompt in (0, 1)
    for count in ("rows", "calls", "steps/refinement/rows", "steps/refinement/calls")
}
MEANT: dict[str, dict[str, str]] = {
    "forget localize": _FORESEEN,
    "forget localize, reference": _FORESEEN,
    "plan of immunize": _DEFAULTS,
    "plan of release-immunized": _DEFAULTS,
    "plan of space": _SAMPLER,
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NETWEIGHT_DATA", raising=False)
        cases.prepare(folder)
        return {case: cases.call(folder, cases.arguments(case)) for case in cases.CASES}


def test_every_command_is_run():
    from snapshot_commands import commands

    run = {" ".join(cases.arguments(case)) + " " for case in cases.CASES}
    left_out = {name for name in commands() if not any(words.startswith(f"{name} ") for words in run)}
    assert left_out == {
        "tour",
        "init",
        "benchmark gpu",
        "benchmark memory",
        "benchmark federate",
        "space dedupe",
        "space convert",
        "space extract",
        "space import",
        "attack refusal",
        "attack safeguards",
        "space resize",
        "space similar",
    }  # minutes, a GPU, tests of their own


@pytest.mark.parametrize("case", cases.CASES)
def test_a_command_writes_what_it_wrote(case, outputs):
    found = differences(KEPT[case], outputs[case])
    assert not [line for line in found if line.partition(": ")[0] not in MEANT.get(case, {})]
