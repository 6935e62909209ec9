"""Read prompts out of files: a line each, or a column of a table."""

from __future__ import annotations

from pathlib import Path

from netweight.data.rows import RowErrors, read_rows, read_text
from netweight.errors import UsageError


def read_prompts(path: str | Path, *, column: str = "prompt") -> list[str]:
    """Read prompts, each once: the lines of a .txt, or of what `read_rows` takes the first column of those named."""
    path = Path(path)
    if path.suffix == ".txt" and path.is_file():
        found = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    else:
        rows = read_rows(path)
        named = [name.strip() for name in column.split(",")]
        column = next((name for name in named if name in rows.columns), named[0])
        rows.need(column, by="--column")
        errors, found = RowErrors(rows.name), []
        for row in rows.rows:
            value = row.values.get(column)
            if isinstance(value, str) and value.strip():
                found.append(value.strip())
            else:
                errors.add(row.where, "no prompt")
        errors.refuse("Fill them in, or leave the rows out.")
    if not found:
        raise UsageError(f"{path} contains no prompt.", cure="Give at least one.")
    return list(dict.fromkeys(found))
