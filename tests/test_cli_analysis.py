"""The subcommands that look at models, from the shell and on real photographs; sweep and compare: test_evaluate.py."""
import argparse
import csv
import json
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_sample_image

import timm_sape
from harness import assert_near
from timm_sape.analysis import PositionShap, gallery, position_maps, position_shap, randomize_encodings
from timm_sape.analysis.figures import displayed, draw_attention_distance, draw_histogram, draw_maps
from timm_sape.cli import main, make_parser
from timm_sape.cli.list import GUIDE
from timm_sape.cli.pshap import _by_class
from timm_sape.entrypoints import SIZES
from timm_sape.loading import ImageFile, load_images, load_model, open_dataset, preprocessing
from timm_sape.loading.models import why_unknown


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A photograph, parts of two photographs as a data set of two classes, and a saved model."""
    folder = tmp_path_factory.mktemp('analysis')
    for name in ('china', 'flower'):
        photo = Image.fromarray(load_sample_image(f'{name}.jpg'))
        photo.save(folder / f'{name}.jpg')
        for split, rows in (('train', 1), ('test', 3)):
            (folder / 'data' / split / name).mkdir(parents=True)
            for i in range(rows * 4):
                part = photo.crop((100 * (i % 4), 100 * (i // 4), 100 * (i % 4) + 100, 100 * (i // 4) + 100))
                part.save(folder / 'data' / split / name / f'{i}.png')
    torch.manual_seed(0)
    model = timm.create_model('test_vit_sape2_k_ape', num_classes=2, img_size=(24, 32), patch_size=8)
    randomize_encodings(model)
    timm.models.save_for_hf(model, folder / 'model', safe_serialization=True)
    return folder


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')


def rows_of(path):
    with open(path) as f:
        rows = list(csv.DictReader(f))
    assert all(row['notes'] for row in rows)
    return rows


@pytest.mark.parametrize('heads', ['mean', 'all'])
def test_map(folder, tmp_path, heads):
    out, numbers = tmp_path / 'map.png', tmp_path / 'map.csv'
    arguments = ['model', '--image', 'china.jpg', '--output', out, '--numbers', numbers]
    assert main(['map', *map(str, arguments), '--layers', '0', '-1', '--patches', '1,2', '--heads', heads]) == 0
    assert Image.open(out).width > 500
    model = load_model('model')
    image, _ = ImageFile('china.jpg', preprocessing(model, crop_mode='squash'))[0]
    maps = position_maps(model, image[None])
    expected = torch.stack([maps.between_patches(maps.layers[i].position)[0] for i in (0, -1)])  # [2, h, H*W, H*W]
    expected = expected.mean(1) if heads == 'mean' else expected.flatten(0, 1)
    found = rows_of(numbers)
    assert_near(torch.tensor([float(row['value']) for row in found]), expected.flatten(), 1e-5)
    height, width = maps.grid.size
    places = [(str(x), str(y)) for y in range(height) for x in range(width)]
    assert height != width and [
        (row['from_x'], row['from_y'], row['to_x'], row['to_y']) for row in found[:len(places) ** 2]] == [
        (*a, *b) for a in places for b in places]
    assert found[0]['map'] == ('layer 0, mean of 4 heads' if heads == 'mean' else 'layer 0, head 0')


@pytest.mark.parametrize('pool, layer', [('token', 0), ('avg', 1)])
def test_the_layer_of_a_map(pool, layer, tmp_path, capsys):
    """With a class token, what the last layer has between patches does not reach the class, and learns nothing."""
    model = timm.create_model(
        'test_vit_sape2_k', num_classes=2, img_size=(24, 32), patch_size=8, depth=2, global_pool=pool)
    timm_sape.hub.save(model, tmp_path / 'pooled')
    arguments = [str(tmp_path / 'pooled'), '--image', 'china.jpg', '--numbers', str(tmp_path / 'map.csv')]
    assert main(['map', *arguments, '--output', str(tmp_path / 'map.png')]) == 0
    assert {row['map'] for row in rows_of(tmp_path / 'map.csv')} == {f'layer {layer}, mean of 4 heads'}


def test_layers_without_position_are_left_out(tmp_path, capsys):
    model = timm.create_model(
        'test_vit_pos_enc', pos_enc='auto_sape2_k', pos_enc_kwargs={'auto_sape2_k': {'init': 0}}, num_classes=2,
        img_size=(24, 32), patch_size=8, depth=2)
    model.blocks[0].attn.encodings['auto_sape2_k'].gate.weight.data.fill_(0.01)
    timm_sape.hub.save(model, tmp_path / 'gated')
    arguments = [str(tmp_path / 'gated'), '--image', 'china.jpg', '--layers', '0', '1']
    assert main(['map', *arguments, '--output', str(tmp_path / 'map.png')]) == 0
    assert 'position adds nothing to the logits of layer 1 of' in capsys.readouterr().err


def test_patches_of_a_map_have_their_shape(tmp_path, monkeypatch):
    drawn = mock.Mock(side_effect=ValueError('enough'))
    monkeypatch.setattr('timm_sape.analysis.figures.draw_maps', drawn)
    model = timm.create_model('test_vit_rope2d', num_classes=2, img_size=32, patch_size=(8, 16))
    timm_sape.hub.save(model, tmp_path / 'wide')
    assert main(['map', f'{tmp_path}/wide', '--image', 'china.jpg', '--output', str(tmp_path / 'map.png')]) == 2
    assert drawn.call_args.args[-1] == 8 / 16


@pytest.mark.parametrize('what, suffix', [('attention', 'svg'), ('similarity', 'pdf'), ('distance', 'png')])
def test_other_maps(tmp_path, what, suffix):
    out, numbers = tmp_path / f'map.{suffix}', tmp_path / 'map.json'
    arguments = ['--what', what, 'local-dir:model', '--image', 'flower.jpg', '--output', str(out)]
    assert main(['map', *arguments, '--numbers', str(numbers)]) == 0
    assert out.stat().st_size > 1000
    found = json.loads(numbers.read_text())
    assert 'flower.jpg' in found['notes']
    assert len(found['rows']) == (2 * 4 if what == 'distance' else 12 * 12)


@pytest.mark.full
def test_map_from_the_shell(tmp_path):
    command = [sys.executable, '-m', 'timm_sape', 'map', 'model', '--image', 'china.jpg', '--output']
    done = subprocess.run([*command, str(tmp_path / 'a.png')], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f'{tmp_path / "a.png"}\n')
    done = subprocess.run([*command, str(tmp_path / 'a.png')], capture_output=True, text=True)
    assert done.returncode == 2 and '--force overwrites' in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize('args, code, text', [
    ('pshap model --data-dir data --workers 0', 0, '| all | 24 |'),
    ('pshap model --data-dir nowhere', 2, "There is no image or folder 'nowhere'"),
    ('probe model --image china.jpg', 0, 'theorems hold'),
    ('probe model --image none.jpg', 2, "There is no file 'none.jpg'."),
    ('sweep model --data-dir data --sizes 24 16x32 --workers 0', 0, '| model | own | 16x32 | 8 |'),
    ('sweep model --data-dir data --sizes 25', 2, 'does not divide the size 25x25'),
    ('compare model local-dir:model --data-dir data --workers 0', 0, '| 0/0 | 1.000 |'),
    ('compare model other --data-dir data', 2, "There is no model, file or folder 'other'"),
    ('list rope2d', 0, 'rope2d  Axial 2-D rotary (RoPE-Axial)  q and k'),
    ('list rope9d', 2, "no encodings match 'rope9d'"),
    ('data cifar10-position --source data --output position', 2, 'made from ten classes, got 2'),
])
def test_what_is_printed(args, code, text, capsys):
    assert main(args.split()) == code
    out, err = capsys.readouterr()
    assert text in (err if code else out) and (not code or len(err.splitlines()) == 1)


@pytest.mark.parametrize('args, text', [
    (['nothing'], "There is no model, file or folder 'nothing'"),
    (['vit_small_rope2'], 'Did you mean vit_small_rope2d'),
    (['resnet501'], 'Did you mean resnet'),
    (['vit_tiny_lookhere'], "'vit_tiny_lookhere'. 'lookhere' needs 6 heads or a multiple of 4, got 3"),
    (['vit_tiny_lookhere_ape'], "'lookhere' needs 6 heads or a multiple of 4, got 3"),
    (['vit_small_pemix'], "Add one, e.g. 'pemix+sincos2d'"),
    (['vit_base_sincos2d_ape'], 'vit_base_pos_enc@random --pos-enc ape+sincos2d'),
    (['data'], 'data is a folder without config.json. Name a folder that timm_sape.hub.save has written'),
    (['local-dir:data'], 'data is a folder without config.json'),
    (['local-dir:nowhere'], 'There is no folder nowhere'),
    (['--image', 'none.jpg'], "There is no file 'none.jpg'."),
    (['--image', 'model/config.json'], 'is not an image that can be read'),
    (['--patches', '4,0'], 'there is no patch 4,0: x goes from 0 to 3, y from 0 to 2'),
    (['--patches', '0,3'], 'there is no patch 0,3: x goes from 0 to 3, y from 0 to 2'),
    (['--layers', '2'], 'There is no layer 2: the model has 2, 0 to 1'),
    (['--cmap', 'blue-ish'], "There is no colour map 'blue-ish'"),
    (['--output', 'map.bmp'], 'must end in .png or .svg or .pdf'),
    (['--output', 'nowhere/map.png'], 'there is no directory'),
    (['--numbers', 'map.txt'], 'must end in .csv or .json'),
    (['--img-size', '30'], 'does not divide'),
    (['--img-size', '8', '8', '8'], '--img-size takes one number, or height and width'),
    (['--img-size', '8x8', '8'], '--img-size takes one number, or height and width'),
    (['--img-size', '100000'], 'an image of 100000 x 100000 pixels takes 120.0 GB, a model many times that, and this'),
    (['--output', 'a' * 300 + '.png'], 'File name too long'),
    (['--numbers', 'a' * 300 + '.csv'], 'File name too long'),
    (['--image', 'a' * 300], 'is not an image that can be read'),
    (['--what', 'distance', '--layers', '0', '--patches', '0,0'],
     '--layers, --patches are not for --what distance, which shows all heads of all layers; leave them out'),
    (['--what', 'similarity', '--heads', 'all'], '--heads is not for --what similarity'),
    (['vit_tiny_nope', '--what', 'similarity'], 'no encoding of vit_tiny_nope adds vectors to its tokens'),
    (['vit_tiny_ape'], 'none acts on the logits of layer 10 of vit_tiny_ape: use --what similarity'),
    (['vit_tiny_nope'], 'position adds nothing to the logits of layer 10 of vit_tiny_nope'),
    (['vit_tiny_sape2_k_graft@random'], 'or it starts at zero and has not been trained'),
])
def test_map_says_what_is_wrong(args, text, tmp_path, capsys):
    model, options = ('model', args) if args[0].startswith('-') else (args[0], args[1:])
    assert main(['map', model, '--image', 'china.jpg', '--output', str(tmp_path / 'map.png'), *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith('timm-sape: ') and text in error
    assert not list(tmp_path.iterdir())


def test_the_hint_about_names_lists_the_commands_with_its_option():
    subcommands = make_parser()._subparsers._group_actions[0].choices
    taking_models = [
        name for name, parser in subcommands.items()
        if '--pos-enc' in parser._option_string_actions and
        any(action.dest in ('model', 'models') and not action.option_strings for action in parser._actions)]
    assert 'in the commands map, probe and pshap vit_base_pos_enc@random' in why_unknown('vit_base_sincos2d_ape')
    assert sorted(taking_models) == ['map', 'probe', 'pshap']


def test_damaged_files(tmp_path, capsys):
    for name in ('x.pth', 'x.safetensors'):
        tmp_path.joinpath(name).write_bytes(b'no weights')
    for model, text in (
            (f'test_vit_ape@{tmp_path}/x.pth', 'is not a checkpoint that can be read safely'),
            (f'test_vit_ape@{tmp_path}/x.safetensors', 'has no weights that can be read safely'),
            (f'{tmp_path}/x.pth', 'is not a checkpoint that can be read safely'),
            ('test_vit_rope2d@model/model.safetensors', 'does not fit the model')):
        assert main(['map', model, '--image', 'china.jpg', '--output', str(tmp_path / 'map.png')]) == 2
        error, = capsys.readouterr().err.splitlines()
        assert text in error and len(error) < 600


@pytest.mark.parametrize('pixels, suffix, mode', [
    (np.full((40, 40), 30_000, np.uint16), 'png', 'I;16'),
    (np.full((40, 40), 30_000, np.int32), 'tif', 'I'),
    (np.full((40, 40), 0.4, np.float32), 'tif', 'F'),
])
def test_images_of_more_than_8_bits(pixels, suffix, mode, tmp_path, capsys):
    """Pillow would clip them to 0 to 255, so that all is white, or black."""
    path = tmp_path / 'data' / 'a' / f'x.{suffix}'
    path.parent.mkdir(parents=True)
    Image.fromarray(pixels).save(path)
    assert main(['map', 'model', '--image', str(path), '--output', str(tmp_path / 'map.png')]) == 2
    error, = capsys.readouterr().err.splitlines()
    assert error.startswith(f'timm-sape: {path} has integers of more than 8 bits') and f'mode {mode})' in error
    assert not (tmp_path / 'map.png').exists()
    if suffix == 'png':  # timm's data sets do not look for other files
        with pytest.raises(ValueError, match='Save it with 8 bits'):
            open_dataset(str(tmp_path / 'data'))[0]


def test_grey_images(tmp_path, capsys):
    model = timm.create_model('test_vit_rope2d', num_classes=2, img_size=32, patch_size=(8, 16), in_chans=1)
    timm.models.save_for_hf(model, tmp_path / 'grey', safe_serialization=True)
    folder = str(tmp_path / 'grey')
    assert main(['map', folder, '--image', 'china.jpg', '--output', str(tmp_path / 'map.png')]) == 0
    assert main(['pshap', folder, '--data-dir', 'data', '--workers', '0']) == 0
    assert '| all | 24 |' in capsys.readouterr().out
    assert main(['sweep', folder, '--sizes', '48', '--data-dir', 'data', '--workers', '0']) == 0


def test_data_set_of_torchvision(tmp_path, capsys):
    """A data set of grey images that is not a folder of images."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
    raw = tmp_path / 'MNIST' / 'raw'
    raw.mkdir(parents=True)
    for split in ('train', 't10k'):
        header = np.array([2051, *pixels.shape], dtype='>i4').tobytes()
        (raw / f'{split}-images-idx3-ubyte').write_bytes(header + pixels.tobytes())
        header = np.array([2049, 12], dtype='>i4').tobytes()
        (raw / f'{split}-labels-idx1-ubyte').write_bytes(header + bytes([0, 1] * 6))
    options = ['--data-dir', str(tmp_path), '--dataset', 'torch/mnist', '--workers', '0']
    for command, text in (
            (['pshap', 'model', '--background', '2'], '| 1 - one | 6 |'),
            (['sweep', 'model', '--sizes', '32'], '12 images of torch/mnist'),
            (['compare', 'model'], '12 images of torch/mnist')):
        assert main([*command, *options]) == 0
        assert text in capsys.readouterr().out


@pytest.mark.parametrize('what', ['bias', 'attention', 'similarity', 'distance'])
def test_map_of_a_model_that_diverged(folder, tmp_path, what, capsys):
    model = timm.create_model('test_vit_sape2_k_ape', num_classes=2, img_size=(24, 32), patch_size=8)
    for p in model.parameters():
        p.data.fill_(torch.nan)
    timm.models.save_for_hf(model, tmp_path / 'diverged', safe_serialization=True)
    arguments = [f'{tmp_path}/diverged', '--image', 'china.jpg', '--output', str(tmp_path / 'map.png')]
    assert main(['map', *arguments, '--what', what]) == 2
    error, = capsys.readouterr().err.splitlines()
    assert error == f'timm-sape: {tmp_path}/diverged computes NaN; has its training diverged, or is its file damaged?'


@pytest.mark.parametrize('args, need, text', [
    # 1024 patches: float32 [4, 1024, 1024] is 16.8 MB, seven of them for one layer, ten for two
    (['--what', 'attention'], 117e6, 'maps of 1 x 4 heads between 1,024 patches take 0.1 GB, and this machine'),
    (['--what', 'distance'], 168e6, 'maps of 2 x 4 heads between 1,024 patches take 0.2 GB'),
    (['--what', 'attention', '--numbers', 'x.csv'], 432e6, 'maps of 1 x 4 heads between 1,024 patches take 0.4 GB'),
])
def test_memory_of_maps(args, need, text, tmp_path, monkeypatch, capsys):
    """Refused if there is less memory than maps need, but not if there is more."""
    monkeypatch.chdir(tmp_path)
    Image.new('RGB', (8, 8)).save('image.png')
    arguments = ['test_vit_nope', '--img-size', '512', '--image', 'image.png', '--output', 'map.png', *args]
    monkeypatch.setattr('timm_sape.analysis.position_maps', lambda *_: 1 / 0)
    monkeypatch.setattr('timm_sape.lab.machine.memory_size', lambda: 0.98 * need)
    assert main(['map', *arguments]) == 2
    assert text in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr('timm_sape.lab.machine.memory_size', lambda: 1.02 * need)
    with pytest.raises(ZeroDivisionError):
        main(['map', *arguments])


@pytest.mark.parametrize(
    'command', ['sweep model --data-dir data --sizes 24 --amp', 'bench', 'bench sape2', 'bench naflex', 'bench timm'])
def test_no_device_without_numbers(command, capsys):
    assert main([*command.split(), '--device', 'meta']) == 2
    error, = capsys.readouterr().err.splitlines()
    assert error.startswith('timm-sape: --device meta: ') and error.endswith('; name a device that can run models')


@pytest.mark.parametrize('names, named', [
    (['last.pth.tar', 'model_best.pth.tar', 'checkpoint-7.pth.tar'], 'model_best.pth.tar'),
    (['last.pth.tar', 'checkpoint-7.pth.tar'], 'last.pth.tar'),
    (['checkpoint-7.pth.tar'], 'checkpoint-7.pth.tar'),
])
def test_folder_of_a_training(names, named, tmp_path, capsys):
    """The message contains the path to type, and that path loads."""
    run = tmp_path / 'run'
    run.mkdir()
    model = timm.create_model('test_vit_rope2d', num_classes=2, img_size=24, patch_size=8)
    args = argparse.Namespace(num_classes=2, model_kwargs={'img_size': 24, 'patch_size': 8})
    for name in names:
        torch.save({'arch': 'test_vit_rope2d', 'args': args, 'state_dict': model.state_dict()}, run / name)
    (run / 'args.yaml').touch()
    sweep = ['--data-dir', 'data', '--sizes', '24', '--workers', '0']
    for given in (str(run), f'local-dir:{run}'):
        assert main(['sweep', given, *sweep]) == 2
        error, = capsys.readouterr().err.splitlines()
        assert error.endswith(f' is a folder without config.json. Name a checkpoint in it: {run / named}')
    assert main(['sweep', error.split('in it: ')[1], *sweep]) == 0


def test_the_hub_cannot_be_reached(tmp_path, monkeypatch, capsys):
    """The message comes at once, not after half a minute of attempts, and the fix in it works."""
    def fail(*args, **kwargs):
        raise ConnectionError('no')

    monkeypatch.setattr('timm_sape.hub.errors.get_session', fail)
    monkeypatch.setattr('time.sleep', lambda seconds: pytest.fail('waited'))
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
    arguments = ['--image', 'china.jpg', '--what', 'attention', '--img-size', '32', '--output', f'{tmp_path}/map.png']
    was_offline = constants.HF_HUB_OFFLINE
    for model in ('test_vit', 'test_vit.r160_in1k', 'hf-hub:someone/else'):
        assert main(['map', model, *arguments]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        hint = '' if ':' in model else f' Write {model}@FILE for weights in a file, {model}@random for none.'
        text = f'{model} is not in the cache, and {constants.ENDPOINT} cannot be reached (ConnectionError: no).'
        assert error == f'timm-sape: {text}{hint}'
        assert constants.HF_HUB_OFFLINE is was_offline
    assert main(['map', 'test_vit@random', *arguments]) == 0
    save_file(load_model('test_vit@random').state_dict(), tmp_path / 'weights.safetensors')
    assert main(['map', f'test_vit@{tmp_path}/weights.safetensors', *arguments, '--force']) == 0


def test_encoding_of_an_untrained_model(tmp_path, capsys):
    arguments = ['--img-size', '48', '--image', 'china.jpg', '--output', str(tmp_path / 'map.png')]
    model = 'test_vit_pos_enc@random'
    assert main(['map', model, '--pos-enc', 'rope2d', *arguments, '--numbers', f'{tmp_path}/a.json']) == 0
    assert main([
        'map', 'test_vit_rope2d@random', *arguments, '--numbers', f'{tmp_path}/b.json', '--force']) == 0
    a, b = (json.loads((tmp_path / f'{name}.json').read_text())['rows'] for name in 'ab')
    assert len(a) == len(b) == 9 ** 2 and a == b  # random weights are the same each time
    assert 'china.jpg at 48x48, ' in tmp_path.joinpath('a.json').read_text()
    assert main(['pshap', model, '--pos-enc', 'rope', '--data-dir', 'data', '--workers', '0']) == 2
    assert "Unknown position encoding 'rope'" in capsys.readouterr().err
    assert main([
        'pshap', model, '--pos-enc', 'ape+rope2d', '--data-dir', 'data', '--workers', '0',
        '--num-images', '6']) == 0
    assert 'background 3 (there are too few images for more)' in capsys.readouterr().out


def test_masked_out(tmp_path):
    """Heads of LookHere see different patches, so the mean is over the heads that see a patch."""
    arguments = ['test_vit_lookhere', '--img-size', '48', '--image', 'china.jpg']
    files = ['--output', str(tmp_path / 'map.png'), '--numbers', str(tmp_path / 'map.json')]
    assert main(['map', *arguments, *files]) == 0
    values = [row['value'] for row in json.loads((tmp_path / 'map.json').read_text())['rows']]
    assert sum(value is not None and value < 0 for value in values) > 20


@pytest.mark.parametrize('patch', ['3', '3;2', 'a,b', '-1,0'])
def test_no_patch(patch, capsys):
    with pytest.raises(SystemExit, match='2'):
        main(['map', 'model', '--image', 'china.jpg', '--output', 'x.png', f'--patches={patch}'])
    assert 'is no patch; write X,Y' in capsys.readouterr().err


def test_pshap(tmp_path, capsys):
    output, plot = tmp_path / 'p.csv', tmp_path / 'p.png'
    arguments = ['model', '--data-dir', 'data', '--background', '4', '--workers', '0']
    assert main(['pshap', *arguments, '--output', str(output), '--plot', str(plot)]) == 0
    out = capsys.readouterr().out
    assert '| all | 24 |' in out and '| china | 12 |' in out and 'background 4' in out
    rows = rows_of(output)
    assert len(rows) == 24 and all(0 <= float(row['pshap']) <= 1 for row in rows)
    correct = [float(row['pshap']) for row in rows if row['correct'] == '1']
    mean = float(out.split('| all | 24 |')[1].split('|')[1])
    assert correct and mean == pytest.approx(np.mean(correct), abs=1e-4)
    assert plot.stat().st_size > 1000
    assert main(['pshap', *arguments, '--per-layer', '--num-images', '8']) == 0
    assert '| all | 8 |' in capsys.readouterr().out


def test_pshap_is_that_of_the_function(tmp_path):
    output = tmp_path / 'p.json'
    arguments = ['model', '--data-dir', 'data', '--background', '4', '--per-layer', '--seed', '3', '--workers', '0']
    assert main(['pshap', *arguments, '--output', str(output)]) == 0
    model, data = load_model('model'), open_dataset('data')
    data.transform = preprocessing(model)
    batches = load_images(data, 64, seed=3, shuffle=True)  # else each image had a background of its own class
    found = position_shap(model, batches, background=4, batch_size=64, per_layer=True, seed=3)
    expected = torch.stack([found.labels, found.correct, found.position, found.image, found.values], 1)
    columns = ('label', 'correct', 'position', 'image', 'pshap')
    rows = json.loads(output.read_text())['rows']
    assert_near(torch.tensor([[float(row[column]) for column in columns] for row in rows]), expected, 1e-5)


def test_random_weights_by_the_seed(tmp_path):
    tables = []
    for seed in ('1', '1', '2'):
        output = tmp_path / 'p.json'
        arguments = ['test_vit_ape@random', '--data-dir', 'data', '--num-images', '4', '--workers', '0']
        assert main(['pshap', *arguments, '--seed', seed, '--output', str(output), '--force']) == 0
        tables.append(json.loads(output.read_text())['rows'])
    assert tables[0] == tables[1] != tables[2]


@pytest.mark.parametrize('background, number, text', [
    (4, 16, 'background 4;'),
    (4, 23, 'background 4, 3 or 4 for the last 7 images;'),
    (4, 17, 'background 4;'),  # one image has no other half, and is left out
    (5, 24, 'background 5, 2 for the last 4 images;'),
    (4, 7, 'background 3 or 4 (there are too few images for more);'),
])
def test_pshap_tells_the_background(background, number, text, capsys):
    arguments = ['model', '--data-dir', 'data', '--workers', '0', '--num-images', str(number)]
    assert main(['pshap', *arguments, '--background', str(background)]) == 0
    assert text in capsys.readouterr().out


def test_pshap_without_a_correct_image(capsys):
    arguments = ['test_vit_ape@random', '--data-dir', 'data', '--num-images', '4', '--workers', '0']
    assert main(['pshap', *arguments]) == 0
    assert 'There is no value, because no image is classified correctly' in capsys.readouterr().out


def test_pshap_of_a_constant_model(capsys, tmp_path):
    model = timm.create_model('test_vit_ape', img_size=(24, 32), patch_size=8, num_classes=2)
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    timm_sape.hub.save(model, tmp_path / 'constant')
    arguments = [str(tmp_path / 'constant'), '--data-dir', 'data', '--num-images', '24', '--workers', '0']
    assert main(['pshap', *arguments]) == 0
    assert 'classifies correctly are constant' in capsys.readouterr().out


def test_standard_error_of_a_class():
    """Of the images that are classified correctly, and have a value."""
    found = PositionShap(
        torch.tensor([1., 1., 1., 0., 1.]), torch.tensor([1., 3., 9., 0., 0.]),
        torch.tensor([True, True, False, True, True]), torch.tensor([0, 0, 0, 0, 1]))
    assert found.value == pytest.approx((0.5 + 0.25 + 1) / 3)  # the fourth image has none
    rows = _by_class(found, {0: 'cat'})
    assert rows[1] == {'class': 'cat', 'images': 4, 'correct': 3, 'P-SHAP': '0.3750', 'standard error': '0.1250'}
    assert (rows[2]['class'], rows[2]['P-SHAP'], rows[2]['standard error']) == (1, '1.0000', '')


@pytest.mark.parametrize('args, text', [
    (['--background', '0'], 'background must be 1 or more'),
    (['--amp'], 'leave it out'),
    (['--data-dir', 'china.jpg'], 'at least two images'),
    (['--data-dir', 'data', '--split', 'dev'], "has no folder 'dev'. Its folders: test, train"),
    (['--num-images', '1'], 'at least two images'),
])
def test_pshap_says_what_is_wrong(args, text, capsys):
    assert main(['pshap', 'model', '--data-dir', 'data', '--workers', '0', *args]) == 2
    assert text in capsys.readouterr().err


def test_probe(tmp_path, capsys):
    output = tmp_path / 'probe.json'
    size = ['--img-size', '48', '64', '--image', 'china.jpg']
    encodings = ['nope', 'ape', 'rope2d', 'sape2_k']
    arguments = ['test_vit_pos_enc', '--pos-enc', *encodings, '--randomize', *size, '--output', str(output)]
    assert main(['probe', *arguments]) == 0
    found = json.loads(output.read_text())
    assert list(dict.fromkeys(row['model'] for row in found['rows'])) == encodings
    assert {row['verdict'] for row in found['rows']} == {'pass', ''} and 'china.jpg at 48x64, ' in found['notes']
    assert 'theorems hold' in capsys.readouterr().out
    # An encoding that starts at zero does not know where patches are until it is trained, so a theorem fails: code 1.
    assert main(['probe', 'test_vit_irpe_k', *size]) == 1
    assert '| changes | fail |' in capsys.readouterr().out
    assert main(['probe', 'model', '--image', 'flower.jpg']) == 0


@pytest.mark.parametrize('arguments, probe', [
    (['test_vit_rope2d@random'], 'image mirrored'), (['model', '--randomize'], 'image mirrored'),
    (['model'], 'patches permuted')], ids=['weights', 'noise', 'permutations'])
def test_the_seed_of_a_probe(arguments, probe, tmp_path):
    changes = []
    for seed in ('1', '1', '2'):
        output = tmp_path / 'probe.json'
        main(['probe', *arguments, '--image', 'china.jpg', '--seed', seed, '--output', str(output), '--force'])
        changes.append([row['change'] for row in json.loads(output.read_text())['rows'] if row['probe'] == probe])
    assert changes[0] == changes[1] != changes[2]


def test_the_image_of_a_probe(monkeypatch):
    """Squashed, as for a map: timm's usual transform would crop the photograph, which is wider than high."""
    seen = mock.Mock(side_effect=ValueError('enough'))
    monkeypatch.setattr('timm_sape.analysis.probe', seen)
    assert main(['probe', 'model', '--image', 'china.jpg', '--img-size', '48']) == 2
    expected, _ = ImageFile('china.jpg', preprocessing(load_model('model'), (48, 48), crop_mode='squash'))[0]
    assert torch.equal(seen.call_args.args[1][0], expected)


@pytest.mark.full
def test_probe_of_several_models_and_encodings(tmp_path):
    output = tmp_path / 'probe.json'
    models, encodings = ['test_vit_pos_enc', 'vit_tiny_pos_enc@random'], ['nope', 'ape']
    main(['probe', *models, '--pos-enc', *encodings, '--image', 'china.jpg', '--output', str(output)])
    names = dict.fromkeys(row['model'] for row in json.loads(output.read_text())['rows'])
    assert list(names) == [f'{model}, {pos_enc}' for model in models for pos_enc in encodings]


@pytest.mark.parametrize('size', [['48x64'], ['48X64'], ['48', '64']])
def test_both_spellings_of_a_size(size, tmp_path, monkeypatch):
    sizes = []

    def load_model(name, img_size, **kwargs):
        sizes.append(img_size)
        raise ValueError

    monkeypatch.setattr('timm_sape.loading.load_model', load_model)
    for command in (['probe', 'model'], ['map', 'model', '--output', str(tmp_path / 'map.png')]):
        assert main([*command, '--image', 'china.jpg', '--img-size', *size]) == 2
    assert sizes == [(48, 64)] * 2
    with pytest.raises(SystemExit):
        main(['probe', 'model', '--image', 'china.jpg', '--img-size', '48x'])


@pytest.mark.parametrize('args, text', [
    (['test_vit_pos_enc', '--pos-enc', 'rope9d'], "Unknown position encoding 'rope9d'"),
    (['test_vit@random', '--pos-enc', 'rope2d'], 'test_vit@random has no choice of encodings. Name one of ours, such'),
    (['test_vit_nope', '--image', 'none.jpg'], "There is no file 'none.jpg'"),
    (['vit_tiny_patch16_224@random', '--randomize'], '--randomize is only for models of timm_sape; leave it out'),
])
def test_probe_says_what_is_wrong(args, text, capsys):
    assert main(['probe', '--image', 'china.jpg', *args]) == 2
    assert text in capsys.readouterr().err


def test_list(capsys):
    assert main(['list']) == 0
    lines = capsys.readouterr().out.splitlines()
    end = lines.index('')
    assert [line.split()[0] for line in lines[1:end]] == timm_sape.list_encodings(aliases=True)
    assert lines[end + 1].startswith('Which one? ') and max(map(len, lines[end:])) <= 120
    ape = next(line for line in lines if line.startswith('ape '))
    assert f'{197 * 384:,}' in ape and 'resampled' in ape
    assert main(['list', 'rope2*']) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(['list', 'sape2']) == 0
    assert 'the same as sape2_k' in capsys.readouterr().out
    assert main(['list', 'models', 'vit_small_rope2d*']) == 0
    found = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in found] == ['model', *timm.list_models('vit_small_rope2d*')]
    expected = sum(p.numel() for p in timm.create_model('vit_small_rope2d_mixed_ape').parameters())
    assert ['vit_small_rope2d_mixed_ape', 'ape+rope2d_mixed', '224', 'x', '224', f'{expected:,}'] in found
    assert main(['list', 'models', 'naflexvit_small_rope2d']) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:3] == ['rope2d', 'any']
    assert main(['list', 'models', 'test_vit_*_graft']) == 0
    found = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert found == ['model', *timm.list_models('test_vit_*_graft')]
    assert main(['list', 'models', 'vit_tiny_lookhere']) == 2
    assert "no models match 'vit_tiny_lookhere'; 'lookhere' needs 6 heads" in capsys.readouterr().err
    assert main(['list', 'models', 'resnet*']) == 2
    assert "no models match 'resnet*'" in capsys.readouterr().err
    assert main(['list', 'model', 'a*']) == 2
    assert "'model' is neither encodings nor models" in capsys.readouterr().err


def test_guide():
    """The end of `timm-sape list` agrees with README.md, results/README.md and the registry."""
    checkout = Path(__file__).parents[1]
    results, readme = (
        ' '.join(checkout.joinpath(path).read_text().split()) for path in ('results/README.md', 'README.md'))
    assert 'RoPE-2D is ahead of the other two, at both learning rates.**' in readme
    assert 'At 64 px SaPE2(K)+APE keeps 86 % of its accuracy above chance, and APE 87 %' in results
    assert 'RoPE-2D keeps 98 % if positions are rescaled' in results
    assert 'If its angles extrapolate to positions that were never trained, it keeps 42 %' in results
    assert '98 %' in GUIDE and '87 %' in GUIDE and '42 %' in GUIDE
    missing = [
        f'{size}_{name}' for size in SIZES for name in timm_sape.list_encodings()
        if timm_sape.get_encoding(name).alone and not timm.is_model(f'{size}_{name}')]
    assert missing == ['vit_tiny_lookhere'] and missing[0] in GUIDE


@pytest.mark.parametrize(
    'command', ['list', 'map', 'pshap', 'probe', 'sweep', 'shifts', 'compare', 'data', 'experiment'])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit, match='0'):
        main([command, '--help'])
    assert f'examples:\n  timm-sape {command}' in capsys.readouterr().out


def test_gallery_refuses_what_it_would_ignore(capsys):
    assert main(['map', '--gallery', 'g.png', '--numbers', 'n.csv', '--what', 'bias', '--cmap', 'gray']) == 2
    assert '--what, --cmap, --numbers are not for --gallery, which draws' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['sincos2d', 'alibi2d'])
def test_a_panel_is_seen_from_its_patch(name, monkeypatch):
    monkeypatch.setattr(gallery, 'GRID', (3, 5))
    monkeypatch.setattr(gallery, 'SEEN_FROM', (2, 1))
    panel, = gallery.gallery_panels([name])
    assert panel.values.shape == (3, 5) and divmod(int(panel.values.argmax()), 5) == (2, 1)  # itself is nearest


def test_panels_of_logits(monkeypatch, own_registry):
    monkeypatch.setattr(gallery, 'GRID', (3, 5))
    monkeypatch.setattr(gallery, 'SEEN_FROM', (2, 1))

    def position_bias(self, grid):  # grows with the place of the key, whatever the query
        return grid.between_tokens(torch.arange(15.).expand(1, 15, -1))

    timm_sape.register_encoding('later')(type('Later', (timm_sape.PositionEncoding,), {'position_bias': position_bias}))
    later, rotation, sape2_k, sape2_q = (
        gallery.gallery_panels([name])[0].values for name in ('later', 'rope2d', 'sape2_k', 'sape2_q'))
    assert later.flatten().tolist() == list(range(15))
    assert abs(rotation[2, 1]) < 1e-5 and (rotation < -0.1).sum() == 14  # all patches look alike
    assert sape2_k.std() > 0.01
    assert_near(sape2_q, sape2_k, 1e-4)  # keys are the queries


def assert_red_is_positive(image):
    (low, high), colours = image.get_clim(), image.to_rgba(np.array([*image.get_clim(), 0.]))
    assert low == -high and colours[0, 2] > colours[0, 0] + 0.2 and colours[1, 0] > colours[1, 2] + 0.2
    assert colours[2].min() > 0.9  # 0 is white


def test_the_gallery_shows_its_panels(monkeypatch):
    monkeypatch.setattr(gallery, 'GRID', (2, 3))
    monkeypatch.setattr(gallery, 'SEEN_FROM', (0, 2))
    cosines, logits = torch.tensor([[0.5, 0., 0.8], [-0.2, 0., 0.]]), torch.tensor([[-torch.inf, 0, 2], [-4, 1, 0]])
    panels = [gallery.Panel('added', 'tokens', cosines), gallery.Panel('masked', 'geometry', logits)]
    axes = {axis.get_title(): axis for axis in gallery.draw_gallery(panels).axes}
    for name, values, unit in ('added', cosines, 'cosine'), ('masked', logits / 4, '1 = 4.00 logits'):
        image, = axes[name].images
        frame, = axes[name].patches
        assert np.array_equal(np.ma.filled(image.get_array(), -np.inf), values.numpy())
        assert frame.get_xy() == (1.5, -0.5) and axes[name].get_xlabel() == unit
        assert image.get_clim() == (-1, 1)
        assert_red_is_positive(image)


def test_warnings_of_ours_are_one_line(capsys, monkeypatch):
    usual, found = warnings.formatwarning, []

    def row(name):
        files = timm_sape.loading.__file__, __file__
        found.extend(warnings.formatwarning('text', UserWarning, file, 1, '') for file in files)
        return name, '', '', ''

    monkeypatch.setattr('timm_sape.cli.list._model_row', row)
    assert main(['list', 'models', 'test_vit_ape']) == 0
    assert found == ['timm-sape: text\n', usual('text', UserWarning, __file__, 1, '')]
    assert warnings.formatwarning is usual


def test_list_is_interrupted(capsys, monkeypatch):
    monkeypatch.setattr('timm_sape.cli.list._model_row', mock.Mock(side_effect=KeyboardInterrupt))
    assert main(['list', 'models', 'test_vit_ape']) == 130 and 'interrupted' in capsys.readouterr().err


def test_images_are_displayed_as_they_were():
    """timm takes the average of the statistics of three channels for one, but leaves the config as it was."""
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    image = (torch.full((1, 4, 4), 0.5) - np.mean(mean)) / np.mean(std)
    assert (displayed(image, mean, std) - 0.5).abs().max() < 1e-6
    pixels = torch.rand(4, 6, 3)
    normalized = (pixels - torch.tensor(mean)) / torch.tensor(std)
    assert_near(displayed(normalized.permute(2, 0, 1), mean, std), pixels, 1e-6)


def test_figures_show_what_they_are_given():
    matrix = torch.arange(36.).view(6, 6)
    matrix[0, 1] = -torch.inf
    with pytest.raises(ValueError, match='a title: no number is finite, so there is nothing to draw'):
        draw_maps(torch.rand(16, 24, 3), ['a title'], [matrix * torch.nan], (2, 3), [(2, 1)], 'numbers')
    figure = draw_maps(torch.rand(16, 24, 3), ['a title'], [matrix], (2, 3), [(2, 1), (1, 0)], 'numbers', aspect=0.5)
    image, whole, one, other = figure.axes[:4]
    assert whole.get_title() == 'a title' and one.get_title() == 'from patch x=2, y=1'
    assert (whole.get_xlabel(), whole.get_ylabel()) == ('to patch', 'from patch')
    shown = np.ma.filled(whole.images[0].get_array(), np.nan)
    assert np.isnan(shown[0, 1]) and shown[4, 2] == 26 and whole.images[0].get_clim() == (0, 35)
    assert one.images[0].get_array().tolist() == [[30, 31, 32], [33, 34, 35]]
    assert other.images[0].get_array().tolist() == [[6, 7, 8], [9, 10, 11]]
    frame, = one.patches
    assert frame.get_xy() == (1.5, 0.5) and len(image.patches) == 2
    assert image.images[0].get_extent() == one.images[0].get_extent()  # patches lie under their frames
    assert [panel.get_aspect() for panel in (image, one, other)] == [0.5] * 3
    drawn = draw_attention_distance([torch.tensor([1., 3.]), torch.tensor([2., 4.])], [0, 5]).axes[0]
    assert [list(line.get_ydata()) for line in drawn.lines] == [[1, 2], [3, 4], [2, 3]]
    assert [list(line.get_xdata()) for line in drawn.lines] == [[0, 5]] * 3
    histogram = draw_histogram(torch.tensor([0.11, 0.11, 0.91, torch.nan]), 0.4, 'values').axes[0]
    bars = [(round(bar.get_x(), 3), bar.get_height()) for bar in histogram.patches if bar.get_height()]
    assert bars == [(0.1, 2), (0.9, 1)] and list(histogram.lines[0].get_xdata()) == [0.4, 0.4]


def test_colours_of_maps():
    drawn = [torch.rand(16, 32, 3), ['a title'], [torch.tensor([[-3., 1.], [0., 2.]])], (1, 2), 7 * [(1, 0)], 'numbers']
    _, whole, *small, _ = draw_maps(*drawn).axes  # the last is the colour bar
    assert whole.images[0].get_clim() == (-3, 3)
    assert_red_is_positive(whole.images[0])
    assert [len(panel.patches) for panel in small] == 7 * [1]  # there are fewer colours of frames
    chosen = draw_maps(*drawn, cmap='gray').axes[1].images[0]
    assert chosen.get_cmap().name == 'gray' and chosen.get_clim() == (-3, 2)
