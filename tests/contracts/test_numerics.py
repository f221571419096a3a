"""Numerics: explicit and fused attention agree, and low precision loses no more than it has to."""
import copy
import itertools

import torch

from common import GRIDS
from contract_tools import Contracts, fused_attention, gradients, same, same_gradients
from timm_sape.ops.backend import using_backend

contracts = Contracts()


@contracts.add
def fused_attention_switch(make):
    x = make.images()
    logits, grads = [], []
    for enable in (True, False):
        with fused_attention(enable):
            model = make()
        assert all(block.attn.fused_attn is enable for block in model.blocks)
        logits.append(model(x))
        grads.append(gradients(model, logits[-1].square().sum()))
    same(logits[1], logits[0], 'logits without fused attention')
    same_gradients(grads[1], grads[0], tol=1e-4)


LOW = {torch.bfloat16: 0.05, torch.float16: 0.007}  # by dtype: the relative error that rounding may cause


def check_low(actual, expected, dtype, what):
    assert actual.isfinite().all(), f'{what}: not finite'
    error = (actual.float() - expected).norm() / expected.norm()
    assert error < LOW[dtype], f'{what} in {dtype}: off by {error:.2g}'


@contracts.add
def autocast(make):
    x = make.images()
    for fused in (True, False):
        with fused_attention(fused):
            model = make()
        features = model.forward_features(x)
        for dtype in LOW:
            with torch.autocast('cpu', dtype):
                check_low(model.forward_features(x), features, dtype, 'autocast')
                loss = model(x).float().square().sum()
            gradients(model, loss)


@contracts.add(grids=GRIDS[:2], takes_long=True)
def half(make):
    """`model.half()`, `.bfloat16()`, built with `dtype=`, and back."""
    x = make.images()
    for dtype, fused in itertools.product(LOW, (True, False)):
        with fused_attention(fused):
            expected, model, built = make(), make().to(dtype), make(dtype=dtype)
        for low in (model, built):
            assert {p.dtype for p in low.parameters()} == {dtype}
            features = low.forward_features(x.to(dtype))
            assert features.dtype == dtype
            check_low(features, expected.forward_features(x), dtype, 'half')
            assert low(x.to(dtype)).dtype == dtype
            gradients(low, low(x.to(dtype)).square().sum())
        model.set_input_size(img_size=make.img_size((4, 6)))
        expected.set_input_size(img_size=make.img_size((4, 6)))
        y = make.images(grid=(4, 6))
        check_low(model.forward_features(y.to(dtype)), expected.forward_features(y), dtype, 'half at another size')
        back = make().to(dtype).float()
        check_low(back.forward_features(x), make().forward_features(x), dtype, 'back from half')
        train = make(patch_drop_rate=0.5, attn_drop_rate=0.1).to(dtype).train()
        gradients(train, train(x.to(dtype)).square().sum())
    double = make().double()
    same(double(x.double()), make()(x), 'float64')


@contracts.add
def float32_bias(make):
    """A bias that depends on content is computed in float32 from low-precision q and k, by autocast and without it."""
    x = make.images()
    for dtype, by_autocast in itertools.product(LOW, (True, False)):
        model = make() if by_autocast else make().to(dtype)
        calls = []
        for encoding in model.position_encodings().values():
            if encoding.overrides('content_bias'):
                def recorded(q, k, grid, encoding=encoding, content_bias=encoding.content_bias):
                    bias = content_bias(q, k, grid)
                    calls.append((encoding, q, k, grid, bias))
                    return bias

                encoding.content_bias = recorded
        with using_backend('reference'), torch.autocast('cpu', dtype, enabled=by_autocast):
            model(x if by_autocast else x.to(dtype))
        for encoding, q, k, grid, bias in calls:
            assert q.dtype == dtype and bias.dtype == torch.float32, f'bias is {bias.dtype}'
            del encoding.content_bias
            wide = copy.deepcopy(encoding).double()
            # Distances are square roots, so where the exact one is 0, the root of a rounding error is left.
            same(bias, wide.content_bias(q.double(), k.double(), grid), f'bias computed in {dtype}', tol=1e-4)


test_contract = contracts.test()
