"""nope: no position at all."""
import pytest
import timm

import timm_sape
from harness import assert_near, attend, compare, create, make_grid, make_qkv, make_tokens
from loops import attention
from model_checks import build, images
from timm_sape import PositionEncoding
from timm_sape.encodings import nope
from timm_sape.position import LayerEncodings, SharedEncodings


def test_acts_nowhere():
    encoding = create('nope')
    assert encoding.acts_on() == ()
    assert not any(encoding.overrides(hook) for hook in (*PositionEncoding.HOOKS, 'attend'))
    assert not list(encoding.parameters()) and not list(encoding.buffers())


def test_adds_nothing_to_tokens():
    grid = make_grid((3, 5), 1)
    x = make_tokens(grid)
    given = dict.fromkeys(('pos_embed', 'images', 'patch_size', 'object_index'))
    assert SharedEncodings({'nope': create('nope')})(x, grid, given)[0] is x
    assert LayerEncodings({'nope': create('nope')}).add_before(x, None) is x
    assert LayerEncodings({'nope': create('nope')}).add_after(x, None) is x


@pytest.mark.one_of(2)
@pytest.mark.parametrize('num_keep', [None, 6])
def test_attention(num_keep):
    """Attention without any encoding, and every gradient."""
    grid = make_grid((3, 5), 1, num_keep)
    q, k, v = make_qkv(grid)
    compare(attend(create('nope'), q, k, v, grid), attention(q, k, v), {'q': q, 'k': k, 'v': v})


def test_model_sees_a_set():
    """Moving patches to other places does not change the pooled output of nope. It does change that of ape."""
    x = images()
    y = x.unflatten(2, (3, 8)).flip(2).flatten(2, 3)  # rows of patches from bottom to top
    assert_near(build('nope')(y), build('nope')(x), 1e-5)
    assert (build('ape')(y) - build('ape')(x)).abs().max() > 1e-3


def test_model_has_nothing_of_it():
    model, with_ape = (timm.create_model('test_vit_pos_enc', pos_enc=pos_enc) for pos_enc in ('nope', 'ape'))
    assert model.pos_embed is None
    assert with_ape.state_dict().keys() - model.state_dict().keys() == {'pos_embed'}


def test_block_needs_no_position():
    """Without position inside the blocks, a block takes tokens alone, as many as it is given, as with `ape`."""
    model = build('nope').eval()
    x, position = model.embed(images())
    assert_near(model.blocks[0](x), model.blocks[0](x, position=position), 0)
    assert_near(model.blocks[0](x[:, :9], position=position), model.blocks[0](x[:, :9]), 0)


def test_no_gate():
    with pytest.raises(ValueError, match="'auto_nope': 'nope' has no neutral form"):
        build('auto_nope')


def test_registered_from_its_file():
    assert timm_sape.get_encoding('nope').__module__ == nope.__name__
