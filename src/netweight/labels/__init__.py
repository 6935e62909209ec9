"""A label for any model, in the form of a nutrition label: weight, ingredients, and what was not measured.

`identify_subject.py` recognizes the input; `weights.py` reads every tensor once; `weight_rows.py`, `ingredients.py`,
`speech.py`, `adapter_rows.py`, `federation_rows.py` and `against.py` make the rows; `label.py` is the result;
`terminal.py`, `picture.py`, `page.py` and `badge.py` show it; `comparison.py` sets two labels side by side.
"""
