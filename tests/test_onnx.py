"""ONNX export of every encoding by timm's function and script. ONNX Runtime must give the model's logits."""
import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, RuntimeException
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.models import save_for_hf
from timm.utils.onnx import onnx_export

import timm_sape
from common import COMPOSITIONS, POS_ENCS, Maker, ToyLayer, images, rarely, registered
from example_tools import load_script

EXAMPLE = Path(__file__).parents[1] / 'examples' / 'export.py'
ENCODINGS = [pos_enc for pos_enc in POS_ENCS if pos_enc not in COMPOSITIONS] + ['auto_rope2d', 'ape+sape2_k']
COMPLEX = onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128
TOL = 1e-5
DEPRECATED = 'ignore::DeprecationWarning', 'ignore::torch.jit.TracerWarning', 'ignore:Constant folding:UserWarning'


def nodes_of(graph):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for subgraph in (attribute.g, *attribute.graphs):
                yield from nodes_of(subgraph)


def check_file(path):
    """The file has only ONNX's own operators and no complex numbers."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    assert [opset.domain for opset in model.opset_import] == [''] and not model.functions
    for node in nodes_of(model.graph):
        assert node.domain == '', (node.domain, node.op_type)
    graph = model.graph
    types = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    types |= {tensor.data_type for tensor in graph.initializer}
    types |= {a.t.data_type for node in nodes_of(graph) for a in node.attribute if a.type == a.TENSOR}
    assert onnx.TensorProto.FLOAT in types and not types & set(COMPLEX)
    return model


def run(path, x):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
    found, = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(found)


def check_parity(path, model, *batches):
    for x in batches:
        with torch.no_grad():
            torch.testing.assert_close(run(path, x), model(x), rtol=0, atol=TOL)


def check_export(model, path, *batches, dynamo=True, dynamic_size=True):
    """Export with the first of the batches, check on all of them."""
    onnx_export(model, str(path), batches[0], dynamic_size=dynamic_size, use_dynamo=dynamo)
    shape = check_file(path).graph.input[0].type.tensor_type.shape.dim
    assert [bool(d.dim_param) for d in shape] == [True, False, dynamic_size, dynamic_size]
    check_parity(path, model, *batches)


@pytest.mark.parametrize('pos_enc', rarely(ENCODINGS, ['sape2_k']))
def test_every_encoding(pos_enc, tmp_path):
    """Dynamic batch, height and width, on square and other grids, the trained one and larger ones."""
    model = Maker(pos_enc)(dynamic_img_size=True, depth=1)
    check_export(
        model, tmp_path / 'model.onnx', images((4, 6)), images((3, 5), 1), images((1, 7), 3), images((14, 14), 1))


@pytest.mark.filterwarnings(*DEPRECATED)
@pytest.mark.parametrize('pos_enc', rarely(ENCODINGS))
def test_deprecated_exporter(pos_enc, tmp_path):
    """timm's script uses it without --dynamo. It has no antialiased resampling, so tables of positions keep their size,
    as in timm's own models."""
    dynamic_size = not {'ape', 'lape'} & set(pos_enc.split('+'))
    model = Maker(pos_enc)(dynamic_img_size=dynamic_size, depth=1)
    other = [images((7, 3), 3), images((14, 14), 1)] if dynamic_size else []
    check_export(
        model, tmp_path / 'model.onnx', images((3, 5)), images((3, 5), 1), *other, dynamo=False,
        dynamic_size=dynamic_size)


@pytest.mark.filterwarnings(*DEPRECATED)
@pytest.mark.parametrize('pos_enc', rarely(['ape', 'rope2d', 'sape2_k', 'rpb'], ['rope2d']))
def test_deprecated_exporter_on_naflexvit(pos_enc, tmp_path):
    """It passes all arguments of `forward` by place."""
    model = timm.create_model('test_naflexvit_pos_enc', pos_enc=pos_enc, img_size=32, patch_size=8, depth=1).eval()
    x = torch.randn(2, 3, 32, 32)
    onnx_export(model, str(tmp_path / 'model.onnx'), x, use_dynamo=False)
    check_parity(tmp_path / 'model.onnx', model, x)


@pytest.mark.full
@pytest.mark.parametrize('pos_enc', ENCODINGS)
def test_patches_of_one_pixel(pos_enc, tmp_path):
    """A symbolic height or width is then the grid's own. Each encoding has its last rule for other grids."""
    rules = {name: timm_sape.get_encoding(name).rules for name in pos_enc.split('+')}
    model = Maker(pos_enc)(
        pos_enc_kwargs={name: {'resolution': known[-1]} for name, known in rules.items() if known},
        img_size=(3, 5), patch_size=1, dynamic_img_size=True, depth=1)
    check_export(model, tmp_path / 'model.onnx', torch.randn(2, 3, 4, 6), torch.randn(3, 3, 9, 2))


@pytest.mark.full
def test_fixed_size(tmp_path):
    """If sizes are numbers, tables become constants, and our own operators would run."""
    model = Maker('cope+rope2d+sape2_k')(depth=1)
    check_export(model, tmp_path / 'model.onnx', images((3, 5)), images((3, 5), 3), dynamic_size=False)


@pytest.mark.full
def test_rescaled(tmp_path):
    """The other rule for other grids."""
    names = 'alibi2d', 'rope2d'
    model = Maker('+'.join(names))(
        pos_enc_kwargs={name: {'resolution': 'rescale'} for name in names}, dynamic_img_size=True, depth=1)
    check_export(model, tmp_path / 'model.onnx', images((4, 6)), images((7, 3), 3))


class BakesSize(ToyLayer):
    name = 'bakes_size'

    def position_bias(self, grid):
        return super().position_bias(timm_sape.Grid(int(grid.height), int(grid.width), grid.num_prefix_tokens))


class ForeignOperator(ToyLayer):
    name = 'foreign_operator'

    def position_bias(self, grid):
        bias = super().position_bias(grid)
        if not torch.onnx.is_in_onnx_export():
            return bias
        return torch.onnx.ops.symbolic(
            'com.microsoft::Gelu', (bias,), dtype=bias.dtype, shape=bias.shape, version=1)


@pytest.mark.full
@pytest.mark.filterwarnings(*DEPRECATED)
def test_notices_what_does_not_belong(tmp_path):
    """The negative controls: a size that became a constant, a foreign operator, other weights, complex numbers."""
    path = tmp_path / 'model.onnx'
    with registered(BakesSize, ForeignOperator):
        with pytest.raises((AssertionError, Fail, RuntimeException), match='not close|roadcast'):
            check_export(
                Maker('bakes_size')(dynamic_img_size=True, depth=1), path, images((4, 6)), images((7, 3)), dynamo=False)
        with pytest.raises(AssertionError, match='microsoft'):
            check_export(Maker('foreign_operator')(depth=1), path, images((3, 5)), dynamic_size=False)

    model = Maker('ape')(depth=1)
    check_export(model, path, images((3, 5)), dynamo=False, dynamic_size=False)
    model.pos_embed.data[:, -1, 0] += 0.01  # of one patch
    with pytest.raises(AssertionError, match='not close'):
        check_parity(path, model, images((3, 5)))

    proto = onnx.load(path)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, dtype=np.complex64), 'unused'))
    onnx.save(proto, path)
    with pytest.raises(AssertionError):
        check_file(path)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A folder for `local-dir:`, of a model that takes images of any size."""
    folder = tmp_path_factory.mktemp('saved') / 'model'
    model = Maker('ape+sape2_k')(img_size=(48, 80), dynamic_img_size=True)
    save_for_hf(model, folder, safe_serialization=True)
    return folder, model


@pytest.mark.skipif('TIMM_SCRIPTS' not in os.environ, reason="set TIMM_SCRIPTS to the folder of timm's onnx_export.py")
@pytest.mark.parametrize('options, grids', [
    (['--dynamo', '--dynamic-size', '--img-size', '64'], [(6, 10), (7, 3)]),
    (['--dynamo', '--img-size', '48'], [(6, 6)]),
    (['--img-size', '48'], [(6, 6)]),
])
def test_timms_script(options, grids, tmp_path):
    folder, path = tmp_path / 'saved', tmp_path / 'model.onnx'
    model = Maker('ape+sape2_k')(img_size=48, dynamic_img_size='--dynamic-size' in options, depth=1)
    save_for_hf(model, folder, safe_serialization=True)
    script = Path(os.environ['TIMM_SCRIPTS']) / 'onnx_export.py'
    command = [sys.executable, '-m', 'timm_sape', 'run', str(script), str(path), '--model', f'local-dir:{folder}']
    done = subprocess.run([*command, '--check-forward', *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    check_file(path)
    check_parity(path, model, *(images(grid, batch) for grid in grids for batch in (1, 3)))


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp('photos')
    for i, pixels in enumerate(load_sample_images().images):
        Image.fromarray(pixels).save(folder / f'{i}.jpg')
    return folder


@pytest.fixture
def example():
    return load_script(EXAMPLE)


@pytest.mark.full
def test_example(saved, photos, tmp_path):
    folder, model = saved
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'mine.onnx').write_text('of the user')
    command = [sys.executable, EXAMPLE, f'local-dir:{folder}', '--images', photos, '--dynamic-size', '--output']
    done = subprocess.run(
        [*map(str, command), 'out/a.onnx'], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split(' | ') for line in done.stdout.splitlines() if line.startswith('| 2 |')]
    assert [row[1] for row in rows] == ['48 x 80', '56 x 104']
    assert all(float(row[3].rstrip(' |')) < TOL for row in rows)
    assert 'out/a.onnx: input [batch, 3, height, width]' in done.stdout and 'operators of ONNX ' in done.stdout
    assert sorted(p.name for p in (tmp_path / 'out').iterdir()) == ['a.onnx', 'mine.onnx']
    check_file(tmp_path / 'out' / 'a.onnx')
    check_parity(tmp_path / 'out' / 'a.onnx', model, images((4, 9), 3))


@pytest.mark.parametrize('args, text', [
    (['vit_nowhere', '--images', 'photos'], 'There is no model'),
    (['test_vit_ape', '--images', 'nowhere'], 'There is no image or folder'),
    (['test_vit_ape', '--images', 'photos', '--num-images', '0'], '--num-images must be 1 or more'),
    (['test_vit_ape', '--images', 'photos', '--output', 'photos'], '--output photos is a folder; name a file'),
])
def test_example_says_what_is_wrong(args, text, example, tmp_path, monkeypatch, capsys):
    (tmp_path / 'photos').mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['export.py', *args])
    with pytest.raises(SystemExit) as exit_info:
        example.main()
    assert exit_info.value.code == 2 and text in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ['photos']


@pytest.mark.parametrize('wrong', [0.5, math.nan])
@pytest.mark.parametrize('batch', [1, 3])
def test_example_tells_any_difference(batch, wrong, example):
    """Of the first image alone, of the last in a batch, and of a number that is none."""
    def run(names, inputs):
        logits = inputs['x'].reshape(len(inputs['x']), -1).copy()
        logits[-1, -1] += wrong if len(logits) == batch else 0
        return [logits]

    session = SimpleNamespace(get_inputs=lambda: [SimpleNamespace(name='x')], run=run)
    logits, difference = example.compare(torch.nn.Flatten(), session, torch.zeros(3, 3, 4, 4), (4, 6))
    assert logits.shape == (3, 72) and difference == pytest.approx(wrong, nan_ok=True)


@pytest.mark.filterwarnings(*DEPRECATED)
def test_example_writes_nothing_that_differs(example, photos, tmp_path, monkeypatch):
    output = tmp_path / 'model.onnx'
    output.write_text('of before')

    def export_another(model, path, x, **kwargs):
        another = copy.deepcopy(model)
        another.pos_embed.data[:, -1, 0] += 0.1
        onnx_export(another, path, x.expand(2, -1, -1, -1))

    monkeypatch.setattr(example, 'onnx_export', export_another)
    monkeypatch.setattr(sys, 'argv', ['export.py', 'test_vit_ape', '--images', str(photos), '--output', str(output)])
    with pytest.raises(SystemExit, match='logits differ from those of the model'):
        example.main()
    assert output.read_text() == 'of before' and list(tmp_path.iterdir()) == [output]

    monkeypatch.setattr(example, 'onnx_export', lambda *args, **kwargs: None)
    monkeypatch.setattr(onnxruntime, 'InferenceSession', lambda *args, **kwargs: None)
    monkeypatch.setattr(example, 'compare', lambda *args: (torch.ones(1), math.nan))
    with pytest.raises(SystemExit, match='logits differ from those of the model'):
        example.main()
    assert output.read_text() == 'of before'
