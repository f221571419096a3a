"""Properties of every encoding of tokens, and of their compositions, whatever the equations."""
import pytest
import torch

import timm_sape
from harness import assert_near, create, make_images, make_model, make_tokens
from timm_sape import Grid

NAMES = [
    name for name in timm_sape.list_encodings()
    if any(timm_sape.get_encoding(name).overrides(hook) for hook in ('embed', 'mix', 'layer_embed'))]
ALONE = [name for name in NAMES if timm_sape.get_encoding(name).alone]
GATED = [name for name in NAMES if timm_sape.get_encoding(name).gate_init is not None]
ADD_TO_TOKENS = [
    name for name in ALONE
    if timm_sape.get_encoding(name).overrides('embed') and not timm_sape.get_encoding(name).per_layer]
COMPOSITIONS = [
    'cape+fourier+sincos2d', 'ape+peg', 'ape+pemix', 'pemix+sincos2d', 'cape+ope+peg+pemix', 'lape+rope2d+sape2_k',
    'lape+ope+peg+pemix', *(f'ape+{name}' for name in ADD_TO_TOKENS if name != 'ape')]


def test_names():
    """The rule above must find at least these."""
    assert {'ape', 'ape2d', 'cape', 'fourier', 'lape', 'ope', 'peg', 'pemix', 'sincos1d', 'sincos2d'} <= set(NAMES)


@pytest.mark.parametrize('name', [
    name for name in ADD_TO_TOKENS if not timm_sape.get_encoding(name).asks_for])
def test_content_does_not_matter(name):
    """If an encoding does not ask for the image, its term is the same for all images."""
    grid, encoding = Grid(3, 5, 1), create(name, (3, 5), 1)
    tokens = make_tokens(grid)
    a, b = (encoding(x, grid=grid, hook='embed') for x in (tokens, 2 * tokens))
    assert torch.equal(a, b)


@pytest.mark.parametrize('name', NAMES)
def test_parameters_added(name):
    """A single instance adds as many parameters as documented, and none of them has weight decay."""
    other = 'ape' if name == 'sincos2d' else 'sincos2d'
    kwargs = {'img_size': (32, 48), 'reg_tokens': 2, 'depth': 3}
    model, plain = make_model(f'{name}+{other}', **kwargs), make_model(other, **kwargs)
    (encoding,) = [e for path, e in model.position_encodings().items() if path.endswith(f'.{name}')]
    own = dict(model.named_parameters()).keys() - dict(plain.named_parameters()).keys()
    symbols = {'H': 4, 'W': 6, 'D': 64, 'P': 3, 'L': 3, 'k': 3, 'none': 0}
    assert sum(model.get_parameter(path).numel() for path in own) == eval(encoding.adds.replace('^', '**'), symbols)
    assert own <= model.no_weight_decay()
    assert encoding.no_weight_decay() == set(dict(encoding.named_parameters()))
    assert not encoding.relative


@pytest.mark.one_of(2)
@pytest.mark.parametrize('pos_enc', ALONE + COMPOSITIONS)
def test_model(pos_enc):
    """Any number of prefix tokens, patches dropped, half precision, images of other sizes; gradients everywhere."""
    model = make_model(
        pos_enc, img_size=(24, 40), reg_tokens=4, patch_drop_rate=0.5, dynamic_img_size=True, num_classes=3)
    for grid_size in ((3, 5), (4, 6), (1, 7), (7, 1), (1, 1)):
        x = torch.randn(2, 3, 8 * grid_size[0], 8 * grid_size[1])
        for low in (False, True):
            model.to(torch.bfloat16 if low else torch.float32)
            for training in (False, True):
                model.train(training)
                model.zero_grad()
                out = model(x.to(model.cls_token.dtype))
                assert out.shape == (2, 3) and out.isfinite().all()
                out.float().square().sum().backward()
                for name, parameter in model.named_parameters():
                    assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize('name', GATED)
def test_gate(name):
    """With a gate of 0 the model equals the one without the encoding. The gate learns, and then all parameters do."""
    x = make_images()
    plain, model = make_model('nope'), make_model(f'auto_{name}', pos_enc_kwargs={f'auto_{name}': {'init': 0}})
    assert_near(model(x), plain(x), 1e-6)
    gates = [gate for path, gate in make_model(f'auto_{name}').named_parameters() if path.endswith('gate.weight')]
    assert [gate.item() for gate in gates] == [pytest.approx(0.5 / 100)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(x).square().sum().backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, path
    (gate,) = [gate for path, gate in model.named_parameters() if path.endswith('gate.weight')]
    assert gate.abs().item() == pytest.approx(1e-3, rel=1e-3)
