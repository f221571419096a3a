"""The keyword `bias_scale` of cope: what is looked up is divided by sqrt(d), or is not."""
import pytest
import timm
import torch
from timm.models import save_for_hf

import bias_checks
from bias_checks import SIZES, bias_of, make_inputs
from common import randomize
from harness import assert_near, catches, compare, create, make_grid, where
from model_checks import build, check_model, check_neutral_start, images, own_encodings
from reference_cope import cope_between, cope_bias
from timm_sape.encodings import cope

CASES = [  # grid, prefix tokens, kept patches, trained grid
    ((3, 5), 0, None, None), ((3, 5), 5, None, None), ((1, 7), 1, None, None), ((1, 1), 1, None, None),
    ((3, 5), 1, 8, None), ((4, 4), 0, 6, (3, 5))]


def check(grid_size, num_prefix_tokens=0, num_keep=None, trained_on=None, direction='literal', **keywords):
    """The bias and every gradient in float64. The reference divides, as RAM does."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create(
        'cope', trained_on or grid_size, num_prefix_tokens, bias_scale='one', direction=direction, **SIZES, **keywords)
    inputs = make_inputs(grid, **SIZES)
    reference = {'literal': cope_bias, 'between': cope_between}[direction]
    divided = reference(
        *inputs[:2], encoding.table, grid_size, ref_num_patches=trained_on and trained_on[0] * trained_on[1],
        **where(grid))
    leaves = {'q': inputs[0], 'k': inputs[1], 'table': encoding.table}
    compare(bias_of(encoding, grid, inputs), SIZES['head_dim'] ** 0.5 * divided, leaves)


@pytest.mark.one_of(2)
@pytest.mark.parametrize('direction', ['literal', 'between'])
@pytest.mark.parametrize('case', CASES, ids=str)
def test_equations(case, direction):
    check(*case, direction=direction)
    check(*case, direction=direction, npos=3)


def divided(self, q, k, grid, content_bias=cope.ContextualPositionEncoding.content_bias):
    return content_bias(self, q, k, grid) / self.head_dim ** 0.5


def other_gates(self, q, k, grid, content_bias=cope.ContextualPositionEncoding.content_bias):
    return content_bias(self, q, k * self.head_dim ** 0.5, grid)


@pytest.mark.one_of(3)
@pytest.mark.parametrize('mutant', [divided, other_gates])
def test_mutants_are_caught(mutant, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    catches(lambda: check((3, 5), 1), monkeypatch, cope.ContextualPositionEncoding, 'content_bias', mutant)


def test_float32():
    bias_checks.check_float32('cope', bias_scale='one')


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half(dtype):
    bias_checks.check_half('cope', dtype, bias_scale='one')


def test_default_divides():
    """The undivided form is sqrt(d) times the default, which is that of 'head_dim'."""
    grid = make_grid((3, 5), 1)
    inputs = make_inputs(grid, **SIZES)
    plain, divided, undivided = (
        bias_of(create('cope', (3, 5), 1, **SIZES, **keywords), grid, inputs)
        for keywords in ({}, {'bias_scale': 'head_dim'}, {'bias_scale': 'one'}))
    assert torch.equal(plain, divided)
    assert_near(undivided, SIZES['head_dim'] ** 0.5 * plain, 1e-14)


@pytest.mark.one_of(2)
@pytest.mark.parametrize('composition', ['{}', 'ape+{}'])
def test_model(composition):
    check_model('cope', composition, {'bias_scale': 'one', 'npos': 10})


def test_neutral_start():
    """Its table starts at 0, so the gate starts at 1."""
    plain, model = build('ape', random=False), build('ape+cope', {'bias_scale': 'one'}, random=False)
    assert_near(model(images()), plain(images()), 1e-6)
    with pytest.raises(ValueError, match='would never learn'):
        check_neutral_start('cope', {'bias_scale': 'one'})


def test_saved_config(tmp_path):
    """The keyword changes no shape, so the config has to say it."""
    model = randomize(build('ape+cope', {'bias_scale': 'one'}, random=False))
    save_for_hf(model, tmp_path, safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert own_encodings(loaded, 'cope')[0].bias_scale == 1
    assert torch.equal(loaded(images()), model(images()))
    with pytest.raises(ValueError, match='bias_scale'):
        timm.create_model(
            f'local-dir:{tmp_path}', pretrained=True, pos_enc_kwargs={'cope': {'bias_scale': 'head_dim'}})


@pytest.mark.parametrize('value', ['learned', 1, None, ['one']])
def test_wrong_value(value):
    with pytest.raises(ValueError, match="'cope': bias_scale must be 'head_dim' or 'one', got"):
        create('cope', bias_scale=value)
