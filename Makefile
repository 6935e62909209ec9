# `make` prints these lines.
#
# make tour       Install what the tour needs and run it. It shows every method at work on small models.
# make quick      Run fast tests of every area, in about a minute.
# make test       Install what the tests need and run all of them.
# make check      Check style, formatting, types, layers, docstrings, figures in pages, and build the site.
# make figures    Write the figures in README.md and docs/ from the result files that they come from.
# make docs       Build the documentation as a site in site/. A warning is an error.
# make study      Run the slow studies: faults of a federation's processes, fuzzing, and the papers' tables. They resume.
# make bench      Measure the codec and its peers on this machine, and write docs/performance.md.
# make bench-generation  Measure generation of the language model in MODEL on this CPU, and write the pages' figures.
# make bench-base-model  Measure generation, memory and a defense on the base model in MODEL, and write the pages' figures.
# make bench-language  Measure attacks and defenses on the chat model in MODEL, and write the pages' figures; it resumes.
# make bench-gpu  Measure everything that needs a GPU, in ten minutes: MODEL=FOLDER OUTPUT=FILE DRY_RUN=1 are options.
# make clean      Remove what was built, except downloaded packages.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet -c constraints.txt
export HF_HUB_DISABLE_TELEMETRY := 1
export NO_MKDOCS_2_WARNING := 1

# What an installation is made from: when one of these changes, netweight is installed again.
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find native src experiments toys -type f \
	! -name '*.pyc' ! -name '*.so' 2>/dev/null)

# Figures in pages that come from result files; see scripts/figures.py.
PAGES := README.md $(wildcard docs/*.md)
COG := $(BIN)/cog --verbosity=0 -I scripts -p 'from figures import *'

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

.PHONY: help tour quick test check check-types check-the-rest figures docs study bench bench-base-model bench-generation bench-language bench-gpu clean

# The tour exits with 1 where an attack succeeds or another target is missed, which is part of what it shows.
tour: $(VENV)/tour.stamp
	$(BIN)/netweight tour || test $$? -eq 1

# Two processes, each with whole files of tests and one thread. Compiled test files are kept, even where the environment
# tells Python to keep none: compiling them takes each process a quarter of a minute.
test: $(VENV)/dev.stamp
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Files of fast tests, from every area.
QUICK := tests/golden/test_golden_blobs.py $(patsubst %,tests/unit/test_%.py, \
	settings recipes recipe_schema cli cli_run errors finding report report_text conclusions names seeds \
	statistics progress digest environment packaging store store_header adapter_files adapter_kinds \
	basis space_points space_merging compress_plan compress_loaders memory_tensor memory_model layerwise \
	in_order codec_queue finetuning_parts finetuning_findings repnoise_loss answers row_layouts \
	chat_templates texts survival perplexity federate_updates federate_hyperfl forget_detection \
	forget_images image_metrics copy_metrics embedding_search_findings probe units) \
	tests/property/test_names_laws.py tests/property/test_partition_laws.py

quick: $(VENV)/dev.stamp
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(QUICK)

# Types take longest, so the rest is checked beside them.
check: $(VENV)/dev.stamp
	$(MAKE) --jobs 2 --output-sync=target check-types check-the-rest

check-types:
	$(BIN)/mypy

check-the-rest:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --config pyproject.toml
	$(BIN)/python scripts/public_names.py
	$(BIN)/python scripts/public_docstrings.py
	$(COG) --check --check-fail-msg='Run make figures.' $(PAGES)
	$(BIN)/python -m mkdocs build

figures: $(VENV)/dev.stamp
	$(COG) -r $(PAGES)

docs: $(VENV)/dev.stamp
	$(BIN)/python -m mkdocs build

# A finished reproduction is kept, so that study continues where it was stopped.
STUDY_AT_PAPER_SCALE := neuzip-fig5
# Miniatures that need no data: one table for each paper.
STUDY_MINIATURES := repnoise-table1 nemo-table1 w2w-table1
STUDY_WITH_DATA := neuzip-table1 neuzip-table2 neuzip-table3-decoder neuzip-table3-encdec neuzip-table4 neuzip-fig2 neuzip-fig3
# The second text-to-image miniature, real pictures with captions: hours on a CPU; goes on where it was stopped.
STUDY_EMOJI := reproductions/emoji-diffusion
# At the paper's scale, which takes hours to days on a CPU; each run within a table is kept and goes on by the round.
STUDY_FEDERATED := hyperfl-table3 hyperfl-fig5 hyperfl-table5 hyperfl-fig6 hyperfl-fig7 hyperfl-table4 \
	hyperfl-table1 hyperfl-table2

# Exit code 1 is a finding that failed, which a study reports and goes on; tables that train need NETWEIGHT_DATA.
study: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m study
	if [ -x fuzz/run.sh ]; then PATH="$(CURDIR)/$(BIN):$$PATH" fuzz/run.sh; fi
	for table in $(STUDY_AT_PAPER_SCALE); do $(BIN)/netweight reproduce $$table --scale paper || [ $$? = 1 ] || exit 1; done
	for table in $(STUDY_MINIATURES); do $(BIN)/netweight reproduce $$table || [ $$? = 1 ] || exit 1; done
	if [ -z "$$NETWEIGHT_DATA" ]; then echo "NETWEIGHT_DATA is not set: $(STUDY_WITH_DATA) $(STUDY_EMOJI) $(STUDY_FEDERATED) are left out."; else \
		for table in $(STUDY_WITH_DATA); do $(BIN)/netweight reproduce $$table || [ $$? = 1 ] || exit 1; done; \
		$(BIN)/python -m netweight_experiments.toys.small_diffusion $(STUDY_EMOJI) --world emoji || exit 1; \
		for table in $(STUDY_FEDERATED); do $(BIN)/netweight reproduce $$table --scale paper || [ $$? = 1 ] || exit 1; done; fi

bench: $(VENV)/dev.stamp
	$(BIN)/netweight benchmark codec
	$(BIN)/python -m netweight_experiments.benchmarks compress.performance_page

# Let nothing else run meanwhile; the figures in README.md and docs/compress.md come from the file.
bench-generation: $(VENV)/dev.stamp
	$(BIN)/python -m netweight_experiments.benchmarks compress.generation $(MODEL) \
		--output benchmarks/results/compress/generation.json
	$(MAKE) figures

# About an hour of two cores and 9 GB; scores and models are kept in WORK, by default the folder work-language.
WORK ?= work-language
bench-language: $(VENV)/dev.stamp
	$(BIN)/python -m netweight_experiments.benchmarks language.refusal $(MODEL) $(WORK)/refusal \
		--output benchmarks/results/language/refusal.json
	$(BIN)/python -m netweight_experiments.benchmarks language.generation $(MODEL) --threads 1 --tokens 24 \
		--output benchmarks/results/language/generation.json
	$(BIN)/python -m netweight_experiments.benchmarks immunize.real_size $(MODEL) --threads 1 \
		--output benchmarks/results/immunize/real-size.json
	$(BIN)/python -m netweight_experiments.benchmarks language.guarded_domain $(MODEL) $(WORK)/guarded \
		--output benchmarks/results/language/guarded-domain.json
	$(BIN)/python -m netweight_experiments.benchmarks language.code_answers $(MODEL) $(WORK)/guarded \
		--output benchmarks/results/language/code-answers.json
	$(MAKE) figures

# About ten minutes of two cores and 6 GB, for a base model such as Gemma 3 270M; it resumes.
bench-base-model: $(VENV)/dev.stamp
	$(BIN)/python -m netweight_experiments.benchmarks language.generation $(MODEL) \
		--output benchmarks/results/language/base-model-generation.json
	$(BIN)/python -m netweight_experiments.benchmarks immunize.real_size $(MODEL) --threads 1 \
		--output benchmarks/results/language/base-model-cost.json
	$(BIN)/python -m netweight_experiments.benchmarks language.guarded_domain $(MODEL) $(WORK)/base-model --threads 2 \
		--defenses repnoise --attacks "Adam, all weights" \
		--output benchmarks/results/language/base-model-guarded-domain.json
	$(MAKE) figures

# On a GPU machine with torch for CUDA and the extras bench, llm, evidence and cuda; what is there already is used. The
# same command goes on where it was stopped. With DRY_RUN=1 everything runs at tiny sizes, on a CPU too.
bench-gpu:
	PYTHONPATH="experiments$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m netweight_experiments.benchmarks compress.gpu \
		$(if $(MODEL),--model $(MODEL)) $(if $(OUTPUT),--output $(OUTPUT)) $(if $(DRY_RUN),--dry-run)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src experiments tests -name __pycache__ -type d -exec rm -rf {} +
	rm -rf site

# torch goes first and alone: an exact version finds the small CPU build, a range would fetch gigabytes of CUDA.
$(VENV)/torch.stamp: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(shell grep '^torch==' constraints.txt)
	touch $@

# Dependencies have stamps of their own, so that a change of code installs netweight and its experiments alone.
$(VENV)/build.stamp: pyproject.toml constraints.txt $(VENV)/torch.stamp
	$(PIP) scikit-build-core nanobind cmake ninja
	touch $@

$(VENV)/tour.stamp: $(SOURCES) $(VENV)/build.stamp
	$(PIP) --no-build-isolation ".[tour]" ./toys ./experiments
	touch $@

$(VENV)/dev.stamp: $(SOURCES) $(VENV)/build.stamp
	$(PIP) --no-build-isolation ".[dev,docs,evidence,llm,diffusion,federated,ray,dp,bench]" ./toys ./experiments
	touch $@
