"""A forward pass computes nothing twice, and keeps attention fused where it can."""
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import timm_sape
from common import POS_ENCS, Maker
from timm_sape import BlockRotaryEncoding, FixedEncoding, ops

ALONE = [pos_enc for pos_enc in POS_ENCS if 'toy' not in pos_enc]
FIXED = [name for name in timm_sape.list_encodings() if issubclass(timm_sape.get_encoding(name), FixedEncoding)]
BLOCKS = [name for name in timm_sape.list_encodings() if issubclass(timm_sape.get_encoding(name), BlockRotaryEncoding)]
BIASES = [name for name in timm_sape.list_encodings() if timm_sape.get_encoding(name).overrides('position_bias')]


def used(*args, **kwargs):
    raise AssertionError('computed')


@pytest.mark.parametrize('pos_enc', ALONE)
def test_attention_stays_fused(pos_enc, monkeypatch):
    """Only encodings of values need the probabilities."""
    monkeypatch.setattr(ops, 'probabilities', used)
    make = Maker(pos_enc)
    if 'irpe_qkv' in pos_enc:
        with pytest.raises(AssertionError, match='computed'):
            make()(make.images())
    else:
        make()(make.images()).sum().backward()


@pytest.mark.parametrize('pos_enc', [pos_enc for pos_enc in ALONE if 'irpe_qkv' not in pos_enc])
def test_evaluation_on_a_cpu_is_fused(pos_enc):
    """Its fused kernel wants masks of two or four dimensions, and channels without gaps."""
    make = Maker(pos_enc)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        make()(make.images())


@pytest.mark.parametrize('name', FIXED)
def test_what_has_no_parameters_is_kept(name, monkeypatch):
    """On the model's own grid a table is not computed again; on another grid it is."""
    make = Maker(name)
    model = make(dynamic_img_size=True)
    monkeypatch.setattr(timm_sape.get_encoding(name), 'compute', used)
    model(make.images())
    with pytest.raises(AssertionError, match='computed'):
        model(make.images(grid=(4, 6)))


@pytest.mark.parametrize('hook, name', [
    *(('position_bias', name) for name in BIASES), *(('blocks', name) for name in BLOCKS)])
def test_made_once(hook, name, monkeypatch):
    """A bias, and matrices for q and k together: once in each layer, or once for the model if the layers share it."""
    make = Maker(name)
    model = make(depth=3)
    cls, calls = timm_sape.get_encoding(name), []
    method = getattr(cls, hook)
    monkeypatch.setattr(cls, hook, lambda self, grid: calls.append(grid) or method(self, grid))
    model(make.images())
    assert len(calls) == (3 if cls.per_layer else 1)
