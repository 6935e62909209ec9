"""Every claim of docs/model-families.md has a test here, and pytest finds that test."""

import re
from pathlib import Path

import pytest
import warm
from collected import DESELECTED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "model-families.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


TESTS = """
decoder language model | compress | integration/test_transformers_compressed.py::test_compressed_folders_load_into_compressed_memory[llama]
decoder language model | immunize | unit/test_repnoise_loss.py::test_the_corrected_loss_is_its_formula[llama]
decoder language model | space | integration/test_adapter_training.py::test_language_models_train_together_as_alone
mixture of experts | compress | integration/test_transformers_compressed.py::test_merged_experts_run_and_train_compressed
encoder–decoder | compress | integration/test_transformers_compressed.py::test_compressed_folders_load_into_compressed_memory[t5]
encoder–decoder | immunize | integration/test_model_families.py::test_only_decoders_are_immunized[t5-an encoder beside]
encoder | compress | integration/test_transformers_compressed.py::test_compressed_folders_load_into_compressed_memory[bert]
encoder | federate | integration/test_model_families.py::test_token_classifiers_are_federated
encoder | immunize | integration/test_model_families.py::test_only_decoders_are_immunized[bert-BertForMaskedLM]
vision CNN | compress | integration/test_model_families.py::test_vision_models_run_compressed[resnet]
vision CNN | federate | unit/test_adapted_backbones.py::test_engine_trains_adapters_and_leaves_the_rest
vision transformer | compress | integration/test_model_families.py::test_vision_models_run_compressed[vit]
vision transformer | federate | unit/test_adapted_backbones.py::test_vit_clients_run_side_by_side
vision transformer | immunize | integration/test_model_families.py::test_only_decoders_are_immunized[vit-vocabulary]
diffusion U-Net | compress | integration/test_diffusers_compressed.py::test_compressed_folders_load_into_compressed_memory[unet]
diffusion U-Net | immunize | integration/test_model_families.py::test_a_u_net_is_not_immunized
diffusion U-Net | forget | unit/test_forget_localization.py::test_localization_in_a_pipeline_leaves_it_as_it_was[stable_diffusion]
diffusion U-Net | space | integration/test_adapter_training.py::test_trained_together_is_trained_alone
diffusion transformer | compress | integration/test_diffusers_compressed.py::test_compressed_folders_load_into_compressed_memory[dit]
diffusion transformer | forget | unit/test_forget_localization.py::test_localization_in_a_pipeline_leaves_it_as_it_was[pixart]
diffusion transformer | space | integration/test_adapters_load.py::test_a_transformer_of_diffusers
autoencoder of a pipeline | compress | integration/test_diffusers_compressed.py::test_compressed_folders_load_into_compressed_memory[vae]
LoRA adapters | compress | integration/test_compress_folders.py::test_every_file_comes_back_byte_for_byte[adapter]
LoRA adapters | immunize | unit/test_immunize_training.py::test_adapters_alone_are_trained_where_they_alone_require_gradients
LoRA adapters | forget | unit/test_forget_localization.py::test_adapters_are_hooked_but_must_be_merged_to_be_edited
LoRA adapters | space | unit/test_adapter_bank.py::test_a_folder_becomes_a_bank
flow matching | compress | integration/test_families.py::test_every_family_gives_the_dense_results[Stable Diffusion 3]
flow matching | forget | unit/test_forget_pipelines.py::test_joint_attention_is_edited_and_restored
"""  # noqa: E501
TESTS = {
    (family, method): f"tests/{test}"
    for family, method, test in (line.split(" | ") for line in TESTS.split("\n")[1:-1])
}


@pytest.fixture(scope="module")
def claims():
    """(family, method) of every cell that says something."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    methods, _, *families = [row for row in table if len(row) == 6]
    found = {}
    for family, *cells in families:
        for method, cell in zip(methods[1:], cells, strict=True):
            assert cell in ("yes", "refused", "–"), cell
            if cell != "–":
                found[re.sub(r" \(.*", "", family), method] = cell
    return found


def test_every_claim_has_a_test_and_every_test_a_claim(claims):
    assert claims.keys() == TESTS.keys()


def test_refusals_are_tests_of_refusals(claims):
    for place, claim in claims.items():
        name = TESTS[place].split("::")[1]
        assert (claim == "refused") == ("refused" in name or "_not_" in name or "only_" in name), name


def test_the_tests_are_there(request):
    def lost(collected):
        return [
            test
            for test in TESTS.values()
            if not any(line == test or line.startswith(f"{test}[") for line in collected)
        ]

    deselected = request.config.stash.get(DESELECTED, [])
    if lost([*(item.nodeid for item in request.session.items), *deselected]):  # not all files are run
        command = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings="]
        files = sorted({test.split("::")[0] for test in TESTS.values()})
        collection = warm.run(*command, "--import-mode=importlib", "--collect-only", "-q", *files, cwd=ROOT)
        assert not lost(collection.stdout.splitlines()), collection.stderr
