"""CONTRIBUTING.md, "Add an encoding", followed in a copy of the repository: no other file has to change."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import timm_sape

ROOT = Path(timm_sape.__file__).parents[1]

ENCODING = '''"""A window (invented for this test).

Each head of each layer learns how fast attention falls with the squared distance. It costs an addition per logit.
"""
import torch
import torch.nn as nn

from .base import PositionEncoding
from .registry import register_encoding


@register_encoding('window2d')
class WindowEncoding(PositionEncoding):
    """A learned window.

    Logits get -w_h^2 (dy^2 + dx^2).

    Args:
        start: Initial value of w.
    """
    relative = True
    sees_mirror = False
    adds = 'L * h'
    on_other_grids = 'distances extrapolate'

    def __init__(self, *, start: float = 0.3, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        self.start = start
        self.weight = nn.Parameter(torch.empty(self.num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)

    def position_bias(self, grid):
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        yx = grid.coordinates(weight.device, weight.dtype)  # [H*W, 2]
        squares = (yx[:, None] - yx).square().sum(-1)  # [H*W, H*W]
        return grid.between_tokens(-weight[:, None, None].square() * squares)
'''
REFERENCE = '''"""A window on the logits, in loops."""
from loops import logit_bias


def bias(weight, grid_size, **where):
    def pair(h, from_y, from_x, y, x):
        return -weight[h] ** 2 * ((y - from_y) ** 2 + (x - from_x) ** 2)

    return logit_bias(pair, len(weight), grid_size, **where)
'''
TEST = '''"""window2d: a learned window."""
import reference_window2d
from bias_checks import LearnedBiasTests
from harness import where


class TestWindow2d(LearnedBiasTests):
    name = 'window2d'

    def expected_bias(self, encoding, q, x, grid):
        return reference_window2d.bias(encoding.weight, grid.size, **where(grid))
'''


def run(folder, *command):
    env = {**os.environ, 'PYTHONPATH': str(folder), 'MPLBACKEND': 'agg'}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository with one encoding more, without pages."""
    for path in ROOT.iterdir():
        if path.is_dir() and path.name in ('timm_sape', 'docs', 'tests', 'results', 'train_configs', 'examples', '.ci'):
            shutil.copytree(path, tmp_path / path.name, ignore=shutil.ignore_patterns('__pycache__'))
        elif path.is_file():
            shutil.copy(path, tmp_path)
    (tmp_path / 'timm_sape' / 'encodings' / 'window2d.py').write_text(ENCODING)
    imports = tmp_path / 'timm_sape' / 'encodings' / '__init__.py'
    imports.write_text(f'{imports.read_text()}\nfrom . import window2d\n')
    return tmp_path


@pytest.mark.full
def test_add_an_encoding(copy):
    (copy / 'tests' / 'encodings' / 'reference_window2d.py').write_text(REFERENCE)
    (copy / 'tests' / 'encodings' / 'test_window2d.py').write_text(TEST)
    code, output = run(copy, 'docs/make_pages.py', '--pictures')
    assert code == 0, output
    page = (copy / 'docs' / 'encodings' / 'window2d.md').read_text()
    assert '-w_h^2 (dy^2 + dx^2)' in page and 'L \\* h' in page and 'Initial value of w' in page
    assert f'[{len(timm_sape.list_encodings()) + 1} position encodings]' in (copy / 'README.md').read_text()
    assert '[`window2d`](encodings/window2d.md)' in (copy / 'docs' / 'encodings.md').read_text()
    code, output = run(
        copy, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', 'tests/encodings/test_window2d.py',
        'tests/test_architecture.py', 'tests/test_docs.py', 'tests/test_readme.py', 'tests/test_entrypoints.py',
        'tests/test_registry.py', 'tests/contracts', 'tests/naflex', 'tests/test_gates.py', 'tests/test_maps.py',
        'tests/test_probe.py', '-k', 'window2d or figures or generated or page or names or import_takes or '
        'architecture or registry or test_every or claim')
    assert code == 0 and 'passed' in output and 'skipped' not in output, output
