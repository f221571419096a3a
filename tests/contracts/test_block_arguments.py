"""What timm's blocks can be built and called with: norms, dropout, drop path, layer scale and masks."""
import pytest
import torch

from common import GRIDS, HEADS
from contract_tools import ONE_GRID, Contracts, check_layers, differ, embedded, fused_attention, gradients, same

contracts = Contracts()


@contracts.add(grids=GRIDS[:2])
def qk_norm(make):
    """q and k are normalised before encodings get them, so their scale does not matter."""
    model = make(qk_norm=True)
    x = make.images()
    check_layers(model, x)
    before = model(x)
    for block in model.blocks:
        block.attn.qkv.weight.data[:64] *= 3
        block.attn.qkv.bias.data[:64] *= 3
    same(model(x), before, 'logits with larger q and k', tol=1e-4)  # because of LayerNorm's eps


@contracts.add(grids=GRIDS[:2])
def scale_attn_norm(make):
    model = make(scale_attn_norm=True)
    check_layers(model, make.images())
    seen = []
    attn = model.blocks[-1].attn
    attn.proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    attn.norm.weight.data.fill_(1)
    attn.norm.bias.data.zero_()
    model(make.images())
    same(seen[0].mean(-1), torch.zeros(seen[0].shape[:2]), 'mean of the normed output')
    same(seen[0].var(-1, unbiased=False), torch.ones(seen[0].shape[:2]), 'variance of the normed output', tol=1e-3)


def dropout(make, name):
    """Check that a rate changes nothing in eval mode, and that a seed decides what it does in training.

    Returns:
        Images, and a model in training with a rate of 1.
    """
    x = make.images()
    plain, model = make(), make(**{name: 0.5})
    same(model(x), plain(x), f'{name} in eval mode')
    model.train()
    outs = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        outs.append(model(x))
    same(outs[2], outs[0], f'{name} with the same seed')
    differ(outs[1], outs[0], f'{name} with another seed')
    gradients(model, model(x).square().sum())
    return x, make(**{name: 1.0}).train()


@contracts.add(grids=ONE_GRID)
def position_dropout(make):
    """It comes after what encodings add to the tokens: at rate 1 nothing is left of tokens or encodings."""
    x, model = dropout(make, 'pos_drop_rate')
    same(embedded(model, x), torch.zeros(2, 20, 32), 'tokens after position dropout')


@contracts.add(grids=ONE_GRID)
def attention_dropout(make):
    """At rate 1 no token sees any other, whether attention is fused or not."""
    for fused in (True, False):
        with fused_attention(fused):
            x, model = dropout(make, 'attn_drop_rate')
        seen = []
        attn = model.blocks[0].attn
        attn.register_forward_hook(lambda module, args, out: seen.append(out))
        model(x)
        same(seen[0], attn.proj.bias.expand(2, 20, 32), 'attention after attention dropout')


def silence_after_blocks(model):
    """Zero what encodings add after each block, for contracts in which blocks shall do nothing."""
    for encoding in model.position_encodings().values():
        if encoding.overrides('embed') and encoding.per_layer:
            for p in encoding.parameters():
                p.data.zero_()


@contracts.add(grids=ONE_GRID)
def projection_dropout(make):
    x, model = dropout(make, 'proj_drop_rate')
    silence_after_blocks(model)
    same(model.forward_features(x), model.norm(embedded(model, x)), 'features after projection dropout')


@contracts.add(grids=ONE_GRID)
def drop_path(make):
    """The rate grows with depth: the first of two blocks is never dropped."""
    x, model = dropout(make, 'drop_path_rate')
    _, (first, last) = model.forward_intermediates(x, output_fmt='NLC')
    differ(first, embedded(model, x)[:, 5:], 'first block')
    same(last, first, 'last block after drop path')


@contracts.add(grids=ONE_GRID)
def layer_scale(make):
    model = make(init_values=0.1)
    x = make.images()
    differ(model.forward_features(x), model.norm(embedded(model, x)), 'blocks')
    for block in model.blocks:
        gradient = gradients(model, model(x).sum())
        assert gradient['blocks.0.ls1.gamma'].abs().max() > 0 and gradient['blocks.0.ls2.gamma'].abs().max() > 0
        block.ls1.gamma.data.zero_()
        block.ls2.gamma.data.zero_()
    silence_after_blocks(model)
    same(model.forward_features(x), model.norm(embedded(model, x)), 'features with layer scale 0')


@contracts.add(takes_long=True)
def attn_mask(make):
    """A bool, additive or causal mask of any shape acts as -inf in the logits, however the model is called."""
    x = make.images()
    num_tokens = 5 + make.grid[0] * make.grid[1]
    generator = torch.Generator().manual_seed(0)
    masks = [
        torch.rand(shape, generator=generator) < 0.7
        for shape in ((num_tokens, num_tokens), (2, 1, num_tokens, num_tokens), (2, 1, 1, num_tokens))]
    for mask in masks:
        mask[..., 0] = True  # no row is empty
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    for fused in (True, False):
        with fused_attention(fused):
            model = make()
        plain = model(x)
        for mask in masks:
            check_layers(model, x, mask, attn_mask=mask)
            out = model(x, attn_mask=mask)
            differ(out, plain, 'attn_mask')
            additive = torch.zeros(mask.shape).masked_fill(~mask, float('-inf'))
            same(model(x, attn_mask=additive), out, 'additive mask')
            check_layers(model, x, mask & causal, attn_mask=mask, is_causal=True)
        check_layers(model, x, mask & causal, attn_mask=additive, is_causal=True)
        features = model.forward_features(x, attn_mask=mask)
        same(model.forward_head(features), out, 'features with a mask')
        same(model.forward_intermediates(x, attn_mask=mask)[0], features, 'intermediates with a mask')
        last = model.get_intermediate_layers(x, attn_mask=mask, norm=True)[0]
        same(last, features[:, 5:], 'intermediate layers with a mask')
        soft = torch.randn(2, HEADS, num_tokens, num_tokens, generator=generator)
        check_layers(model, x, soft, attn_mask=soft)
        check_layers(model, x, causal, is_causal=True)
        same(model(x, is_causal=True), model(x, attn_mask=causal), 'causal mask')
        same(model.forward_intermediates(x, is_causal=True)[0], model.forward_features(x, is_causal=True), 'causal')
        model.set_grad_checkpointing()
        same(model(x, attn_mask=masks[0]), model(x, attn_mask=masks[0].clone()), 'mask with checkpointing')
        check_layers(model, x, masks[0], attn_mask=masks[0])


@contracts.add(grids=ONE_GRID)
def empty_rows(make):
    """A token that may attend to nothing gets zeros from attention, fused or not, and never NaN."""
    x = make.images()
    num_tokens = 5 + make.grid[0] * make.grid[1]
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool)
    mask[7] = False
    mask[8] = torch.arange(num_tokens) == num_tokens - 1  # which an encoding may forbid some heads
    additive = torch.zeros(mask.shape).masked_fill(~mask, float('-inf'))
    outs = []
    for fused in (True, False):
        with fused_attention(fused):
            model = make()
        seen, attn = [], model.blocks[0].attn
        attn.proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        for each in (mask, additive):
            out = model(x, attn_mask=each)
            outs.append(out)
            same(out, outs[0], 'fused or not, bool or additive')
            same(seen[-1][:, 7], torch.zeros(2, 32), 'a token that attends to nothing')
            assert all(gradient.isfinite().all() for gradient in gradients(model, out.square().sum()).values())
    for wrong in (mask.expand(HEADS, -1, -1), mask.expand(2, -1, -1)):
        with pytest.raises(ValueError, match='for each image or for each head'):
            model(x, attn_mask=wrong)


test_contract = contracts.test()
