"""Count the tests that name each encoding in their parameters or in their own name. Prints a Markdown table."""
import re
import subprocess
import sys
from collections import Counter

from timm_sape import list_encodings

names = list_encodings()
counts, alone = Counter(), Counter()
collected = subprocess.run(
    [sys.executable, '-m', 'pytest', '--collect-only', '-q', 'tests'], capture_output=True, text=True, check=True)
for line in collected.stdout.splitlines():
    match = re.match(r'tests/[\w/]+\.py::(?:\w+::)?test_(\w+)(?:\[(.*)\])?$', line)
    if not match:
        continue
    function, parameters = match[1], match[2] or ''
    named = {part.removeprefix('auto_') for part in re.split(r'[-+]', parameters)} & set(names)
    in_function = {name for name in names if f'_{name}_' in f'_{function}_'}
    # of overlapping names, the longest counts: a test named 'irpe_qk' is not about 'irpe_q'
    named |= {n for n in in_function if not any(n != other and n in other for other in in_function)}
    counts.update(named)
    if len(named) == 1:
        alone.update(named)

print('| encoding | tests that name it | of these, no other |')
print('|---|---|---|')
for name in names:
    print(f'| {name} | {counts[name]} | {alone[name]} |')
    assert counts[name], f'no test names {name}'
