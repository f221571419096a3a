"""Recipes in train_configs: those in a folder differ only in the model, and train.py accepts every key and value."""
import ast
import os
import re
from pathlib import Path
from typing import Any, Dict, List

import pytest
import timm
import torch
import yaml
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from timm.optim import create_optimizer_v2

import timm_sape  # noqa: F401, registers the models

ROOT = Path(__file__).parents[1]
# A folder with a plan has a single recipe, for `timm-sape experiment`. The tests of that command cover its plans.
RECIPES = sorted(p for p in ROOT.glob('train_configs/*') if p.is_dir() and not (p / 'plan.yaml').exists())
CONFIGS = sorted([*ROOT.glob('train_configs/*/recipe.yaml'), *(c for p in RECIPES for c in p.glob('*.yaml'))])
TRAIN_PY_ARGS = Path(__file__).parent / 'data' / 'train_py_args.txt'

# The rows of the paper's Table 1, and the Q row of its Table 2.
TABLE_ROWS = {'ape', 'rope2d', 'rope2d_ape', 'cope_ape', 'sape2_k', 'sape2_k_ape', 'sape2_q_ape'}
MORE_ROWS = {
    'smoke': {'nope'}, 'repository_cifar10': {'rope2d_mixed', 'rope2d_mixed_ape'},
    'repository_cifar100': {'rope2d_mixed', 'rope2d_mixed_ape'}}

# Arguments whose values are text; all others that the recipes use are numbers, switches or lists of numbers.
TEXT = {'model', 'dataset', 'train_split', 'val_split', 'opt', 'sched', 'aa', 'remode', 'train_interpolation', 'device'}


def committed_args() -> List[str]:
    lines = TRAIN_PY_ARGS.read_text().splitlines()
    return [line for line in lines if not line.startswith('#')]


def script_args(script: Path) -> List[str]:
    """Destinations of all `add_argument` calls of a script, sorted."""
    dests = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if not (isinstance(node, ast.Call) and getattr(node.func, 'attr', None) == 'add_argument'):
            continue
        flags = [arg.value for arg in node.args]
        dest = [keyword.value.value for keyword in node.keywords if keyword.arg == 'dest']
        long_flags = [flag for flag in flags if flag.startswith('--')]
        dests.add(dest[0] if dest else (long_flags or flags)[0].lstrip('-').replace('-', '_'))
    return sorted(dests)


def load(config: Path) -> Dict[str, Any]:
    return yaml.safe_load(config.read_text())


def wrong_types(values: Dict[str, Any]) -> List[str]:
    """Keys whose values do not have the type that train.py needs.

    YAML 1.1 reads 1e-3 as text. argparse converts a single value, but not the values in a list.
    """
    wrong = []
    for key, value in values.items():
        if key in ('device_modules', 'model_kwargs'):
            continue
        wanted = str if key in TEXT else (int, float)
        if not all(isinstance(item, wanted) for item in (value if isinstance(value, list) else [value])):
            wrong.append(key)
    return wrong


def test_every_recipe_is_there():
    assert {p.name for p in RECIPES} == {
        'paper_cifar10', 'paper_cifar100', 'repository_cifar10', 'repository_cifar100', 'deit_cifar10', 'deit_cifar100',
        'finetune', 'smoke'}


@pytest.mark.parametrize('recipe', [p for p in RECIPES if p.name != 'finetune'], ids=lambda p: p.name)
def test_one_file_for_each_row_of_the_tables(recipe):
    prefix = 'test_vit_' if recipe.name == 'smoke' else 'vit_small_'
    rows = TABLE_ROWS | MORE_ROWS.get(recipe.name, set())
    assert {p.stem for p in recipe.glob('*.yaml')} == {prefix + row for row in rows}


@pytest.mark.parametrize('recipe', RECIPES, ids=lambda p: p.name)
def test_siblings_differ_in_their_model_alone(recipe):
    texts = set()
    for config in recipe.glob('*.yaml'):
        lines = config.read_text().splitlines()
        model, = (line for line in lines if line.startswith('model: '))
        assert model.removeprefix('model: ').split('.')[0] == config.stem
        texts.add('\n'.join(line for line in lines if line != model))
    assert len(texts) == 1


@pytest.mark.parametrize('config', CONFIGS, ids=lambda p: f'{p.parent.name}/{p.stem}')
def test_config_is_one_that_train_py_takes(config):
    values = load(config)
    assert set(values) <= set(committed_args())
    assert timm.is_model(values['model'])
    assert values['device_modules'] == ['timm_sape']
    assert values['model_kwargs']['img_size'] == values['img_size']
    assert all(isinstance(value, int) for value in values['model_kwargs'].values())
    assert not wrong_types(values)


def test_a_number_that_yaml_reads_as_text_is_noticed():
    assert wrong_types(yaml.safe_load('{lr: 1e-3, scale: [0.64, 1e0], opt: adam, epochs: 10}')) == ['lr', 'scale']


@pytest.mark.parametrize('classes', [10, 100])
def test_paper_recipe_holds_what_the_paper_states(classes):
    values = load(ROOT / f'train_configs/paper_cifar{classes}/vit_small_ape.yaml')
    stated = dict(
        epochs=400, batch_size=128, opt='adam', img_size=32, model_kwargs=dict(img_size=32, patch_size=4),
        dataset=f'torch/cifar{classes}', num_classes=classes)
    assert {key: values[key] for key in stated} == stated


@pytest.mark.parametrize('classes', [10, 100])
def test_repository_recipe_is_that_of_its_main_py(classes):
    """Its defaults, and what its commands give: 4 processes with a batch of 128 each, 400 epochs, 32 pixels."""
    values = load(ROOT / f'train_configs/repository_cifar{classes}/vit_small_ape.yaml')
    theirs = dict(
        epochs=400, batch_size=4 * 128, opt='adamw', lr=5e-4 * 4 * 128 / 512, weight_decay=0.05, sched='cosine',
        warmup_epochs=5, warmup_lr=1e-6, min_lr=1e-5, amp=True, seed=0, hflip=0.5, color_jitter=0.3,
        train_interpolation='bicubic', reprob=0.25, remode='pixel', mixup=0.8, cutmix=1.0,
        mixup_prob=1.0, mixup_switch_prob=0.5, smoothing=0.1, drop=0.0, img_size=32,
        model_kwargs=dict(img_size=32, patch_size=4), dataset=f'torch/cifar{classes}', num_classes=classes)
    assert {key: values[key] for key in theirs} == theirs


@pytest.mark.parametrize('classes', [10, 100])
def test_repository_recipe_augments_as_strongly_as_pillow_lets_it(classes, monkeypatch):
    """As there, but for magnitudes above 9. At 10 timm's Posterize keeps 0 bits, which Pillow 13 takes for an error."""
    values = load(ROOT / f'train_configs/repository_cifar{classes}/vit_small_ape.yaml')
    assert values['aa'].replace('-mmax9', '') == 'rand-m9-mstd0.5-inc1'
    monkeypatch.setattr('timm.data.auto_augment.random.gauss', lambda mean, std: 99.)
    operations = rand_augment_transform(values['aa'], {'translate_const': 14, 'img_mean': (124, 116, 104)}).ops
    assert len(operations) == 15
    for operation in operations:
        operation.prob = 1.
        assert operation(Image.new('RGB', (32, 32), (90, 80, 70))).size == (32, 32)


@pytest.mark.parametrize('family, marks', [
    ('paper', {'paper', 'open in the paper: chosen'}),
    ('repository', {'repository', 'paper, repository', 'chosen'}),
    ('deit', {'recipe', 'chosen'}),
])
def test_every_line_says_where_it_is_from(family, marks):
    """But for those that say what to run on which data."""
    ours = {
        'model', 'device_modules', 'dataset', 'train_split', 'val_split', 'num_classes', 'checkpoint_hist'}
    for config in ROOT.glob(f'train_configs/{family}_cifar*/*.yaml'):
        lines = [line for line in config.read_text().splitlines() if line and not line.startswith('#')]
        marked = {line.partition(':')[0]: line.partition('  # ')[2] for line in lines}
        assert marked.keys() == load(config).keys()
        for key in marked.keys() - ours:
            assert re.match(rf'({"|".join(marks)})\b', marked[key]), (config, key)


@pytest.mark.parametrize('family', ['paper', 'repository', 'deit'])
def test_cifar10_and_cifar100_differ_in_the_data_alone(family):
    """The repository normalizes by the mean and standard deviation of ImageNet."""
    small, large = (load(ROOT / f'train_configs/{family}_cifar{n}/vit_small_ape.yaml') for n in (10, 100))
    images = set() if family == 'repository' else {'mean', 'std'}
    assert {key for key in small if small[key] != large[key]} == {'dataset', 'num_classes', *images}
    assert small.keys() == large.keys()


@pytest.mark.skipif('TIMM_SCRIPTS' not in os.environ, reason="set TIMM_SCRIPTS to the directory of timm's train.py")
def test_committed_arguments_are_those_of_train_py():
    assert committed_args() == script_args(Path(os.environ['TIMM_SCRIPTS']) / 'train.py')


def fallbacks(model, **kwargs):
    """Names of the parameters that AdamW trains where the optimizer is Muon."""
    optimizer = create_optimizer_v2(model, 'muon', lr=1e-3, weight_decay=0.05, **kwargs)
    model(torch.randn(1, 3, *model.patch_embed.img_size)).square().sum().backward()
    optimizer.step()
    return {name for name, p in model.named_parameters() if not optimizer.state[p].get('use_muon')}


def test_muon_chooses_by_shape():
    """As docs/training.md says."""
    for size, has_bias in (('tiny', True), ('small', False)):
        model = timm.create_model(f'vit_{size}_pos_enc', pos_enc='ape+sape2_k+rpb', depth=1)
        found = fallbacks(model)
        assert 'pos_embed' in found and not any('sape2_k.table' in name for name in found)
        assert any('rpb.table' in name for name in found) == has_bias


def test_muon_can_leave_encodings_to_adamw():
    """As docs/training.md says."""
    model = timm.create_model('test_vit_pos_enc', pos_enc='ape+sape2_k+rope2d_mixed+shaw+peg')
    by_adamw, names = fallbacks(model, fallback_no_weight_decay=True), [name for name, _ in model.named_parameters()]
    assert by_adamw >= {'pos_embed', 'cls_token', *(name for name in names if 'encodings.' in name)}
    assert any(name.endswith('qkv.weight') for name in names if name not in by_adamw)
