"""The documentation's site: no page is lost, no link leads nowhere, and every public name has its place."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "site_links.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="outside a source tree")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("site_links", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_that_leave_the_documentation_lead_to_files(script):
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert len(pages) > 20
    assert [script.outside_links(page.read_text(), page.parent) for page in pages] == [[]] * len(pages)


def test_a_link_that_leads_nowhere_is_found_and_others_become_paths(script, caplog):
    page = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(ROOT / "docs" / "x.md"), src_path="x.md"))
    text = "[a](../LICENSE) [b](../no-such-file) [c](errors.md)"
    assert script.on_page_markdown(text, page=page) == "a (`LICENSE`) b (`no-such-file`) [c](errors.md)"
    assert [record.getMessage() for record in caplog.records] == ["x.md links to ../no-such-file, which does not exist"]


def test_pages_that_the_navigation_forgot_come_last(script, tmp_path):
    for name in ("a.md", "b.md", "c.md"):
        (tmp_path / name).write_text("# x\n")
    config = SimpleNamespace(docs_dir=str(tmp_path), nav=["a.md", {"Part": ["b.md"]}])
    assert script.on_config(config).nav == ["a.md", {"Part": ["b.md"]}, {"More": ["c.md"]}]
    assert script.on_config(config).nav[-1] == {"More": ["c.md"]}


def test_the_reference_is_made_of_the_public_names():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "public_names.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("page", "ends_with"), [("[a](index.md)", 0), ("[a](gone.md)", 1), ("[a](../gone)", 1)])
def test_make_check_builds_so_that_a_warning_is_an_error(tmp_path, page, ends_with):
    pytest.importorskip("mkdocs", reason="mkdocs is in the docs extra")
    pytest.importorskip("material", reason="mkdocs-material is in the docs extra")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n{page}\n")
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "hooks: [scripts/site_links.py]\n" in settings
    settings = re.sub(r"^(plugins|nav):\n(?: .*\n)+", "", settings, flags=re.M)
    assert "validation:" in settings
    settings = settings.replace("hooks: [scripts/site_links.py]", f"nav: [index.md]\nhooks: ['{SCRIPT}']")
    (tmp_path / "mkdocs.yml").write_text(settings)
    check, rest = ((ROOT / "Makefile").read_text().split(f"\n{name}:")[1] for name in ("check", "check-the-rest"))
    assert "check-the-rest" in check.split("\n\n")[0]
    recipe = rest.split("\n\n")[0]
    (build,) = re.findall(r"-m (mkdocs build.*)$", recipe, re.M)
    done = subprocess.run(
        [sys.executable, "-m", *build.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == ends_with, done.stderr
