"""The import rule of CONTRIBUTING.md: a file of the package imports only from files above it in the table there."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / 'timm_sape'
TABLE = re.findall(r'^\| `([\w<>/]+?)(?:\.py|/)` \|', (PACKAGE.parent / 'CONTRIBUTING.md').read_text(), re.MULTILINE)
LAYERS = [  # a module imports only from its own layer and from the layers before
    name.removesuffix('/<name>').replace('__init__', '').replace('/', '.') for name in TABLE]


def layer_of(module):
    """Index of the layer of a module, which is its longest prefix in `LAYERS`. The package itself is ''."""
    parts = module.split('.') if module else []
    while parts and '.'.join(parts) not in LAYERS:
        parts.pop()
    return LAYERS.index('.'.join(parts))


def modules():
    for path in sorted(PACKAGE.rglob('*.py')):
        parts = path.relative_to(PACKAGE).with_suffix('').parts
        yield '.'.join(parts[:-1] if parts[-1] == '__init__' else parts), path


def imports_of(module, path):
    """Modules of the package that a file imports anywhere, including inside functions."""
    own = {name for name, _ in modules()}
    package = module.split('.') if path.name == '__init__.py' and module else module.split('.')[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ['timm_sape', *package][:len(package) + 2 - node.level] if node.level else []
            base = '.'.join([*base, *([node.module] if node.module else [])])
            names = [f'{base}.{alias.name}' for alias in node.names]
        else:
            continue
        for name in names:
            if name == 'timm_sape' or name.startswith('timm_sape.'):
                inner = name.removeprefix('timm_sape').removeprefix('.')
                while inner not in own:  # a function or class of a module
                    inner = inner.rpartition('.')[0]
                yield inner


def wrong_arrows(arrows):
    """The arrows (a, b), for a imports b, that point to a later layer."""
    return [f'{a or "timm_sape"} -> {b or "timm_sape"}' for a, b in arrows if layer_of(b) > layer_of(a)]


def arrows():
    return [(module, target) for module, path in modules() for target in imports_of(module, path)]


def test_the_table_is_complete():
    assert {path.stem if path.suffix else path.name for path in PACKAGE.iterdir()} - {'__pycache__', '__init__'} == {
        name.partition('.')[0] for name in LAYERS} - {''}


def test_imports_point_one_way():
    found = arrows()
    assert len(found) > 200
    assert not wrong_arrows(found)


def test_no_cycles():
    """No cycles between files, whatever their layers."""
    graph = {}
    for a, b in arrows():
        if a != b and not a.startswith(f'{b}.') and b:
            graph.setdefault(a, set()).add(b)
    done, under_way = set(), []

    def visit(module):
        assert module not in under_way, ' -> '.join([*under_way, module])
        if module in done:
            return
        under_way.append(module)
        for target in sorted(graph.get(module, ())):
            visit(target)
        under_way.pop()
        done.add(module)

    for module in sorted(graph):
        visit(module)


def test_no_private_names_from_other_files():
    for module, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                private = [alias.name for alias in node.names if alias.name.startswith('_') and alias.name[1] != '_']
                assert not private, f'{module} imports {private} of {node.module}'


def test_wrong_arrows_are_noticed():
    """Negative control."""
    assert wrong_arrows([('ops.sape2', 'encodings.sape2')]) == ['ops.sape2 -> encodings.sape2']
    assert wrong_arrows([('position', 'vit_pos_enc'), ('vit_pos_enc', 'position')]) == ['position -> vit_pos_enc']
    assert wrong_arrows([('hub', 'lab.bench')])


@pytest.mark.full
def test_the_laboratory_is_not_loaded():
    script = (
        'import sys, timm_sape, timm_sape.analysis; '
        'print([name for name in sys.modules if name.startswith("timm_sape.lab")])')
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '[]'
