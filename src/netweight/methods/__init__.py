"""The methods, one folder each: settings, algorithm, what reads and writes files, `report.py`. None imports another."""
