"""The treatment `compress` and its audit, as reports and recipes find them."""

import subprocess
import sys

from folders_under_test import simple_weights, transformers_folder

from netweight.methods.compress.compress_folder import compress_folder
from netweight.methods.compress.settings import CompressSettings
from netweight.methods.compress.verify import TREATMENT, AuditSubject
from netweight.report import missing_audits, run_audits
from netweight.report.audit import audits_of


def test_a_method_is_found_by_its_entry_point_and_declares_its_audits():
    program = "from netweight.report.audit import audits_of\nprint(list(audits_of('compress')))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "['identity', 'size', 'outputs']\n"


def test_every_audit_that_compression_names_is_written_and_none_is_missing_after_a_run(tmp_path):
    source = transformers_folder(tmp_path / "m")
    compress_folder(source, tmp_path / "net")
    found = run_audits(TREATMENT, AuditSubject(tmp_path / "net", source), CompressSettings(threads=1), seed=0)
    assert missing_audits(TREATMENT, found) == ()
    assert missing_audits(TREATMENT, ()) == tuple(audits_of(TREATMENT)) == ("identity", "size", "outputs")
    assert all(finding.passed is not False for finding in found["identity"].findings)


def test_the_audit_fails_where_the_original_is_another(tmp_path):
    compress_folder(transformers_folder(tmp_path / "m"), tmp_path / "net")
    simple_weights(tmp_path / "m" / "model.safetensors", seed=99)
    subject = AuditSubject(tmp_path / "net", tmp_path / "m")
    found = run_audits(TREATMENT, subject, CompressSettings(), seed=0)["identity"].findings
    assert {finding.name: finding.value for finding in found if finding.passed is False} == {"tensors that differ": 2}
