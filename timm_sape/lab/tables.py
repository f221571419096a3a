"""Write rows of plain values as CSV and as Markdown."""
import csv
from pathlib import Path
from typing import Any, Dict, Sequence

__all__ = ['markdown', 'with_interval', 'write_csv']


def write_csv(rows: Sequence[Dict[str, object]], path: Path, notes: str = '') -> None:
    """Write a header and one line per row.

    Args:
        rows: Plain values by column. All rows have the same columns.
        path: The file.
        notes: What was measured, where and with which versions. Becomes a last column, `notes`, the same in every row.
            A comment line above the header would break `pandas.read_csv` and spreadsheets, and a second file would get
            lost when the table is mailed. A column survives that, and also filtering and joining tables.
    """
    rows = [{**row, 'notes': notes} for row in rows] if notes else rows
    with open(path, 'w', newline='', encoding='utf-8') as f:
        writer = csv.DictWriter(f, fieldnames=list(rows[0]), lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)


def markdown(rows: Sequence[Dict[str, object]]) -> str:
    """Format rows as a Markdown table with one column per key. None becomes an empty cell."""
    cells = [
        ['' if cell is None else ' '.join(str(cell).splitlines()).replace('|', r'\|') for cell in line]
        for line in (rows[0], *(row.values() for row in rows))]
    lines = [' | '.join(line) for line in cells]
    return '\n'.join(f'| {line} |' for line in (lines[0], ' | '.join('---' for _ in rows[0]), *lines[1:]))


def with_interval(row: Dict[str, Any], column: str) -> str:
    """A value in percent and its interval, from `column`, `column_low` and `column_high`: `'52.1 [50.3, 53.9]'`."""
    return f'{row[column]:.1f} [{row[f"{column}_low"]:.1f}, {row[f"{column}_high"]:.1f}]'
