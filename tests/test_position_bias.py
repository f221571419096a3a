"""The example with the controlled test of Position-SHAP, on ten colours, which a model learns in seconds."""
import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from example_tools import load_script

EXAMPLE = Path(__file__).parents[1] / 'examples' / 'position_bias.py'


@pytest.fixture(scope='module')
def colours(tmp_path_factory):
    folder = tmp_path_factory.mktemp('colours')
    rng = np.random.default_rng(0)
    palette = rng.integers(40, 256, (10, 3))
    for split, count in (('train', 160), ('test', 12)):
        for name, colour in enumerate(palette):
            (folder / split / str(name)).mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(colour + rng.normal(0, 10, (32, 32, 3)), 0, 255)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / split / str(name) / f'{i}.png')
    return folder


@pytest.mark.full
def test_example(colours, tmp_path):
    command = [
        sys.executable, str(EXAMPLE), '--data-dir', str(colours), '--output', str(tmp_path), '--epochs', '10',
        '--pos-enc', 'ape']
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    row, = csv.DictReader((tmp_path / 'position_bias.csv').open())
    assert row['encoding'] == 'ape' and float(row['top-1']) > 60
    assert float(row['P-SHAP, position-dependent']) > float(row['P-SHAP, independent'])
    p = float(row['p, one-sided'])
    assert p < 0.05 and row['verdict at .01'] == ('higher' if p < 0.01 else 'not shown')
    assert (tmp_path / 'position_bias.png').stat().st_size > 1000 and '| ape |' in done.stdout


@pytest.fixture
def refused(colours, tmp_path, monkeypatch, capsys):
    """Starts the script, which must stop before the long computation. Returns the error."""
    example = load_script(EXAMPLE)
    monkeypatch.setattr(example, 'tensors', None)

    def main(*options):
        command = ['position_bias.py', '--data-dir', str(colours), '--output', str(tmp_path), *options]
        monkeypatch.setattr(sys, 'argv', command)
        with pytest.raises(SystemExit, match='2'):
            example.main()
        return capsys.readouterr().err

    return main


@pytest.mark.parametrize('name', ['position_bias.csv', 'position_bias.png'])
def test_nothing_is_overwritten(name, refused, tmp_path):
    (tmp_path / name).touch()
    assert f'{name} exists; name another folder' in refused()


def test_an_unknown_encoding(refused):
    assert "Unknown position encoding 'ropee'" in refused('--pos-enc', 'ape', 'ropee')


@pytest.mark.full
def test_nothing_learned(colours, tmp_path):
    command = [sys.executable, str(EXAMPLE), '--data-dir', str(colours), '--output', str(tmp_path), '--pos-enc', 'nope']
    done = subprocess.run([*command, '--epochs', '1', '--test-images', '20'], capture_output=True, text=True)
    assert done.returncode == 2 and 'train for more epochs' in done.stderr.splitlines()[-1]
