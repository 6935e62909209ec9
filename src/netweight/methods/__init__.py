"""The methods, one folder each: settings, algorithm, `folder.py` for files, `report.py`. None imports another."""
