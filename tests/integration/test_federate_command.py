"""`netweight federate` as a newcomer types it, on the data that needs no download."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from netweight import cli
from netweight.attacks.gradient_inversion import tailored
from netweight.methods.federate.plan import FederationPlan

pytest.importorskip("sklearn", reason="scikit-learn is not installed: its digits are the default data")
SMALL = [
    "--clients", "5", "--rounds", "2", "--updates", "1", "--epochs", "1", "--set", "search_steps=4",
    "--model", "tiny_networks:halves",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def short_searches() -> Iterator[None]:
    """Images are searched for with a few of the usual steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tailored, "PeelingConfig", partial(tailored.PeelingConfig, softening=2, rounds=1))
        yield


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.netweight, ["federate", *arguments], catch_exceptions=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("federation")
    answer = run("run", *SMALL, "--out", str(out))
    assert answer.exit_code in (0, cli.FINDING_FAILED), answer.output
    assert "Exposure to the server" in answer.output
    assert "(this run)" in answer.output
    return out


def test_a_run_leaves_a_report_and_can_go_on(folder: Path) -> None:
    assert (folder / "report.html").is_file()
    answer = run("run", *SMALL, "--rounds", "3", "--no-audit", "--out", str(folder), "--json")
    assert answer.exit_code == 0, answer.output
    result = json.loads(answer.stdout)
    assert [r["round"] for r in result["rounds"]] == [1, 2, 3]
    assert result["audited"] is False


def test_an_audit_does_not_train_a_federation_that_was_stopped(folder: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    shutil.copytree(folder, stopped)
    plan = FederationPlan.load(stopped)
    plan.replace(rounds=plan.rounds + 1).save(stopped)
    before = {file.name: file.read_bytes() for file in stopped.iterdir() if file.is_file()}
    answer = run("audit", str(stopped), "--updates", "1", "--threat", "1x1", "--search-steps", "4")
    assert answer.exit_code == 2, answer.output
    said = " ".join(answer.output.split())
    assert f"has {plan.rounds} of {plan.rounds + 1} rounds" in said
    assert "netweight federate run --out FOLDER" in said
    assert {file.name: file.read_bytes() for file in stopped.iterdir() if file.is_file()} == before


def test_a_folder_without_images_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    answer = run("run", "--data", str(tmp_path / "pictures"), "--out", str(tmp_path / "out"))
    assert answer.exit_code == 2, answer.output
    assert "contains no folder of images per class" in answer.output
    assert not (tmp_path / "out").exists()


def test_an_audit_attacks_what_was_trained(folder: Path) -> None:
    answer = run("audit", str(folder), "--updates", "1", "--threat", "1x1", "--search-steps", "4", "--json")
    assert answer.exit_code in (0, cli.FINDING_FAILED), answer.output
    names = [finding["name"] for finding in json.loads(answer.stdout)["findings"]]
    assert "gradient recovered, 1 step of batch 1" in names
    assert any("this run" in name for name in names)


def test_protections_are_asked_for_on_the_command_line(tmp_path: Path) -> None:
    protected = ["--method", "hyperfl", "--refuse", "--noise", "0.0001", "--minimum-steps"]
    arguments = ["run", *SMALL, "--no-audit", "--json", *protected]
    answer = run(*arguments, "2", "--out", str(tmp_path / "careful"))
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["plan"]["refuse"] is True
    stubborn = run(*arguments, "1000", "--out", str(tmp_path / "stubborn"))
    assert stubborn.exit_code == 2
    assert "fewer than the 1000 of --minimum-steps" in stubborn.output


def test_other_settings_do_not_overwrite_a_run(folder: Path) -> None:
    answer = run("run", *SMALL, "--lr", "0.5", "--out", str(folder))
    assert answer.exit_code == 2
    assert "other settings" in answer.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--data", "digts"], "Nearest: digits"),
        (["run", "--method", "hyperfi"], "hyperfl"),
        (["run", "--model", "nothing:here"], "cannot be imported"),
        (["run", "--rounds", "0"], "0 is not in the range x>=1"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], words: str, tmp_path: Path) -> None:
    answer = run(*arguments, "--out", str(tmp_path / "out"))
    assert answer.exit_code == 2
    assert words in answer.output


def test_a_folder_without_a_federation_and_a_wrong_threat_are_refused(tmp_path: Path, folder: Path) -> None:
    answer = run("audit", str(tmp_path))
    assert answer.exit_code == 2
    assert "netweight federate run" in answer.output
    assert "is not a threat model" in run("audit", str(folder), "--threat", "five").output


@pytest.mark.parametrize(
    ("method", "caveat"), [("dp-fedavg", ""), ("centaur", "the head learns from the same examples")]
)
def test_the_command_its_json_and_its_page_state_the_epsilon(method: str, caveat: str, tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    noise = ["--noise-multiplier", "8"] if caveat else ["--epsilon", "4"]
    arguments = ["run", *SMALL, "--no-audit", "--epochs", "1", "--method", method, *noise]
    said = run(*arguments, "--out", str(tmp_path / "run"))
    assert said.exit_code == 0, said.output
    printed = " ".join(said.output.split())
    (promise,) = json.loads(run(*arguments, "--out", str(tmp_path / "run"), "--json").stdout)["privacy"]
    assert (promise["unit"], promise["adjacency"]) == ("example", "added or removed")
    if caveat:
        assert "No ε holds (it is infinite)" in printed
        assert caveat in printed
        assert promise["epsilon"] is None
    else:
        assert "at δ 1e-05 for one example (added or removed" in printed
        assert "Poisson sampling" in printed
        assert 3 < promise["epsilon"] <= 4.0
        assert promise["answers"] == 2 * promise["holders"]
    assert "Differential privacy" in (tmp_path / "run" / "report.html").read_text()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of two classes as people have them: three sizes, one in 16 bits."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    folder, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for label, name in enumerate(("left", "right")):
        (folder / name).mkdir()
        for number in range(15):
            height, width = ((40, 30), (30, 40), (28, 28))[number % 3]
            drawn = generator.integers(0, 60, (height, width))
            drawn[:, label * width // 2 : (label + 1) * width // 2] += 190
            made = image.fromarray((drawn * 257).astype(np.uint16) if number == 7 else drawn.astype(np.uint8))
            made.save(folder / name / f"{number}.png")
    return folder


def test_pictures_of_several_sizes_are_brought_to_one_and_what_was_decided_is_shown(
    pictures: Path, tmp_path: Path
) -> None:
    arguments = ["run", "--data", str(pictures), "--method", "fedavg", "--no-audit"]
    arguments += ["--clients", "2", "--rounds", "2", "--epochs", "1"]
    refused = run(*arguments, "--out", str(tmp_path / "out"))
    assert refused.exit_code == 2
    assert "--size HEIGHTxWIDTH" in refused.output
    said = run(*arguments, "--size", "28", "--fit", "crop", "--out", str(tmp_path / "out"))
    assert said.exit_code == 0, said.output
    printed = " ".join(said.output.split())
    assert "Gray of more than 8 bits, read as 16 bits" in printed
    page = (tmp_path / "out" / "report.html").read_text()
    assert "20 pictures" in page
    assert "20 pictures" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "digits", "--size", "28"], "digits is a data set with a size of its own"),
        (["--size", "28x"], "28x"),
        (["--fit", "pad"], "no effect without a size"),
        (["--size", "40x28"], "--size 28 or --size 32"),
    ],
)
def test_a_size_that_has_no_effect_or_no_network_is_refused(
    arguments: list[str], words: str, pictures: Path, tmp_path: Path
) -> None:
    refused = run("run", "--data", str(pictures), *arguments, "--clients", "2", "--out", str(tmp_path / "out"))
    assert refused.exit_code == 2
    assert words in " ".join(refused.output.split())


def test_noise_on_updates_says_its_epsilon_over_the_whole_run(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    arguments = ["run", *SMALL, "--no-audit", "--method", "fedavg", "--noise", "0.01", "--out", str(tmp_path / "run")]
    said = run(*arguments)
    assert said.exit_code == 0, said.output
    assert "for one client (all its data replaced; " in " ".join(said.output.split())
    (promise,) = json.loads(run(*arguments, "--json").stdout)["privacy"]
    assert promise["epsilon"] > promise["epsilon_if_left_out"] > 1000
    assert "Differential privacy" in (tmp_path / "run" / "report.html").read_text()


def test_a_rehearsed_liar_is_named_by_the_command_and_its_page(tmp_path: Path) -> None:
    arguments = ["--method", "fedavg", "--epochs", "1", "--lie", "claimed", "--aggregator", "multi-krum"]
    said = run("run", *SMALL, *arguments, "--no-audit", "--out", str(tmp_path))
    assert said.exit_code == 0, said.output
    assert "Round 1: client 4 is suspicious: claims 1125899906842624 examples" in said.output
    assert "Clients left out or suspicious" in (tmp_path / "report.html").read_text()
