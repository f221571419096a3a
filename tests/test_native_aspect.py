"""The example that trains at native aspect ratios runs, learns, and takes saved models and grafts."""
import json
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

import timm_sape
from example_tools import load_script

SCRIPT = Path(__file__).parent.parent / 'examples' / 'native_aspect.py'


@pytest.fixture
def script():
    return load_script(SCRIPT)


@pytest.fixture
def run(script, monkeypatch, capsys):
    """Runs the script. Returns loss and top-1 of each epoch."""
    def main(*arguments):
        monkeypatch.setattr('sys.argv', ['native_aspect.py', *arguments])
        script.main()
        found = re.findall(r'^epoch \d+: loss ([\d.]+), top-1 ([\d.]+) %$', capsys.readouterr().out, re.MULTILINE)
        return [(float(loss), float(top1)) for loss, top1 in found]

    return main


@pytest.mark.full
def test_drawn_images(run):
    epochs = run()
    assert len(epochs) == 8 and epochs[-1][0] < 1.2 and epochs[-1][1] > 40  # of four classes


@pytest.fixture
def folder(tmp_path):
    for split in ('train', 'val'):
        for name, size in (('wide', (40, 16)), ('tall', (16, 40))):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(4):
                Image.new('RGB', size, (40 * i,) * 3).save(tmp_path / split / name / f'{i}.png')
    return tmp_path


def test_a_saved_model_and_a_graft(run, folder):
    model = timm.create_model('test_naflexvit_rope2d', num_classes=2, img_size=32, patch_size=4)
    timm_sape.hub.save(model, folder / 'saved')
    graft = {'base': 'test_vit', 'pos_enc': 'sape2_k', 'use_naflex': True, 'img_size': 32, 'patch_size': 4}
    for arguments in (
            ['--model', f'local-dir:{folder / "saved"}', '--pretrained', '--kwargs', '{}'],
            ['--model', 'vit_graft', '--kwargs', json.dumps(graft)]):
        assert len(run('--data-dir', str(folder), '--epochs', '1', '--batch-size', '4', *arguments)) == 1


def test_epochs_have_other_batches(run, folder, monkeypatch):
    seen = []

    def spy(logits, labels):
        seen.append(labels.tolist())
        return cross_entropy(logits, labels)

    cross_entropy = F.cross_entropy
    monkeypatch.setattr(F, 'cross_entropy', spy)
    run('--data-dir', str(folder), '--epochs', '4', '--batch-size', '4')
    epochs = [seen[i:i + len(seen) // 4] for i in range(0, len(seen), len(seen) // 4)]
    assert len(epochs) == 4 and any(epoch != epochs[0] for epoch in epochs)


def test_training_and_test_images(script, run, folder, monkeypatch):
    """No test image is trained on. Drawn images are not mirrored, because their classes are left and right."""
    asked, create = [], script.create_naflex_loader

    def spy(data, **options):
        split, = {Path(path).parts[-3] for path, _ in data.reader.samples}
        asked.append((split, options['is_training'], options['hflip'], options['mean'], options['std']))
        return create(data, **options)

    monkeypatch.setattr(script, 'create_naflex_loader', spy)
    config = json.dumps({**script.SMALL, 'pretrained_cfg_overlay': {'mean': [0.1, 0.2, 0.3], 'std': [0.4, 0.5, 0.6]}})
    for options, hflip in (['--data-dir', str(folder)], 0.5), ([], 0):
        run('--epochs', '0', '--kwargs', config, *options)
        numbers = hflip, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
        assert asked == [('train', True, *numbers), ('val', False, *numbers)]
        asked.clear()


def test_each_step_is_of_one_batch_in_training_mode(script, run, folder, monkeypatch):
    optimizer, models, modes = mock.Mock(), [], []
    monkeypatch.setattr(script, 'create_optimizer_v2', lambda model, *args, **kwargs: models.append(model) or optimizer)
    optimizer.step.side_effect = lambda: modes.append(models[0].training)
    run('--data-dir', str(folder), '--epochs', '2', '--batch-size', '4')
    assert len(modes) >= 2 and all(modes)
    assert [call[0] for call in optimizer.method_calls] == ['zero_grad', 'step'] * len(modes)


def test_accuracy_counts_images(script):
    """The last batch may be smaller."""
    batches = [(torch.eye(3), torch.tensor([0, 1, 2])), (torch.eye(3)[:1], torch.tensor([2]))]
    assert script.accuracy(torch.nn.Identity(), batches) == 75


@pytest.mark.parametrize('options, text', [
    (['--data-dir', 'nowhere'], "no image or folder 'nowhere'"),
    (['--data-dir', 'FOLDER/train'], "has no folder 'train'"),
    (['--patches', '1'], '--patches must be at least 2'),
    (['--model', 'vit_tiny_ape'], 'vit_tiny_ape takes images of one size; name a NaFlexVit'),
    (['--model', 'naflexvit_tiny_apes'], 'Unknown model (naflexvit_tiny_apes)'),
])
def test_it_says_what_is_wrong(options, text, run, folder, capsys):
    with pytest.raises(SystemExit, match='2'):
        run('--data-dir', str(folder), *(option.replace('FOLDER', str(folder)) for option in options))
    assert text in capsys.readouterr().err.splitlines()[-1]


def test_a_class_without_training_images(run, folder, capsys):
    """timm would number the classes of each folder by itself."""
    shutil.copytree(folder / 'val' / 'wide', folder / 'val' / 'broad')
    with pytest.raises(SystemExit, match='2'):
        run('--data-dir', str(folder))
    assert 'classes that' in capsys.readouterr().err.splitlines()[-1]
