"""Fine-tuning a grafted model: the example, on handwritten digits, and the parameter groups of the recipe."""
import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import yaml
from PIL import Image
from scipy.stats import ttest_1samp
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2

import timm_sape
from example_tools import check_mirroring, load_script, watch_fine_tuning

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / 'examples' / 'finetune_graft.py'
NUMBER = r'[-+]?\d+\.\d+'


@pytest.fixture(scope='module')
def example():
    return load_script(EXAMPLE)


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    """scikit-learn's digits as folders of images of 32 x 32, 60 of each class to train and 30 to test."""
    folder = tmp_path_factory.mktemp('digits')
    found = load_digits()
    for label in range(10):
        for i, pixels in enumerate(found.images[found.target == label][:90]):
            path = folder / ('train' if i < 60 else 'test') / str(label) / f'{i}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 255 / 16).astype('uint8')).resize((32, 32)).convert('RGB').save(path)
    return folder


@pytest.mark.full
def test_example(digits, tmp_path):
    command = [
        sys.executable, str(EXAMPLE), '--data-dir', str(digits), '--output', str(tmp_path / 'out' / 'x.csv'),
        '--graft', 'sape2_k', 'nope', '--seeds', '2', '--base-images', '320', '--base-epochs', '12',
        '--images', '192', '--epochs', '8']
    done = subprocess.run(command, capture_output=True, text=True, encoding='utf-8', timeout=300)
    assert done.returncode == 0, done.stderr
    base, = re.findall(rf'bases have ({NUMBER}) ± {NUMBER} %', done.stdout)
    assert float(base) > 25  # of six classes

    largest, = re.findall(rf'largest logit: ({NUMBER})', done.stdout)
    changes = dict(re.findall(r'(\w+) (\d\.\de[-+]\d+)', done.stdout))
    assert changes.keys() == {'sape2_k', 'nope'} and float(largest) > 0.1
    assert all(float(change) < 1e-5 for change in changes.values())

    rows = list(csv.DictReader((tmp_path / 'out' / 'x.csv').read_text().splitlines()))
    notes, = {row['notes'] for row in rows}
    assert notes.startswith('320 images and 12 epochs for the base, 192 and 8 for each; ') and 'torch' in notes
    assert [(row['graft'], row['seed']) for row in rows] == [
        (name, seed) for seed in '01' for name in ('none', 'sape2_k', 'nope')]
    top1 = {name: [float(row['top1']) for row in rows if row['graft'] == name] for name in ('none', 'sape2_k', 'nope')}
    assert min(top1['none']) > 35  # of four
    assert top1['nope'] == top1['none'] and top1['none'][0] != top1['none'][1]  # everything but the graft is the same
    opened = [list(map(float, row['gates'].split())) for row in rows if row['graft'] == 'sape2_k']
    assert all(len(gates) == 4 and max(map(abs, gates)) > 0.02 for gates in opened)  # one for each layer
    assert opened[0] != opened[1]

    table = dict(re.findall(r'^\| (\w+) \| [^|]+ ± [^|]+ \| ([^|]+ \| [^|]+) \| ', done.stdout, flags=re.MULTILINE))
    differences = [a - b for a, b in zip(top1['sape2_k'], top1['none'])]
    low, high = ttest_1samp(differences, 0).confidence_interval(0.95)
    assert table['sape2_k'].startswith(f'{sum(differences) / 2:+.2f} ± ')
    assert table['sape2_k'].endswith(f'| {low:+.2f} to {high:+.2f}')


@pytest.mark.parametrize('differences, verdict', [
    ([1., 1.2, 0.9], 'better'), ([-1., -1.2, -0.9], 'worse'), ([1., 1.2, -0.1], 'no difference shown'),
    ([0., 0., 0.], 'no difference shown')])
def test_verdict(example, differences, verdict):
    low, high, found = example.judge(differences)
    assert found == verdict
    if any(differences):
        assert (low, high) == pytest.approx(tuple(ttest_1samp(differences, 0).confidence_interval(0.95)))


@pytest.mark.parametrize('arguments, message', [
    (['--seeds', '1'], '--seeds must be at least 2'),
    (['--base-images', '360', '--images', '500'], 'there are only 240 images of classes 6 to 9'),
    (['--graft', 'lookhere'], 'no neutral form'),
    (['--data-dir', 'nowhere'], 'nowhere has neither'),
    (['--output', str(EXAMPLE)], 'finetune_graft.py exists; name a new file'),
])
def test_mistakes(example, digits, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, 'argv', ['finetune_graft.py', '--data-dir', str(digits), *arguments])
    monkeypatch.setattr(example, 'train', None)
    with pytest.raises(SystemExit) as error:
        example.main()
    assert error.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_fine_tuning_mirrors_left_and_right_and_has_rates_by_layer(example, monkeypatch):
    watched, images = watch_fine_tuning(example, 4, monkeypatch), torch.rand(192, 1, 2, 2)
    example.fine_tune(watched.model, images, torch.zeros(192, dtype=torch.long), 3, '', 0, lr=0.1)
    assert watched.layer_decay == 0.75
    rates = watched.rates
    warm = rates.index(max(rates))  # after an epoch of warm-up the rate only falls
    assert len(rates) == 9 and 0 < warm <= 3 and rates[warm:] == sorted(rates[warm:], reverse=True)
    assert rates[-1] < 0.02
    check_mirroring(images, watched.images)


def test_each_seed_draws_its_images(example, digits, tmp_path, monkeypatch):
    asked, draw = [], example.draw

    def spy(dataset, classes, count=None, seed=0):
        asked.append((len(classes), count, seed))
        return draw(dataset, classes, 100 if count else None, seed)

    monkeypatch.setattr(example, 'draw', spy)
    monkeypatch.setattr(example, 'train', lambda *args, **kwargs: None)
    monkeypatch.setattr(sys, 'argv', [
        'finetune_graft.py', '--data-dir', str(digits), '--output', str(tmp_path / 'x.csv'), '--graft', 'nope',
        '--seeds', '2', '--first-seed', '5', '--base-images', '101', '--images', '102'])
    example.main()
    assert asked == [(6, 101, 5), (4, 102, 5), (6, 101, 6), (4, 102, 6), (6, None, 0), (4, None, 0)]


def groups(model):
    """Factor of the learning rate and weight decay of each parameter under the recipe's optimizer."""
    recipe = yaml.safe_load((ROOT / 'train_configs/finetune/vit_small_sape2_k_graft.yaml').read_text())
    optimizer = create_optimizer_v2(model, **{k: recipe[k] for k in ('opt', 'lr', 'weight_decay', 'layer_decay')})
    found = {id(p): (group['lr_scale'], group['weight_decay']) for group in optimizer.param_groups
             for p in group['params']}
    return {name: found[id(p)] for name, p in model.named_parameters()}


# parameters of each block, and parameters that all blocks share
POS_ENC = 'sape2_k+irpe_k+rope2d_mixed+fourier+t5'


@pytest.mark.parametrize(
    'base', ['vit_tiny_patch16_224', 'deit_tiny_distilled_patch16_224', 'vit_relpos_small_patch16_224'])
def test_parameter_groups(base):
    """Added parameters have the learning rate of their block, or that of the tokens, and no weight decay."""
    model = timm_sape.graft(base, POS_ENC, depth=3)
    found = groups(model)
    added = {name for name in found if 'encodings.auto_' in name}
    assert {name.split('.')[0] for name in added} == {'blocks', 'encodings'}
    for name in added:
        block = re.match(r'blocks\.\d', name)
        beside = f'{block[0]}.attn.qkv.weight' if block else 'patch_embed.proj.weight'
        assert found[name] == (found[beside][0], 0), name
    rates = [found[name][0] for name in (
        'patch_embed.proj.weight', *(f'blocks.{i}.attn.qkv.weight' for i in range(3)), 'head.weight')]
    assert rates == pytest.approx([0.75 ** i for i in (4, 3, 2, 1, 0)])
    assert found['blocks.0.attn.qkv.weight'][1] == 0.05


def test_parameter_groups_are_not_timms_own(monkeypatch):
    """Without us, timm would give parameters that all blocks share the rate of the head, and decay tables."""
    model = timm_sape.graft('vit_tiny_patch16_224', POS_ENC, depth=3)
    monkeypatch.setattr(timm_sape.VisionTransformerPosEnc, 'group_matcher', VisionTransformer.group_matcher)
    monkeypatch.setattr(timm_sape.VisionTransformerPosEnc, 'no_weight_decay', VisionTransformer.no_weight_decay)
    found = groups(model)
    assert found['encodings.auto_fourier.fc1.weight'] == (1, 0.05)
    assert found['blocks.0.attn.encodings.auto_sape2_k.table_x'] == (pytest.approx(0.75 ** 3), 0.05)


def test_recipe_compares_a_graft_with_its_base():
    """Both models have the same weights on the Hub."""
    sources = []
    for config in (ROOT / 'train_configs/finetune').glob('*.yaml'):
        values = yaml.safe_load(config.read_text())
        assert values['pretrained'] is True and values['model'].split('.')[0] == config.stem
        cfg = timm.models.get_pretrained_cfg(values['model'])
        assert cfg.input_size == (3, values['img_size'], values['img_size'])
        sources.append(cfg.hf_hub_id)
    assert sources == ['timm/vit_small_patch16_224.augreg_in21k_ft_in1k'] * 2
