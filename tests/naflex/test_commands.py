"""Commands on NaFlexVit: those of the plain ViT, and images at their own aspect ratio."""
import json
from argparse import Namespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import get_image_size_for_seq
from timm.models import save_for_hf
from timm.models._features_fx import GraphExtractNet

from timm_sape.analysis import randomize_encodings
from timm_sape.cli import main
from timm_sape.lab import sweep as sweep_module
from timm_sape.lab.compare import compare
from timm_sape.lab.evaluate import predict
from timm_sape.loading import load_model, native_preprocessing, open_dataset, preprocessing

SIZES = [(40, 90), (64, 64), (101, 37), (120, 30)]  # (height, width) of the images


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Images of four shapes in two classes, a NaFlexVit, and the plain ViT that computes the same."""
    folder = tmp_path_factory.mktemp('naflex')
    generator = np.random.default_rng(0)
    for i, (height, width) in enumerate(SIZES):
        (folder / 'data' / 'val' / f'class{i % 2}').mkdir(parents=True, exist_ok=True)
        pixels = Image.fromarray(generator.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
        pixels.resize((width, height), Image.BICUBIC).save(folder / 'data' / 'val' / f'class{i % 2}' / f'{i}.png')
    torch.manual_seed(0)
    sizes = dict(num_classes=2, img_size=48, patch_size=8, pos_enc='rope2d+rpb')
    plain = timm.create_model('test_vit_pos_enc', **sizes)
    randomize_encodings(plain)
    save_for_hf(plain, folder / 'plain', safe_serialization=True)
    file = folder / 'plain' / 'model.safetensors'
    model = timm.create_model(
        'test_naflexvit_pos_enc', pretrained=True, **sizes,
        pretrained_cfg_overlay=dict(file=str(file), num_classes=2))
    save_for_hf(model, folder / 'naflex', safe_serialization=True)
    return folder


def test_sweep_at_native_aspect_ratio(folder, monkeypatch):
    seen = []

    def spy(model, loader, *args):
        seen.append((model, loader, predict(model, loader, *args)))
        return seen[-1][2]

    monkeypatch.setattr(sweep_module, 'predict', spy)
    data = open_dataset(str(folder / 'data'))
    rows = sweep_module.sweep([str(folder / 'naflex')], data, [48, (32, 64)], native=True, progress=False)
    assert [(row['rule'], row['height'], row['width'], row['images'], row['patches']) for row in rows] == [
        (rule + factor, *size, images, patches) for factor in ('', '+log')
        for rule in ('extrapolate', 'rescale', 'ntk', 'yarn')
        for size, patches in (((48, 48), 36), ((32, 64), 32)) for images in ('squash', 'native')]
    for row, (model, _, found) in zip(rows, seen):
        if row['images'] == 'native':
            shapes = set()
            for i, (path, _) in enumerate(data.reader.samples):
                image = Image.open(path).convert('RGB')
                inner = round(0.9 * image.height), round(0.9 * image.width)
                top, left = round((image.height - inner[0]) / 2), round((image.width - inner[1]) / 2)
                _, size = get_image_size_for_seq(inner, 8, row['patches'])
                image = image.crop((left, top, left + inner[1], top + inner[0])).resize(size[::-1], Image.BICUBIC)
                x = create_transform(size, crop_pct=1.0, mean=[0.5] * 3, std=[0.5] * 3, interpolation='bicubic')(image)
                with torch.no_grad():
                    logits = model(x[None])[0]  # alone, as an image of its size
                torch.testing.assert_close(logits, found.logits[i], rtol=1e-4, atol=1e-4)
                shapes.add(size)
            assert len(shapes) == len(SIZES)


def test_sweep_of_a_plain_model_is_refused(folder, capsys):
    arguments = ['--data-dir', str(folder / 'data'), '--sizes', '48', '--workers', '0']
    assert main(['sweep', str(folder / 'plain'), *arguments, '--native']) == 2
    assert 'Use a NaFlexVit, such as naflexvit_small_rope2d' in capsys.readouterr().err
    assert main(['sweep', str(folder / 'naflex'), *arguments, '--native', '--crop-mode', 'center']) == 2
    assert 'At their own aspect ratio images show more than their central square' in capsys.readouterr().err
    assert main(['sweep', str(folder / 'naflex'), *arguments, '--native']) == 0
    assert '| 48x48 | native | 36 |' in capsys.readouterr().out


@pytest.mark.parametrize('named', ['{}', 'test_naflexvit_rope2d@{}'])
def test_checkpoint_of_train(named, tmp_path):
    """timm records the arguments of train.py in it; the stem has no axis of channels."""
    kwargs = {'img_size': 32, 'patch_size': 4, 'fc_norm': True}
    model = timm.create_model('test_naflexvit_rope2d', num_classes=2, global_pool='avg', **kwargs).eval()
    args = Namespace(model_kwargs=kwargs, num_classes=2, in_chans=None, gp='avg')
    checkpoint = {'arch': 'test_naflexvit_rope2d', 'args': args, 'state_dict': model.state_dict()}
    torch.save(checkpoint, tmp_path / 'x.pth.tar')
    loaded = load_model(named.format(tmp_path / 'x.pth.tar'))
    x = torch.randn(2, 3, 32, 48)
    assert torch.equal(loaded(x), model(x)) and preprocessing(loaded)(Image.new('RGB', (40, 50))).shape == (3, 32, 32)


def test_checkpoint_of_train_with_one_channel(tmp_path):
    """A linear patch embedding does not show how many there are."""
    model = timm.create_model('test_naflexvit_rope2d', num_classes=2, in_chans=1, patch_size=8).eval()
    args = Namespace(model_kwargs={'patch_size': 8}, num_classes=2, in_chans=1)
    checkpoint = {'arch': 'test_naflexvit_rope2d', 'args': args, 'state_dict': model.state_dict()}
    torch.save(checkpoint, tmp_path / 'x.pth.tar')
    x = torch.randn(2, 1, 32, 48)
    assert torch.equal(load_model(str(tmp_path / 'x.pth.tar'))(x), model(x))


def test_native_preprocessing_makes_patches_in_the_order_of_the_model():
    """Without cropping, it shows the model what the usual preprocessing does."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8))
    for last in (True, False):
        model = timm.create_model(
            'test_naflexvit_rope2d', patch_size=8, patchify_channels_last=last,
            pretrained_cfg_overlay={'crop_pct': 1.0}).eval()
        patches = NaFlexCollator(24)([(native_preprocessing(model, 24)(image), 0)])[0]
        whole = preprocessing(model, (32, 48), crop_mode='squash')(image)
        torch.testing.assert_close(model(patches), model(whole[None]), rtol=1e-4, atol=1e-5)


def test_compare(folder):
    rows = compare([str(folder / name) for name in ('plain', 'naflex')], open_dataset(str(folder / 'data')))
    for row in rows:
        del row['model'], row['images_per_second']
    rows[0].update(wins=0, losses=0, mcnemar_p=1.0)
    assert rows[0] == rows[1] and rows[0]['height'] == rows[0]['width'] == 48


@pytest.mark.parametrize('size', [None, (32, 64)])
def test_map(folder, tmp_path, size):
    found = []
    for name in ('plain', 'naflex'):
        numbers = tmp_path / f'{name}.json'
        arguments = ['--image', str(folder / 'data' / 'val' / 'class0' / '0.png'), '--numbers', str(numbers)]
        if size is not None:
            arguments += ['--img-size', *map(str, size)]
        out = str(tmp_path / f'{name}.png')
        assert main(['map', str(folder / name), '--what', 'attention', *arguments, '--output', out]) == 0
        found.append([row['value'] for row in json.loads(numbers.read_text())['rows']])
    assert len(found[0]) == (36 if size is None else 32) ** 2
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_probe(folder, capsys):
    image = str(folder / 'data' / 'val' / 'class0' / '0.png')
    assert main(['probe', str(folder / 'naflex'), '--image', image]) == 0
    assert '| class logits |' in capsys.readouterr().out


def test_torch_fx():
    with pytest.raises(ValueError, match='torch.fx cannot trace this model, .* for features model.forward_'):
        GraphExtractNet(timm.create_model('test_naflexvit_rope2d'), ['norm'])
