"""Rows of plain values as CSV and as Markdown."""
import csv
from pathlib import Path
from typing import Dict, Sequence

__all__ = ['markdown', 'write_csv']


def write_csv(rows: Sequence[Dict[str, object]], path: Path, notes: str) -> None:
    """One row a line, behind a comment line that says what, where and when."""
    with open(path, 'w', newline='') as f:
        f.write(f'# {notes}\n')
        writer = csv.DictWriter(f, fieldnames=list(rows[0]), lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)


def markdown(rows: Sequence[Dict[str, object]]) -> str:
    """Rows as a Markdown table, a column for each key; None is an empty cell."""
    cells = [list(rows[0]), *(['' if cell is None else str(cell) for cell in row.values()] for row in rows)]
    lines = [' | '.join(line) for line in cells]
    return '\n'.join(f'| {line} |' for line in (lines[0], ' | '.join('---' for _ in rows[0]), *lines[1:]))
